"""Page sizes and page tokens, the same for every list."""

import base64
import binascii

from atoll.common.errors import InvalidInput

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1_000


def page_size(requested: int) -> int:
    """How many items to return. Raises InvalidInput for a negative size."""
    if requested < 0:
        raise InvalidInput(f"page_size is {requested}, expected 0..{MAX_PAGE_SIZE}", field="page_size")
    return min(requested or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode_page_token(last_key: str) -> str:
    """The token that continues after an item's key; opaque to clients."""
    return base64.urlsafe_b64encode(last_key.encode()).decode()


def decode_page_token(token: str) -> str | None:
    """The key to continue after, None at the start. Raises InvalidInput for a token that we did not make."""
    if not token:
        return None
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, UnicodeEncodeError):
        raise InvalidInput("page_token was not made by this service", field="page_token") from None


def decode_number_token(token: str) -> int | None:
    """The same for a list that is ordered by numbers of 64 bits. Raises InvalidInput for any other token."""
    key = decode_page_token(token)
    if key is None:
        return None
    if not (key.isascii() and key.isdigit() and len(key) < 19):
        raise InvalidInput("page_token was not made by this list", field="page_token")
    return int(key)
