"""Conversations through the gateway: a later prompt is the earlier tokens, and a report over the turns is one row."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atoll.api.gateway.v1 import sample_service_pb2, sample_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.families.samples import SampleView
from atoll.gateway.sample_packing import unpack_tensors
from atoll.trainer.batch_reader import BatchReader, rows_of
from tokenizers import Tokenizer

from tests.fakes.fake_engine import END_TOKEN, FakeEngine
from tests.gateway.http_gateway import Answer, HttpGateway, http_gateway

SCENARIO = "tuned"
QUESTION = {"role": "user", "content": "Say hello."}
FOLLOW_UP = {"role": "user", "content": "And now?"}


class SpellingEngine(FakeEngine):
    """Replies "hello" a letter at a time, as the tokenizer would never write it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._letters = [tokenizer.encode(letter).ids[0] for letter in "hello"]
        self.behaviour.length = len(self._letters) + 1

    async def _sample(self, input_ids: list[int], position: int, first_version: str) -> tuple[str, int]:
        version, _ = await super()._sample(input_ids, position, first_version)
        return version, self._letters[position % len(self._letters)]

    def _text(self, token: int, sent: int) -> str:
        return "" if token == END_TOKEN else str(self._tokenizer.decode([token]))


@pytest.fixture
async def speller(tiny_models: Path) -> AsyncIterator[SpellingEngine]:
    tokenizer = Tokenizer.from_file(str(tiny_models / "student" / "tokenizer.json"))
    async with SpellingEngine(tokenizer) as running:
        yield running


@pytest.fixture
async def talk(registry_address: str, speller: SpellingEngine, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    async with http_gateway(registry_address, tmp_path, (speller.url,)) as running:
        yield running


async def say(web: HttpGateway, *messages: dict[str, str], **fields: Any) -> Answer:
    answer = await web.chat({"model": SCENARIO, "messages": list(messages), **fields})
    assert answer.status == 200, answer.body
    return answer


def reply_of(answer: Answer) -> dict[str, str]:
    message = answer.body["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


async def tokens_of(web: HttpGateway, answer: Answer) -> tuple[list[int], int]:
    packed = await web.gateway.samples.get(SCENARIO, answer.headers["x-atoll-receipt"])
    return unpack_tensors(packed).token_ids.tolist(), packed.sample.prompt_length


async def rows_of_job(web: HttpGateway, job_id: str, receipts: list[str]) -> list[SampleView]:
    """What a trainer reads of a batch."""
    async with open_channel(f"127.0.0.1:{web.gateway.server.port}") as channel:
        return [item.sample for item in await BatchReader(channel).read(job_id, receipts)]


async def test_a_request_that_goes_on_from_a_sample_is_its_tokens_and_the_new_ones(
    talk: HttpGateway, speller: SpellingEngine
) -> None:
    first = await say(talk, QUESTION)
    second = await say(talk, QUESTION, reply_of(first), FOLLOW_UP)
    third = await say(talk, QUESTION, reply_of(first), FOLLOW_UP, reply_of(second), FOLLOW_UP)
    tokens = [await tokens_of(talk, answer) for answer in (first, second, third)]
    for (earlier, _), (later, prompt_length) in itertools.pairwise(tokens):
        assert later[: len(earlier)] == earlier and prompt_length > len(earlier)
    assert [request["input_ids"] for request in speller.requests] == [all_[:p] for all_, p in tokens]


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: [{"role": "user", "content": "Say hallo."}, *messages[1:]],
        lambda messages: [messages[0], {"role": "assistant", "content": "hello!"}, messages[2]],
    ],
    ids=["another question", "another reply"],
)
async def test_a_request_that_goes_on_from_nothing_recorded_is_rendered(
    talk: HttpGateway, speller: SpellingEngine, change: Any
) -> None:
    first = await say(talk, QUESTION)
    await say(talk, *change([QUESTION, reply_of(first), FOLLOW_UP]))
    earlier, _ = await tokens_of(talk, first)
    assert speller.requests[1]["input_ids"][: len(earlier)] != earlier


async def test_a_reply_that_lost_its_stop_string_is_taken_as_the_client_sends_it(
    talk: HttpGateway, speller: SpellingEngine
) -> None:
    first = await say(talk, QUESTION, stop="lo")
    assert reply_of(first)["content"] == "hel"
    await say(talk, QUESTION, reply_of(first), FOLLOW_UP)
    earlier, _ = await tokens_of(talk, first)
    assert speller.requests[1]["input_ids"][: len(earlier)] != earlier, "the model said more than the client kept"


