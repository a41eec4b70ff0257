"""The shape of a family's name. Whoever resolves it decides whether it exists."""

import re

from atoll.common.errors import InvalidInput

_BUNDLED = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")


def check_family(value: str) -> str:
    """Returns the name, or raises InvalidInput unless it is like "grpo" or "package.module:Class"."""
    if not _BUNDLED.fullmatch(value) and not (_DOTTED.fullmatch(value) and len(value) <= 255):
        raise InvalidInput(
            f"family is {value[:80]!r}, expected a name such as 'grpo' or 'package.module:Class'", field="family"
        )
    return value
