"""What two tokenizers make of ids, compared block by block."""

import json

import pytest
from atoll.common.errors import InvalidInput
from atoll.common.token_map import BLOCK, Token, TokenKind, TokenMap, first_different_block
from pydantic import JsonValue

SIZE = 600


def document(**changes: JsonValue) -> dict[str, JsonValue]:
    vocabulary: JsonValue = {f"t{token_id}": token_id for token_id in range(SIZE)}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b"]},
        "added_tokens": [{"id": SIZE + 1, "content": "<end>", "special": True, "lstrip": False}],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True},
        "pre_tokenizer": None,
        **changes,
    }


def read(**changes: JsonValue) -> TokenMap:
    return TokenMap.from_tokenizer_json(json.dumps(document(**changes)).encode())


def test_ids_are_tokens_special_tokens_or_nothing() -> None:
    tokens = read()
    assert tokens.count == SIZE + 2
    assert tokens.token(5) == Token(5, "t5", TokenKind.TOKEN)
    assert tokens.token(SIZE) == Token(SIZE, None, None)
    assert tokens.token(SIZE + 1) == Token(SIZE + 1, "<end>", TokenKind.SPECIAL)
    assert [token.id for token in tokens.block(512)] == list(range(512, SIZE + 2))


def test_lines_are_those_of_the_contract() -> None:
    assert Token(5, "café", TokenKind.TOKEN).line() == '[5,"caf\\u00e9","token"]\n'
    assert Token(6, None, None).line() == "[6,null,null]\n"


def test_what_does_not_touch_the_bytes_of_an_id_does_not_matter() -> None:
    other = read(
        model={"merges": [], "vocab": {f"t{n}": n for n in reversed(range(SIZE))}, "type": "BPE"},
        decoder={"type": "ByteLevel", "trim_offsets": False},
        pre_tokenizer={"type": "Whitespace"},
    )
    assert other.digest == read().digest


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        ({"added_tokens": [{"id": SIZE + 1, "content": "<stop>", "special": True}]}, 512),
        ({"added_tokens": [{"id": SIZE + 1, "content": "<end>", "special": False}]}, 512),
        ({"added_tokens": []}, 512),
        ({"model": {"vocab": {f"t{n}": n ^ 1 for n in range(SIZE)}}}, 0),
        ({"model": {"vocab": {("x" if n == 300 else f"t{n}"): n for n in range(SIZE)}}}, 256),
        ({"decoder": {"type": "Metaspace"}}, None),
    ],
    ids=["another text", "not special", "one less", "swapped", "one token", "the decoder"],
)
def test_every_difference_changes_the_digest_and_is_found_in_its_block(
    changes: dict[str, JsonValue], block: int | None
) -> None:
    ours, theirs = read(), read(**changes)
    assert ours.digest != theirs.digest
    assert first_different_block(ours.block_digests, theirs.block_digests) == block


def test_a_vocabulary_that_goes_on_differs_where_the_other_ends() -> None:
    shorter = TokenMap({n: Token(n, "a", TokenKind.TOKEN) for n in range(BLOCK)}, "null")
    longer = TokenMap({n: Token(n, "a", TokenKind.TOKEN) for n in range(2 * BLOCK)}, "null")
    assert first_different_block(shorter.block_digests, longer.block_digests) == BLOCK


def test_a_unigram_vocabulary_is_a_list_in_the_order_of_the_ids() -> None:
    tokens = read(model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}, added_tokens=[])
    assert [tokens.token(n).text for n in range(tokens.count)] == ["<unk>", "a"]


@pytest.mark.parametrize("data", [b"no json", b"[]", b'{"model": {"type": "BPE"}}', b'{"model": {"vocab": 3}}'])
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a tokenizer"):
        TokenMap.from_tokenizer_json(data)
