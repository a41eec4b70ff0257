"""Receipts: ids of samples that say whether this deployment handed them out."""

import hashlib
import hmac
import re
import secrets

_RANDOM_DIGITS = 24
_CHECK_DIGITS = 8
_FORM = re.compile(rf"[0-9a-f]{{{_RANDOM_DIGITS + _CHECK_DIGITS}}}")


def is_receipt(text: str) -> bool:
    """Whether the text has a receipt's form."""
    return _FORM.fullmatch(text) is not None


class Receipts:
    """Hands out receipts and recognises them: 24 random hexadecimal digits and 8 of a keyed checksum.

    A receipt that was handed out and whose sample never became durable is told from one that never was without a
    write: the checksum binds it to its scenario under the deployment's key, and a made-up receipt passes once in
    2**32 tries. That only chooses between two refusals; nothing is granted by it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, scenario: str) -> str:
        """A fresh receipt of the scenario."""
        random_part = secrets.token_hex(_RANDOM_DIGITS // 2)
        return random_part + self._check(scenario, random_part)

    def was_issued(self, scenario: str, receipt: str) -> bool:
        """Whether `issue` made this receipt for this scenario."""
        if not is_receipt(receipt):
            return False
        random_part, check = receipt[:_RANDOM_DIGITS], receipt[_RANDOM_DIGITS:]
        expected = self._check(scenario, random_part)
        return hmac.compare_digest(check, expected)

    def _check(self, scenario: str, random_part: str) -> str:
        text = f"receipt/{scenario}/{random_part}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:_CHECK_DIGITS]
