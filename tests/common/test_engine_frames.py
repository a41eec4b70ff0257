"""Answers that do not fit what was sent are errors; only the shapes that a real engine never sends are made up here."""

import json
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from atoll.common.engine_frames import ChoiceReader, Frame, read_score, split_events, text_of_error
from atoll.common.engine_types import EngineProtocolError, EngineRefused, EngineUnavailable, FinishReason
from hypothesis import given
from hypothesis import strategies as st

VOCAB_SIZE = 1024

FRAME: Frame = {
    "text": " space",
    "output_ids": [492, 1023],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "1:1",
        "weight_versions": [{"version": "1:0", "start": 0, "end": 1}, {"version": "1:1", "start": 1, "end": 2}],
        "output_token_logprobs": [(-2.0, 492, None), (-3.0, 1023, None)],
        "output_top_logprobs": [[(-2.0, 492, None)], [(-1.0, 7, None)]],
    },
}

SCORE: Frame = {
    "meta_info": {
        "weight_version": "1:0",
        "input_token_logprobs": [(None, 9, None), (-2.0, 5, None), (-3.0, 0, None)],
        "input_top_logprobs": [None, [(-1.0, 3, None)], [(-1.5, 4, None)]],
    }
}


def read(frame: Frame, top_k: int = 1) -> None:
    ChoiceReader(VOCAB_SIZE, top_k).read(frame)


def test_the_frame_that_the_cases_below_damage_is_read() -> None:
    chunk = ChoiceReader(VOCAB_SIZE, 1).read(FRAME)
    assert chunk.token_ids.tolist() == [492, 1023]
    assert chunk.log_probs.tolist() == [-2.0, -3.0]
    assert chunk.finish is not None
    assert [(s.weight_version, s.start, s.end) for s in chunk.finish.spans] == [("1:0", 0, 1), ("1:1", 1, 2)]


def test_spans_that_leave_a_token_out_are_an_error() -> None:
    frame = deepcopy(FRAME)
    frame["meta_info"]["weight_versions"] = [{"version": "1:0", "start": 0, "end": 1}]
    with pytest.raises(EngineProtocolError, match="cover 1 of 2"):
        read(frame)
    frame["meta_info"]["weight_versions"] = [{"version": "1:0", "start": 1, "end": 2}]
    with pytest.raises(EngineProtocolError, match="do not follow"):
        read(frame)


def test_an_engine_that_repeats_the_reply_in_every_frame_is_an_error() -> None:
    reader = ChoiceReader(VOCAB_SIZE, 1)
    reader.read(FRAME)
    with pytest.raises(EngineProtocolError, match="incremental-streaming-output"):
        reader.read(FRAME)


def test_a_log_prob_of_another_token_is_an_error() -> None:
    frame = deepcopy(FRAME)
    frame["meta_info"]["output_token_logprobs"][0] = (-2.0, 491, None)
    with pytest.raises(EngineProtocolError, match="token 491, expected token 492"):
        read(frame)


