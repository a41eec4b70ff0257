"""What a tokenizer.json makes of every id: text, kind and decoder, in a form that two services can compare.

Merges, pre-tokenizer and template are left out: they only matter where text becomes ids, and scoring never does that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.common.errors import InvalidInput
from pydantic import JsonValue

BLOCK = 256
"""Ids to a digest: a vocabulary of 150,000 is compared with 19 KB."""


class TokenKind(StrEnum):
    """ADDED and SPECIAL stand beside the model's vocabulary; SPECIAL tokens are left out of decoded text."""

    TOKEN = "token"
    ADDED = "added"
    SPECIAL = "special"


@dataclass(frozen=True)
class Token:
    """One id. `text` and `kind` are None for an id without a token. Example: Token(2, "<|im_end|>", SPECIAL)."""

    id: int
    text: str | None
    kind: TokenKind | None

    def line(self) -> str:
        """Its line in the text that is digested."""
        return _canonical([self.id, self.text, None if self.kind is None else self.kind.value]) + "\n"

    def __str__(self) -> str:
        return "no token" if self.kind is None else f"{self.kind.value} {self.text!r}"


class TokenMap:
    """Tokens by id, and how their texts become bytes.

    Example: TokenMap({0: Token(0, "a", TokenKind.TOKEN)}, '{"type":"ByteLevel"}')
    """

    def __init__(self, tokens: Mapping[int, Token], decoder: str) -> None:
        self._tokens = tokens
        self.decoder = decoder
        self.count = max(tokens, default=-1) + 1
        """One more than the largest id."""
        starts = range(0, self.count, BLOCK)
        self.block_digests = b"".join(
            hashlib.sha256("".join(token.line() for token in self.block(start)).encode()).digest() for start in starts
        )
        self.digest = hashlib.sha256(self.block_digests + decoder.encode()).hexdigest()

    @classmethod
    def from_tokenizer_json(cls, data: bytes) -> "TokenMap":
        """Raises InvalidInput for bytes that are not a tokenizer.json or whose model has no vocabulary."""
        try:
            document = json.loads(data)
            tokens = {
                token_id: Token(token_id, text, TokenKind.TOKEN) for token_id, text in _vocabulary(document["model"])
            }
            for added in document.get("added_tokens") or []:
                kind = TokenKind.SPECIAL if added["special"] else TokenKind.ADDED
                tokens[int(added["id"])] = Token(int(added["id"]), str(added["content"]), kind)
            return cls(tokens, _canonical(_decoder(document.get("decoder"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"not a tokenizer.json: {type(error).__name__} {error}", field="tokenizer.json"
            ) from None

    def token(self, token_id: int) -> Token:
        return self._tokens.get(token_id, Token(token_id, None, None))

    def block(self, start: int) -> Sequence[Token]:
        """The tokens of ids start <= id < start + BLOCK, none behind the last one."""
        return [self.token(token_id) for token_id in range(start, min(start + BLOCK, self.count))]


def first_different_block(ours: bytes, theirs: bytes) -> int | None:
    """The first id of the first block whose digests differ, or that one side does not have; None: all are equal."""
    size = hashlib.sha256().digest_size
    for at in range(0, max(len(ours), len(theirs)), size):
        if ours[at : at + size] != theirs[at : at + size]:
            return at // size * BLOCK
    return None


def _vocabulary(model: Mapping[str, JsonValue]) -> list[tuple[int, str]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return [(int(str(token_id)), text) for text, token_id in vocabulary.items()]
    if isinstance(vocabulary, list):  # Unigram: [text, score] in the order of the ids
        return [(token_id, str(entry[0])) for token_id, entry in enumerate(vocabulary) if isinstance(entry, list)]
    raise TypeError(f"its vocabulary is a {type(vocabulary).__name__}")


def _decoder(decoder: JsonValue) -> JsonValue:
    if isinstance(decoder, dict):
        if decoder.get("type") == "ByteLevel":
            return {"type": "ByteLevel"}
        if decoder.get("type") == "Sequence":
            parts = decoder.get("decoders")
            return {**decoder, "decoders": [_decoder(part) for part in parts] if isinstance(parts, list) else parts}
    return decoder


def _canonical(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
