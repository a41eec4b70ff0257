"""Streamed answers: tokens as they are sampled, and durability before the last frame."""

import asyncio
import itertools
import json
import time

import aiohttp
import pytest
from atoll.gateway.records import NewSample

from tests.fakes.fake_engine import FakeEngine, text_of, token_at
from tests.gateway.http_gateway import HELLO, HttpGateway

URL = "/v1/chat/completions"


def text_in(frames: list[dict[str, list[dict[str, dict[str, str]]]]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for frame in frames
        if frame != "[DONE]"  # type: ignore[comparison-overlap]
        for choice in frame["choices"]
        if choice["index"] == index  # type: ignore[comparison-overlap]
    )


async def test_a_stream_sends_the_text_then_the_receipt_in_its_last_frame(web: HttpGateway, engine: FakeEngine) -> None:
    frames = await web.stream()
    prompt = engine.requests[0]["input_ids"]
    assert text_in(frames) == "".join(text_of(token_at(prompt, p)) for p in range(5))
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *_, last, done = frames
    assert done == "[DONE]"
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert last["atoll"]["weight_version"] == "1:0"
    sample = (await web.sample(last["atoll"]["receipt"])).sample
    assert sample.text == text_in(frames) and sample.response_length == 6 and not sample.aborted
    assert {frame["object"] for frame in frames[:-1]} == {"chat.completion.chunk"}
    assert len({frame["id"] for frame in frames[:-1]}) == 1
    assert all("usage" not in frame for frame in frames[:-1])


async def test_the_receipt_is_in_the_header_before_the_first_token(web: HttpGateway) -> None:
    async with web.client.post(web.url + URL, json={**HELLO, "stream": True}) as response:
        receipt = response.headers["x-atoll-receipt"]
        assert response.content_type == "text/event-stream"
        assert f'"receipt":"{receipt}"' in await response.text()


async def test_tokens_are_forwarded_as_they_are_sampled(web: HttpGateway, engine: FakeEngine) -> None:
    engine.behaviour.pause_s = 0.1
    async with web.client.post(web.url + URL, json={**HELLO, "stream": True}) as response:
        arrivals = [time.monotonic() async for line in response.content if b'"content":" ' in line]
    assert len(arrivals) == 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert min(gaps) > 0.03, f"tokens came in lumps: {gaps}"


async def test_usage_comes_last_when_it_is_asked_for(web: HttpGateway, engine: FakeEngine) -> None:
    frames = await web.stream(stream_options={"include_usage": True})
    *rest, usage, done = frames
    assert done == "[DONE]" and usage["choices"] == []
    prompt = len(engine.requests[0]["input_ids"])
    assert usage["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert all(frame["usage"] is None for frame in rest)


async def test_several_choices_are_interleaved_by_index_and_each_ends_with_its_receipt(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.pause_s = 0.02
    frames = await web.stream(n=2)
    assert frames[-1] == "[DONE]"
    ends = [frame["choices"][0] for frame in frames[:-1] if frame["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    receipts = {end["atoll"]["receipt"] for end in ends}
    assert {sample.receipt for sample in await web.samples()} == receipts and len(receipts) == 2
    order = [frame["choices"][0]["index"] for frame in frames[:-1]]
    assert order != sorted(order), "one choice waited for the other"
    assert text_in(frames, 0) == text_in(frames, 1) != ""


async def test_half_a_character_is_not_a_frame_and_its_tokens_are_recorded(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.characters, engine.behaviour.length = "é世🙂", 6
    frames = await web.stream()
    texts = [frame["choices"][0]["delta"].get("content") for frame in frames[1:-1]]
    assert [text for text in texts if text] == ["é", "世", "🙂"]
    assert (await web.samples())[0].response_length == 6


async def test_the_last_frame_waits_for_the_disk(web: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = asyncio.Event()
    record = web.gateway.writer.record

    async def slow(sample: NewSample) -> None:
        await allowed.wait()
        await record(sample)

    monkeypatch.setattr(web.gateway.writer, "record", slow)
    async with web.client.post(web.url + URL, json={**HELLO, "stream": True}) as response:
        seen = b""
        while seen.count(b'"content":" ') < 5:
            seen += await response.content.readany()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await response.content.readany()
        assert b'finish_reason":"stop' not in seen and b"[DONE]" not in seen
        allowed.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_stops_the_engine_and_leaves_an_aborted_sample(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.length, engine.behaviour.pause_s = 1000, 0.02
    engine.behaviour.switch_at = 3
    body = {**HELLO, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(web.url + URL, json=body) as response:
        receipt = response.headers["x-atoll-receipt"]
        seen = b""
        while seen.count(b'"content":" ') < 5:
            seen += await response.content.readany()
    async with asyncio.timeout(5):
        while not await web.samples():
            await asyncio.sleep(0.02)
    [sample] = await web.samples()
    assert sample.receipt == receipt and sample.aborted and sample.finish_reason == "abort"
    assert 5 <= sample.response_length < 200
    assert [span.weight_version for span in sample.spans] == ["1:0", "1:1"]
    assert all(engine_run.in_flight == 0 for engine_run in web.engines.engines)


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_and_no_sample(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.hang_up_after = 3
    frames = await web.stream()
    assert text_in(frames[:-1]).count(" ") == 3
    assert frames[-1]["error"]["code"] == "engine_unavailable" and "[DONE]" not in frames
    assert await web.samples() == [] and len(engine.requests) == 1


async def test_a_reply_that_the_engine_cuts_is_an_error_and_no_sample(web: HttpGateway, engine: FakeEngine) -> None:
    engine.behaviour.cut_after = 3
    frames = await web.stream()
    assert frames[-1]["error"]["code"] == "engine_unavailable" and "[DONE]" not in frames
    answer = await web.chat()
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert await web.samples() == []


async def test_an_engine_that_is_down_is_a_503_also_for_a_stream(
    web: HttpGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.5)
    await engine.stop()
    async with web.client.post(web.url + URL, json={**HELLO, "stream": True}) as response:
        assert response.status == 503 and int(response.headers["retry-after"]) >= 1
        assert json.loads(await response.read())["error"]["code"] == "engine_unavailable"
    assert await web.samples() == []