def test_a_missing_log_prob_is_an_error() -> None:
    frame = deepcopy(FRAME)
    frame["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineProtocolError, match="expected 2 log-probs, got 1"):
        read(frame)
    frame["meta_info"]["output_token_logprobs"].append((None, 1023, None))
    with pytest.raises(EngineProtocolError, match="finite"):
        read(frame)


def test_fewer_likeliest_tokens_than_asked_for_are_an_error() -> None:
    with pytest.raises(EngineProtocolError, match="2 rows of 2 likeliest"):
        read(FRAME, top_k=2)


def test_a_frame_without_a_field_is_an_error_that_names_it() -> None:
    frame = deepcopy(FRAME)
    del frame["meta_info"]["completion_tokens"]
    with pytest.raises(EngineProtocolError, match="completion_tokens"):
        read(frame)


def test_a_reply_without_spans_is_an_error_unless_it_has_no_token() -> None:
    frame = deepcopy(FRAME)
    del frame["meta_info"]["weight_versions"]
    with pytest.raises(EngineProtocolError, match="cover 0 of 2"):
        read(frame)


def test_a_cut_reply_that_repeats_its_last_token_counts_it_once() -> None:
    reader = ChoiceReader(VOCAB_SIZE, 1)
    first = deepcopy(FRAME)
    first["meta_info"]["finish_reason"] = None
    reader.read(first)
    last = deepcopy(FRAME)
    last["output_ids"] = [1023]
    last["meta_info"]["finish_reason"] = {"type": "abort", "message": "cut"}
    chunk = reader.read(last)
    assert len(chunk.token_ids) == len(chunk.log_probs) == 0
    assert chunk.finish is not None
    assert chunk.finish.reason is FinishReason.ABORT
    assert chunk.finish.usage.completion_tokens == 2


def test_a_refusal_inside_a_stream_is_a_refusal() -> None:
    frame = deepcopy(FRAME)
    frame["meta_info"]["finish_reason"] = {"type": "abort", "message": "bad grammar", "status_code": 400}
    with pytest.raises(EngineRefused, match="bad grammar"):
        read(frame)
    frame["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory", "status_code": 503}
    with pytest.raises(EngineUnavailable, match="out of memory"):
        read(frame)


def test_zero_stands_for_the_last_token_of_the_vocabulary_in_a_score_and_for_no_other() -> None:
    score = read_score(SCORE, np.array([5, 1023], np.int32), 1, VOCAB_SIZE)
    assert score.log_probs.tolist() == [-2.0, -3.0]
    with pytest.raises(EngineProtocolError, match="token 0, expected token 1022"):
        read_score(SCORE, np.array([5, 1022], np.int32), 1, VOCAB_SIZE)


def test_a_score_of_another_length_is_an_error() -> None:
    with pytest.raises(EngineProtocolError, match="expected 2 input log-probs, got 3"):
        read_score(SCORE, np.array([5], np.int32), 1, VOCAB_SIZE)


def test_a_likeliest_id_outside_the_vocabulary_is_an_error() -> None:
    score = deepcopy(SCORE)
    row = score["meta_info"]["input_top_logprobs"][1]
    assert row is not None
    row[0] = (-0.5, VOCAB_SIZE, None)
    with pytest.raises(EngineProtocolError, match="id 1024 is among the likeliest, outside the vocabulary of 1024"):
        read_score(score, np.array([5, 1023], np.int32), 1, VOCAB_SIZE)


@pytest.mark.parametrize("entry", [[], [-2.0], [-2.0, 2**40, None], None, "x"])
def test_an_entry_of_another_shape_is_an_error_of_the_engine(entry: object) -> None:
    score: Any = deepcopy(SCORE)
    score["meta_info"]["input_token_logprobs"][1] = entry
    with pytest.raises(EngineProtocolError):
        read_score(score, np.array([5, 1023], np.int32), 1, VOCAB_SIZE)


async def events(*blocks: bytes) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    return [event async for event in split_events(source())]


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r")), max_size=5), st.data())
async def test_events_do_not_depend_on_where_the_network_cuts_them(texts: list[str], data: st.DataObject) -> None:
    payloads = [json.dumps({"text": text}).encode() for text in texts]
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in [*payloads, b"[DONE]"])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    blocks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert await events(*blocks) == payloads


async def test_a_stream_that_ends_without_done_is_an_error() -> None:
    with pytest.raises(EngineUnavailable, match="DONE"):
        await events(b'data: {"text": "a"}\n\n', b"data: [DO")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "unknown field"}', "unknown field"),
        (b'{"success": false, "message": "no such model"}', "no such model"),
        (b"Internal Server Error", "Internal Server Error"),
    ],
)
def test_the_message_is_found_in_every_shape_of_an_error(body: bytes, message: str) -> None:
    assert text_of_error(body) == message
