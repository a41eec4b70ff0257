"""The client against a real SGLang. Numbers are compared with a float32 forward of the same weights by transformers."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from atoll.common.engine_client import EngineClient
from atoll.common.engine_frames import loads
from atoll.common.engine_types import (
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    Ids,
    LogProbs,
    SamplingParams,
    WeightSpan,
)

from tests.common.engine_replies import PROMPT, TOLERANCE, collect, joined
from tests.engines import RunningEngine, free_port
from tests.forward import all_log_probs, log_probs_of


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_sampled_log_probs_are_those_of_a_plain_softmax_at_the_temperature(
    engine_client: EngineClient, student_engine: RunningEngine, temperature: float, top_p: float, streamed: bool
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, top_p=top_p, ignore_eos=True)
    assert params.exact

    async def reply(number: int) -> tuple[list[int], Ids, LogProbs]:
        prompt = [*PROMPT, number]
        if streamed:
            ids, log_probs = joined(await collect(engine_client.generate(prompt, params)))
        else:
            generation = await engine_client.generate_once(prompt, params)
            ids, log_probs = generation.token_ids, generation.log_probs
        return prompt, ids, log_probs

    for prompt, ids, log_probs in await asyncio.gather(*(reply(number) for number in range(25))):
        assert len(ids) == 24
        expected = log_probs_of(student_engine.model_path, prompt, ids, temperature)
        np.testing.assert_allclose(log_probs, expected, atol=TOLERANCE)


async def test_top_k_of_a_reply_are_the_likeliest_tokens_of_the_model(
    engine_client: EngineClient, student_engine: RunningEngine
) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.7, ignore_eos=True)
    reply = await engine_client.generate_once(PROMPT, params, top_k_log_probs=8)
    expected = all_log_probs(student_engine.model_path, PROMPT, reply.token_ids, 0.7)
    assert reply.top_k is not None
    assert reply.top_k.ids.shape == (40, 8)
    np.testing.assert_allclose(reply.top_k.log_probs, -np.sort(-expected)[:, :8], atol=TOLERANCE)
    at_ids = np.take_along_axis(expected, reply.top_k.ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(reply.top_k.log_probs, at_ids, atol=TOLERANCE)


async def test_choices_of_one_stream_are_told_apart_and_each_is_exact(
    engine_client: EngineClient, student_engine: RunningEngine
) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    chunks = await collect(engine_client.generate(PROMPT, params, n=3, top_k_log_probs=2))
    replies = [joined([chunk for chunk in chunks if chunk.index == index]) for index in range(3)]
    assert len({tuple(ids.tolist()) for ids, _ in replies}) == 3
    for ids, log_probs in replies:
        expected = log_probs_of(student_engine.model_path, PROMPT, ids, 1.0)
        np.testing.assert_allclose(log_probs, expected, atol=TOLERANCE)
    finishes = [chunk.finish for chunk in chunks if chunk.finish is not None]
    assert [(f.reason, f.spans, f.usage.completion_tokens) for f in finishes] == [
        (FinishReason.LENGTH, (WeightSpan("1:0", 0, 12),), 12)
    ] * 3


async def test_a_stop_string_ends_the_reply_and_its_tokens_stay(engine_client: EngineClient) -> None:
    free = await engine_client.generate_once(PROMPT, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    stop = free.text[len(free.text) // 2 :]
    reply = await engine_client.generate_once(
        PROMPT, SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True, stop=(stop,))
    )
    assert reply.finish.reason is FinishReason.STOP
    assert reply.finish.matched == stop
    assert reply.text == free.text.removesuffix(stop)
    assert reply.token_ids.tolist() == free.token_ids.tolist()


async def test_the_end_token_is_in_the_ids_with_its_log_prob(engine_client: EngineClient) -> None:
    reply = await engine_client.generate_once(PROMPT, SamplingParams(max_new_tokens=8, logit_bias={2: 50.0}))
    assert reply.token_ids.tolist() == [2]
    assert reply.finish.reason is FinishReason.STOP
    assert reply.finish.matched == 2
    assert len(reply.log_probs) == 1


async def test_scores_equal_a_float32_forward_also_for_the_last_token_of_the_vocabulary(
    engine_client: EngineClient, student_engine: RunningEngine
) -> None:
    response = [1023, 0, 5, 1023, 1, 999]
    score = await engine_client.score(PROMPT, response, top_k=8)
    expected = all_log_probs(student_engine.model_path, PROMPT, response, 1.0)
    np.testing.assert_allclose(score.log_probs, expected[np.arange(6), response], atol=TOLERANCE)
    assert score.top_k is not None
    np.testing.assert_allclose(score.top_k.log_probs, -np.sort(-expected)[:, :8], atol=TOLERANCE)
    at_ids = np.take_along_axis(expected, score.top_k.ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(score.top_k.log_probs, at_ids, atol=TOLERANCE)
    assert score.weight_version == "1:0"


async def test_every_token_of_the_vocabulary_appears_under_its_own_id_in_a_full_top_k(
    engine_client: EngineClient,
) -> None:
    score = await engine_client.score([3], [4], top_k=1024)
    assert score.top_k is not None
    assert sorted(score.top_k.ids[0].tolist()) == list(range(1024))
    assert np.exp(score.top_k.log_probs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


async def test_scoring_a_recorded_reply_returns_its_recorded_log_probs(engine_client: EngineClient) -> None:
    reply = await engine_client.generate_once(PROMPT, SamplingParams(max_new_tokens=30, ignore_eos=True))
    score = await engine_client.score(PROMPT, reply.token_ids)
    np.testing.assert_allclose(score.log_probs, reply.log_probs, atol=TOLERANCE)
    assert score.top_k is None


@pytest.mark.parametrize("bad", [[], [1024], [-1], [3, 1 << 40]])
async def test_ids_outside_the_vocabulary_are_refused_and_the_server_lives(
    engine_client: EngineClient, bad: list[int]
) -> None:
    with pytest.raises(EngineRefused, match="input_ids"):
        await engine_client.generate_once(bad, SamplingParams(max_new_tokens=1))
    with pytest.raises(EngineRefused, match="prompt_ids"):
        await engine_client.score(bad, [1])
    with pytest.raises(EngineRefused, match="response_ids"):
        await engine_client.score([1], bad)
    assert await engine_client.weight_version() == "1:0"


async def test_more_top_k_than_tokens_is_refused_and_the_server_lives(engine_client: EngineClient) -> None:
    with pytest.raises(EngineRefused, match="top_k is 1025"):
        await engine_client.score([1], [1], top_k=1025)
    with pytest.raises(EngineRefused, match="top_k is 1025"):
        await engine_client.generate_once([1], SamplingParams(max_new_tokens=1), top_k_log_probs=1025)
    assert await engine_client.weight_version() == "1:0"


GOOD = SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (replace(GOOD, temperature=-1.0), "temperature"),
        (replace(GOOD, top_k=0), "top_k"),
        (replace(GOOD, logit_bias={1024: 1.0}), "logit_bias"),
        (replace(GOOD, json_schema="{"), "grammar"),
        (replace(GOOD, max_new_tokens=5000), "context length"),
        (replace(GOOD, max_new_tokens=0), "max_new_tokens"),
    ],
)
async def test_what_the_engine_refuses_is_the_same_error_streamed_or_not(
    engine_client: EngineClient, params: SamplingParams, message: str
) -> None:
    with pytest.raises(EngineRefused, match=message):
        await engine_client.generate_once(PROMPT, params)
    with pytest.raises(EngineRefused, match=message):
        await collect(engine_client.generate(PROMPT, params))


@pytest.mark.parametrize(
    "inexact",
    [
        {"temperature": 0.0},
        {"frequency_penalty": 0.5, "ignore_eos": True},
        {"presence_penalty": 0.5, "ignore_eos": True},
        {"repetition_penalty": 1.2, "ignore_eos": True},
        {"min_new_tokens": 40, "stop_token_ids": tuple(range(100, 1000))},
        {"logit_bias": {854: 3.0}},
        {"regex": "[a-z]+"},
    ],
)
async def test_parameters_called_inexact_move_the_log_probs(
    engine_client: EngineClient, student_engine: RunningEngine, inexact: dict[str, object]
) -> None:
    params = SamplingParams(**{"max_new_tokens": 40, "temperature": 0.7, **inexact})  # type: ignore[arg-type]
    assert not params.exact
    reply = await engine_client.generate_once(PROMPT, params)
    temperature = params.temperature or 0.7
    expected = log_probs_of(student_engine.model_path, PROMPT, reply.token_ids, temperature)
    assert np.abs(reply.log_probs - expected).max() > 10 * TOLERANCE


async def test_abort_by_name_ends_a_reply_with_what_it_had(engine_client: EngineClient) -> None:
    params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
    reply = asyncio.create_task(collect(engine_client.generate(PROMPT, params, rid="to-be-cut")))
    await asyncio.sleep(0.3)
    await engine_client.abort("to-be-cut")
    chunks = await reply
    ids, log_probs = joined(chunks)
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORT
    assert 0 < len(ids) < 1500
    assert len(log_probs) == len(ids) == finish.usage.completion_tokens == finish.spans[-1].end


async def test_a_reply_that_is_cut_while_it_waits_ends_without_a_token(engine_client: EngineClient) -> None:
    long = SamplingParams(max_new_tokens=400, ignore_eos=True)
    # The engine samples 32 replies together.
    running = [asyncio.create_task(collect(engine_client.generate([*PROMPT, n], long))) for n in range(32)]
    await until_running(engine_client, 32)
    waiting = asyncio.create_task(collect(engine_client.generate(PROMPT, long, rid="waiting", top_k_log_probs=2)))
    await asyncio.sleep(0.2)
    await engine_client.abort("waiting")
    (chunk,) = await waiting
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    assert len(chunk.token_ids) == 0
    assert chunk.finish is not None
    assert chunk.finish.reason is FinishReason.ABORT
    assert chunk.finish.usage.completion_tokens == 0


async def test_leaving_a_stream_early_frees_the_engine(engine_client: EngineClient) -> None:
    params = SamplingParams(max_new_tokens=1900, ignore_eos=True)
    async with aclosing(engine_client.generate(PROMPT, params)) as chunks:
        await anext(chunks)
        await until_running(engine_client, 1)
    await until_running(engine_client, 0)


async def until_running(engine_client: EngineClient, count: int) -> None:
    """Returns when the engine says that it samples this many replies (it says so a little late); gives it 3 seconds."""
    for _ in range(30):
        loads_of_engine = loads(await engine_client._http.answer("GET", "/v1/loads", None, 10))["loads"]
        if sum(load["num_running_reqs"] for load in loads_of_engine) == count:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"expected {count} running replies, got {loads_of_engine}")


async def test_the_context_length_is_known_before_a_prompt_is_refused(engine_client: EngineClient) -> None:
    length = await engine_client.context_length()
    assert length == 2048
    reply = await engine_client.generate_once([3] * (length - 7), SamplingParams(max_new_tokens=1))
    assert reply.finish.usage.prompt_tokens == length - 7
    for tokens in (length - 6, length):
        with pytest.raises(EngineRefused) as refusal:
            await engine_client.generate_once([3] * tokens, SamplingParams(max_new_tokens=1))
        assert refusal.value.code == "sequence_too_long"


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    async with EngineClient(f"http://127.0.0.1:{free_port()}", 1024) as engine_client:
        with pytest.raises(EngineUnavailable):
            await engine_client.model_info()
        with pytest.raises(EngineUnavailable):
            await collect(engine_client.generate([1], SamplingParams(max_new_tokens=1)))


async def test_a_deadline_ends_the_wait(engine_client: EngineClient) -> None:
    with pytest.raises(EngineUnavailable, match="in time"):
        await engine_client.generate_once(PROMPT, SamplingParams(max_new_tokens=1500, ignore_eos=True), timeout_s=0.2)
