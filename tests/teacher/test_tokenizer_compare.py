"""CompareTokenizer: where a student's tokenizer and the teacher's differ."""

import json
from pathlib import Path

import pytest
from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.errors import InvalidInput
from atoll.common.token_map import TokenMap
from atoll.teacher.score_service import compared

from tests.fakes.scoring_server import VOCABULARY, write_model


@pytest.fixture
def tokens(tmp_path: Path) -> TokenMap:
    return TokenMap.from_tokenizer_json((write_model(tmp_path / "model") / "tokenizer.json").read_bytes())


def asked(tokens: TokenMap) -> teacher_service_pb2.CompareTokenizerRequest:
    return teacher_service_pb2.CompareTokenizerRequest(
        token_count=tokens.count, block_digests=tokens.block_digests, decoder=tokens.decoder
    )


def test_the_same_tokenizer_is_the_same(tokens: TokenMap) -> None:
    answer = compared(asked(tokens), tokens)
    assert answer.same and answer.token_count == VOCABULARY
    assert not answer.tokens and not answer.decoder


def test_another_decoder_is_told(tokens: TokenMap) -> None:
    request = asked(tokens)
    request.decoder = "null"
    answer = compared(request, tokens)
    assert not answer.same
    assert json.loads(answer.decoder) == {"type": "ByteLevel"}
    assert not answer.tokens


def test_the_teachers_tokens_of_the_first_different_block_are_told(tokens: TokenMap) -> None:
    request = asked(tokens)
    request.block_digests = bytes(32)
    answer = compared(request, tokens)
    assert not answer.same
    assert [token.id for token in answer.tokens] == list(range(VOCABULARY))
    assert (answer.tokens[5].text, answer.tokens[5].kind) == ("t5", "token")
    assert (answer.tokens[-1].text, answer.tokens[-1].kind) == ("<end>", "special")


def test_digests_that_do_not_add_up_to_the_ids_are_refused(tokens: TokenMap) -> None:
    request = asked(tokens)
    request.token_count = 257
    with pytest.raises(InvalidInput, match="expected 64 for 257 ids"):
        compared(request, tokens)