async def test_a_report_over_the_turns_of_a_conversation_is_one_row(talk: HttpGateway) -> None:
    first = await say(talk, QUESTION)
    second = await say(talk, QUESTION, reply_of(first), FOLLOW_UP)
    receipts = [answer.headers["x-atoll-receipt"] for answer in (first, second)]
    report = await talk.post("/atoll/report", {"receipts": receipts})
    assert report.status == 200 and report.body["job_id"], report.body
    [row] = await rows_of_job(talk, report.body["job_id"], receipts)
    tokens, prompt_length = await tokens_of(talk, second)
    reply = len((await tokens_of(talk, first))[0]) - row.prompt_length
    between = prompt_length - row.prompt_length - reply
    assert row.tokens.tolist() == tokens and row.turns == tuple(receipts) and row.sample_id == receipts[0]
    assert row.loss_mask.tolist() == [1] * reply + [0] * between + [1] * reply
    assert between > 0 and (row.log_probs[reply : reply + between] == 0).all() and np.isfinite(row.log_probs).all()
    assert [(span.start, span.end) for span in row.versions] == [
        (0, reply + between),
        (reply + between, len(tokens) - row.prompt_length),
    ]
    for receipt in receipts:
        again = await talk.post("/atoll/report", {"receipts": [receipt], "request_id": receipt})
        assert again.status == 409 and again.error["code"] == "already_consumed"


async def test_a_receipt_that_was_reported_alone_is_refused_in_a_later_trajectory(talk: HttpGateway) -> None:
    first = await say(talk, QUESTION)
    second = await say(talk, QUESTION, reply_of(first), FOLLOW_UP)
    receipts = [answer.headers["x-atoll-receipt"] for answer in (first, second)]
    assert (await talk.post("/atoll/report", {"receipt": receipts[0]})).status == 200
    refused = await talk.post("/atoll/report", {"receipts": receipts})
    assert refused.status == 409 and refused.error["code"] == "already_consumed"
    assert receipts[0] in refused.error["message"]
    alone = await talk.post("/atoll/report", {"receipt": receipts[1]})
    assert alone.status == 200, "the other turn is still free"


async def test_receipts_that_do_not_extend_each_other_are_rows_of_one_rollout(talk: HttpGateway) -> None:
    answers = [await say(talk, {"role": "user", "content": f"Question {number}"}) for number in range(2)]
    later = await say(talk, {"role": "user", "content": "Question 1"}, reply_of(answers[1]), FOLLOW_UP)
    receipts = [answer.headers["x-atoll-receipt"] for answer in (*answers, later)]
    report = await talk.post("/atoll/report", {"receipts": receipts})
    rows = await rows_of_job(talk, report.body["job_id"], receipts)
    assert [row.turns for row in rows] == [(), tuple(receipts[1:])]
    async with open_channel(f"127.0.0.1:{talk.gateway.server.port}") as channel:
        stub = sample_service_pb2_grpc.SampleServiceStub(channel)
        call = stub.ReadBatch(sample_service_pb2.ReadBatchRequest(job_id=report.body["job_id"]))
        reports = {item.report.report_id async for item in rows_of(call)}
    assert len(reports) == 1


async def test_candidates_are_aligned_through_the_turns(
    registry_address: str, speller: SpellingEngine, tmp_path: Path
) -> None:
    async with http_gateway(registry_address, tmp_path, (speller.url,), capture_top_k=2) as web:
        first = await say(web, QUESTION)
        second = await say(web, QUESTION, reply_of(first), FOLLOW_UP)
        receipts = [answer.headers["x-atoll-receipt"] for answer in (first, second)]
        report = await web.post("/atoll/report", {"receipts": receipts})
        [row] = await rows_of_job(web, report.body["job_id"], receipts)
    assert row.top_k_ids is not None and row.top_k_ids.shape == (len(row.loss_mask), 2)
    np.testing.assert_array_equal((row.top_k_ids == -1).all(axis=1), row.loss_mask == 0)


async def test_a_conversation_goes_on_at_another_gateway_of_the_same_database(
    registry_address: str, speller: SpellingEngine, tmp_path: Path
) -> None:
    async with http_gateway(registry_address, tmp_path, (speller.url,)) as one:
        first = await say(one, QUESTION)
        earlier, _ = await tokens_of(one, first)
    async with http_gateway(registry_address, tmp_path, (speller.url,)) as other:
        await say(other, QUESTION, reply_of(first), FOLLOW_UP)
    assert speller.requests[1]["input_ids"][: len(earlier)] == earlier


async def test_a_streamed_turn_is_found_like_a_plain_one(talk: HttpGateway, speller: SpellingEngine) -> None:
    frames = await talk.stream(model=SCENARIO, messages=[QUESTION])
    text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames[:-1])
    assert json.dumps(text) == '"hello"'
    await say(talk, QUESTION, {"role": "assistant", "content": text}, FOLLOW_UP)
    first, second = speller.requests
    letters = second["input_ids"][len(first["input_ids"]) :][:6]
    assert letters == [*speller._letters, END_TOKEN]
