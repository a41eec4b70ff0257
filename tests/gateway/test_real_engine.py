"""The chat route before SGLang itself, serving the tiny model."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from atoll.gateway.records import PackedSample
from atoll.gateway.sample_packing import unpack_tensors
from atoll.gateway.trajectory import Turn, joined, trajectories
from numpy.typing import NDArray

from tests.engines import VOCAB_SIZE, RunningEngine
from tests.forward import all_log_probs, log_probs_of
from tests.gateway.http_gateway import HELLO, HttpGateway, http_gateway


@pytest.fixture
async def real(registry_address: str, student_engine: RunningEngine, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    """A gateway before a real engine."""
    async with http_gateway(registry_address, tmp_path, (student_engine.base_url,)) as running:
        yield running


def ids_and_log_probs(packed: PackedSample) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, response ids, log-probs of a stored sample."""
    p, r = packed.sample.prompt_length, packed.sample.response_length
    ids = np.frombuffer(packed.tensors, "<i4", p + r).tolist()
    return ids[:p], ids[p:], np.frombuffer(packed.tensors, "<f4", r, offset=4 * (p + r) + r).tolist()


def top_k_of(packed: PackedSample) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probs [R, K] of a stored sample."""
    p, r, k = packed.sample.prompt_length, packed.sample.response_length, packed.sample.top_k
    start = 4 * (p + r) + 5 * r
    ids = np.frombuffer(packed.tensors, "<i4", r * k, offset=start).reshape(r, k)
    return ids, np.frombuffer(packed.tensors, "<f4", r * k, offset=start + 4 * r * k).reshape(r, k)


async def test_recorded_log_probs_are_those_of_a_float32_forward_at_the_requests_temperature(
    real: HttpGateway, student_engine: RunningEngine
) -> None:
    requests: list[dict[str, Any]] = [
        {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": f"Question {number}: é 世?"}],
        }
        for temperature in (0.7, 1.0)
        for top_p in (1.0, 0.9)
        for number in range(25)
    ]
    streamed = real.stream
    await asyncio.gather(
        *(streamed(**fields) if index % 2 else real.chat(**fields) for index, fields in enumerate(requests))
    )
    samples = await real.samples()
    assert len(samples) == 100
    worst = 0.0
    for sample in samples:
        assert sample.exact and sample.temperature in (0.7, 1.0)
        prompt, response, recorded = ids_and_log_probs(await real.sample(sample.receipt))
        expected = log_probs_of(student_engine.model_path, prompt, response, sample.temperature)
        worst = max(worst, float(np.abs(expected - np.array(recorded)).max()))
    assert worst < 1e-4, f"largest difference {worst}"


@pytest.mark.parametrize("k", [8, VOCAB_SIZE])
async def test_recorded_likeliest_tokens_are_those_of_a_float32_forward_at_the_requests_temperature(
    registry_address: str, student_engine: RunningEngine, tmp_path: Path, k: int
) -> None:
    async with http_gateway(registry_address, tmp_path, (student_engine.base_url,), capture_top_k=k) as gateway:
        for temperature in (0.7, 1.0):
            for ask in (gateway.chat, gateway.stream):
                await ask(temperature=temperature, top_p=0.9, max_tokens=24)
        samples = await gateway.samples()
        assert len(samples) == 4
        for sample in samples:
            packed = await gateway.sample(sample.receipt)
            prompt, response, _ = ids_and_log_probs(packed)
            ids, log_probs = top_k_of(packed)
            table = all_log_probs(student_engine.model_path, prompt, response, sample.temperature)
            expected = -np.sort(-table, axis=1)[:, :k]
            assert ids.shape == log_probs.shape == (len(response), k)
            assert all(len(set(row)) == k for row in ids.tolist())
            assert np.abs(log_probs - expected).max() < 1e-4
            assert np.abs(np.take_along_axis(table, ids.astype(np.int64), axis=1) - expected).max() < 1e-4


async def test_a_publish_during_a_stream_is_recorded_as_two_exact_spans(
    real: HttpGateway, student_engine: RunningEngine, tiny_models: Path
) -> None:
    answering = asyncio.create_task(real.stream(max_tokens=400, logit_bias={"2": -100}))
    await asyncio.sleep(0.7)
    async with student_engine.client() as client:
        await client.update_weights(tiny_models / "student-next", "1:1")
    frames = await answering
    assert frames[-1] == "[DONE]"
    [sample] = await real.samples()
    assert [span.weight_version for span in sample.spans] == ["1:0", "1:1"]
    assert sample.spans[-1].end == sample.response_length == 400
    assert frames[-2]["atoll"]["weight_version"] == "1:1"


async def test_a_client_that_leaves_ends_the_generation_and_leaves_its_tokens(real: HttpGateway) -> None:
    body = {**HELLO, "stream": True, "max_tokens": 1500, "logit_bias": {"2": -100}}
    url = real.url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        await response.content.readany()
        await asyncio.sleep(0.3)
    async with asyncio.timeout(5):
        while not await real.samples():
            await asyncio.sleep(0.05)
    [sample] = await real.samples()
    assert sample.aborted and 1 <= sample.response_length < 1000
    assert sample.spans[-1].end == sample.response_length
    prompt, response_ids, _ = ids_and_log_probs(await real.sample(sample.receipt))
    assert len(prompt) == sample.prompt_length and len(response_ids) == sample.response_length


async def test_a_stop_string_leaves_the_text_and_stays_in_the_ids(real: HttpGateway) -> None:
    answer = await real.chat(stop=["e", "a", "o", "t"], max_tokens=200, n=4)
    for choice in answer.body["choices"]:
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert not set(text) & set("eaot")
        sample = (await real.sample(choice["atoll"]["receipt"])).sample
        assert sample.text == text and sample.spans[-1].end == sample.response_length >= 1


async def test_prompts_up_to_the_context_are_answered_or_refused_and_the_engine_lives(real: HttpGateway) -> None:
    def messages(words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": " x" * words}]

    one, two = [
        (await real.chat(messages=messages(words), max_tokens=1)).body["usage"]["prompt_tokens"] for words in (1, 2)
    ]
    per_word = two - one
    answered: list[int] = []
    for length in (1900, 2040, 2041, 2042, 2043, 2046, 2047, 2048, 3000):
        words = 1 + (length - one) // per_word
        answer = await real.chat(messages=messages(words))
        assert answer.status in (200, 400), answer
        if answer.status == 400:
            assert answer.error["code"] == "sequence_too_long" and answer.error["param"], answer
        else:
            assert answer.body["usage"]["prompt_tokens"] == one + (words - 1) * per_word
            answered.append(length)
    assert 1900 in answered and not {2048, 3000} & set(answered)
    assert (await real.chat(max_tokens=3)).status == 200


async def test_a_row_of_two_turns_has_the_models_own_log_probs_wherever_it_is_trained(
    real: HttpGateway, student_engine: RunningEngine
) -> None:
    extended = 0
    for number in range(8):
        question = {"role": "user", "content": f"Question {number}?"}
        first = await real.chat(messages=[question], max_tokens=8)
        reply = {"role": "assistant", "content": first.body["choices"][0]["message"]["content"]}
        second = await real.chat(messages=[question, reply, {"role": "user", "content": "And now?"}], max_tokens=8)
        turns = [await real.sample(answer.headers["x-atoll-receipt"]) for answer in (first, second)]
        tensors = [unpack_tensors(turn) for turn in turns]
        sides = [Turn(t.token_ids, p.sample.prompt_length, 1.0) for t, p in zip(tensors, turns, strict=True)]
        if trajectories(sides) != (0, 0):
            continue  # half a character at the end of a reply is no text that a client could send back
        extended += 1
        row = joined(turns)
        prompt, response, recorded = ids_and_log_probs(row)
        trained = unpack_tensors(row).loss_mask == 1
        expected = log_probs_of(student_engine.model_path, prompt, response, 1.0)
        worst = float(np.abs(expected - np.array(recorded))[trained].max())
        assert worst < 1e-4, f"largest difference {worst}"
    assert extended >= 4, "most replies are text"
