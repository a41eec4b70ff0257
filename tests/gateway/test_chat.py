"""The chat route before a fake engine: what is answered, what is recorded, and in which order."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError
from atoll.gateway.records import NewSample, PackedSample
from atoll.gateway.registry_reader import ChainEntry, RegistryReader

from tests.fakes.fake_engine import END_TOKEN, FakeEngine, log_prob_at, text_of, token_at
from tests.gateway.http_gateway import HELLO, SCENARIO, HttpGateway
from tests.gateway.store_world import eventually


def expected_reply(prompt_ids: list[int], length: int = 6) -> list[int]:
    return [token_at(prompt_ids, position) for position in range(length - 1)] + [END_TOKEN]


def tensors(packed: PackedSample) -> tuple[list[int], list[int], list[float]]:
    """Token ids, loss mask and log-probs as they are stored."""
    p, r = packed.sample.prompt_length, packed.sample.response_length
    ids = np.frombuffer(packed.tensors, "<i4", p + r)
    mask = np.frombuffer(packed.tensors, "u1", r, offset=4 * (p + r))
    log_probs = np.frombuffer(packed.tensors, "<f4", r, offset=4 * (p + r) + r)
    return ids.tolist(), mask.tolist(), log_probs.tolist()


async def test_a_plain_reply_carries_its_receipt_and_the_sample_holds_the_engines_own_tokens(
    web: HttpGateway, engine: FakeEngine
) -> None:
    answer = await web.chat(temperature=0.7, top_p=0.9, user="u1")
    assert answer.status == 200
    receipt = answer.headers["x-atoll-receipt"]
    assert answer.body["atoll"] == {"receipt": receipt, "weight_version": "1:0"}
    prompt = engine.requests[0]["input_ids"]
    reply = expected_reply(prompt)
    text = "".join(text_of(token) for token in reply[:-1])
    [choice] = answer.body["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer.body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(prompt) + 6,
    }
    assert answer.body["object"] == "chat.completion" and answer.body["model"] == SCENARIO

    packed = await web.sample(receipt)
    sample = packed.sample
    assert tensors(packed) == (prompt + reply, [1] * 6, [log_prob_at(p) for p in range(6)])
    assert (sample.temperature, sample.exact, sample.finish_reason, sample.aborted) == (0.7, True, "stop", False)
    assert sample.text == text
    assert sample.request == {**HELLO, "temperature": 0.7, "top_p": 0.9, "user": "u1"}
    assert sample.sampling["top_p"] == 0.9
    assert [(s.start, s.end, s.weight_version) for s in sample.spans] == [(0, 6, "1:0")]


async def test_the_request_to_the_engine_names_every_sampling_parameter(web: HttpGateway, engine: FakeEngine) -> None:
    await web.chat(
        temperature=0.5,
        max_completion_tokens=3,
        stop=["END", "\n\n"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": 5},
    )
    sent = engine.requests[0]["sampling_params"]
    assert sent["temperature"] == 0.5 and sent["max_new_tokens"] == 3 and sent["stop"] == ["END", "\n\n"]
    assert sent["presence_penalty"] == 0.5 and sent["frequency_penalty"] == -0.5 and sent["logit_bias"] == {"7": 5}


async def test_a_reply_that_reaches_the_token_limit_says_length(web: HttpGateway) -> None:
    answer = await web.chat(max_tokens=3)
    assert answer.body["choices"][0]["finish_reason"] == "length"
    assert answer.body["usage"]["completion_tokens"] == 3


async def test_without_a_limit_the_reply_may_fill_the_engines_context(web: HttpGateway, engine: FakeEngine) -> None:
    await web.chat()
    [request] = engine.requests
    assert request["sampling_params"]["max_new_tokens"] == 2048 - len(request["input_ids"])


async def test_several_choices_are_samples_of_their_own_with_a_receipt_each(
    web: HttpGateway, engine: FakeEngine
) -> None:
    answer = await web.chat(n=3)
    receipts = [choice["atoll"]["receipt"] for choice in answer.body["choices"]]
    assert answer.headers["x-atoll-receipt"] == ",".join(receipts) and len(set(receipts)) == 3
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    assert "atoll" not in answer.body
    assert {sample.receipt for sample in await web.samples()} == set(receipts)
    assert answer.body["usage"]["prompt_tokens"] == len(engine.requests[0]["input_ids"])
    assert answer.body["usage"]["completion_tokens"] == 18


async def test_a_reply_over_two_versions_is_recorded_with_both_spans(web: HttpGateway, engine: FakeEngine) -> None:
    engine.behaviour.switch_at = 4
    answer = await web.chat()
    assert answer.body["atoll"]["weight_version"] == "1:1"
    sample = (await web.sample(answer.body["atoll"]["receipt"])).sample
    assert [(s.start, s.end, s.weight_version) for s in sample.spans] == [(0, 4, "1:0"), (4, 6, "1:1")]


async def test_log_probs_that_are_not_the_plain_policys_are_marked(web: HttpGateway) -> None:
    changed: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1e-7},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {"5": 1}},
    ]
    for fields in changed:
        answer = await web.chat(**fields)
        assert not (await web.sample(answer.body["atoll"]["receipt"])).sample.exact, fields
    plain: list[dict[str, Any]] = [{"temperature": 2}, {"top_p": 0.5}, {"stop": "x"}, {"presence_penalty": 0}]
    for fields in plain:
        answer = await web.chat(**fields)
        assert (await web.sample(answer.body["atoll"]["receipt"])).sample.exact, fields


async def test_the_header_names_the_scenario_before_the_model_field(web: HttpGateway) -> None:
    body = {**HELLO, "model": "gpt-4o"}
    answer = await web.post("/v1/chat/completions", body, {"x-atoll-scenario": SCENARIO})
    assert answer.status == 200 and answer.body["model"] == "gpt-4o"
    [sample] = await web.samples()
    assert sample.scenario == SCENARIO


async def test_a_pinned_version_is_answered_only_while_it_is_served(web: HttpGateway, engine: FakeEngine) -> None:
    assert (await web.chat(model=f"{SCENARIO}@0")).status == 200
    engine.weight_version = "1:1"
    refused = await web.chat(model=f"{SCENARIO}@0")
    assert refused.status == 409
    assert refused.error["code"] == "version_not_served" and refused.error["param"] == "model"
    assert "1:1" in refused.error["message"]
    assert len(await web.samples()) == 1


async def test_a_pinned_version_is_answered_by_a_later_one_with_its_weights_and_by_no_other(
    web: HttpGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = ["0" * 64, "0" * 64, "1" * 64]

    async def version(_reader: RegistryReader, _scenario: str, number: int) -> ChainEntry:
        parent = number - 1 if number else None
        now = datetime.now(UTC)
        return ChainEntry(number, parent, "training", f"1:{number}", "", "grpo", digests[number], {}, now)

    await web.chat()  # reads the model's files from the real registry
    monkeypatch.setattr(RegistryReader, "version", version)
    for number, serving in ((0, "1:1"), (1, "1:0"), (1, "1:1"), (2, "1:2")):
        engine.weight_version = serving
        answer = await web.chat(model=f"{SCENARIO}@{number}")
        assert answer.status == 200 and answer.body["atoll"]["weight_version"] == serving, (
            "recorded under its true name"
        )
    for number, serving in ((0, "1:2"), (1, "1:2"), (2, "1:1")):
        engine.weight_version = serving
        refused = await web.chat(model=f"{SCENARIO}@{number}")
        assert refused.status == 409 and refused.error["code"] == "version_not_served"
    engine.weight_version, engine.behaviour.switch_at = "1:0", 2
    answer = await web.chat(model=f"{SCENARIO}@0")
    assert answer.status == 200, "what was published while it answered has the same weights"
    engine.weight_version = "1:1"
    refused = await web.chat(model=f"{SCENARIO}@0")
    assert refused.status == 409 and "1:2 was published while 1:0 answered" in refused.error["message"]


async def test_a_pinned_version_that_is_replaced_in_mid_reply_is_refused_and_not_recorded(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.switch_at = 3
    refused = await web.chat(model=f"{SCENARIO}@0")
    assert refused.status == 409 and refused.error["code"] == "version_not_served"
    assert await web.samples() == []


async def test_the_reply_waits_for_the_disk(web: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, allowed = asyncio.Event(), asyncio.Event()
    record = web.gateway.writer.record

    async def slow(sample: NewSample) -> None:
        reached.set()
        await allowed.wait()
        await record(sample)

    monkeypatch.setattr(web.gateway.writer, "record", slow)
    waiting = asyncio.create_task(web.chat())
    await reached.wait()
    for _ in range(10):
        await web.get("/healthz")
    assert not waiting.done(), "other requests went all the way meanwhile"
    allowed.set()
    answer = await waiting
    assert answer.status == 200 and len(await web.samples()) == 1


async def test_a_store_that_fails_is_an_error_and_not_an_answer(
    web: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(sample: NewSample) -> None:
        raise AtollError("the disk is full", reason=errors_pb2.REASON_STORAGE_FULL)

    monkeypatch.setattr(web.gateway.writer, "record", full)
    answer = await web.chat(n=2)
    assert answer.status == 507 and answer.error["code"] == "storage_full"
    frames = await web.stream()
    assert frames[-1]["error"]["code"] == "storage_full"
    assert all("finish_reason" not in c or c["finish_reason"] is None for f in frames[:-1] for c in f["choices"])


async def test_spans_that_miss_a_token_are_an_error_and_nothing_is_recorded(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.gap_in_spans = True
    answer = await web.chat()
    assert answer.status == 502 and answer.error["code"] == "engine_protocol"
    frames = await web.stream()
    assert frames[-1]["error"]["code"] == "engine_protocol" and "[DONE]" not in frames
    assert await web.samples() == []


async def test_a_client_that_leaves_a_plain_request_stops_the_engine_and_leaves_an_aborted_sample(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.length, engine.behaviour.pause_s = 1000, 0.02
    leaving = asyncio.create_task(web.chat())
    await eventually(lambda: engine.sampled > 2)
    leaving.cancel()
    while not (recorded := await web.samples()):
        await asyncio.sleep(0.01)
    [sample] = recorded
    assert sample.aborted and sample.finish_reason == "abort"
    assert 1 <= sample.response_length < 100
    assert engine.aborted and engine.aborted[0].startswith(sample.receipt)
