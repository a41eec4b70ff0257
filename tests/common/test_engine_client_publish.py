"""New weights for a real SGLang while it samples: what a reply in flight, a failure and a cancellation leave behind."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineRefused, EngineUnavailable, SamplingParams, WeightSpan

from tests.common.engine_replies import PROMPT, TOLERANCE, collect, joined
from tests.engines import RunningEngine
from tests.forward import log_probs_of


async def test_a_publish_in_the_middle_of_a_reply_gives_two_spans_that_are_both_exact(
    engine_client: EngineClient, student_engine: RunningEngine, tiny_models: Path
) -> None:
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    reply = asyncio.create_task(collect(engine_client.generate(PROMPT, params)))
    await asyncio.sleep(0.3)
    await engine_client.update_weights(tiny_models / "student-next", "1:1")
    chunks = await reply
    ids, log_probs = joined(chunks)
    assert len(ids) == 300
    finish = chunks[-1].finish
    assert finish is not None
    assert [span.weight_version for span in finish.spans] == ["1:0", "1:1"]
    cut = finish.spans[0].end
    assert 0 < cut < 300
    before = log_probs_of(student_engine.model_path, PROMPT, ids, 1.0)
    after = log_probs_of(tiny_models / "student-next", PROMPT, ids, 1.0)
    np.testing.assert_allclose(log_probs[:cut], before[:cut], atol=TOLERANCE)
    np.testing.assert_allclose(log_probs[cut:], after[cut:], atol=TOLERANCE)
    assert np.abs(before - after).max() > 1
    assert await engine_client.weight_version() == "1:1"


async def test_after_a_publish_no_score_uses_the_old_weights(engine_client: EngineClient, tiny_models: Path) -> None:
    response = [5, 6, 7, 8]
    old = await engine_client.score(PROMPT, response)
    await engine_client.update_weights(tiny_models / "student-next", "1:1")
    new = await engine_client.score(PROMPT, response)
    expected = log_probs_of(tiny_models / "student-next", PROMPT, response, 1.0)
    np.testing.assert_allclose(new.log_probs, expected, atol=TOLERANCE)
    assert np.abs(new.log_probs - old.log_probs).max() > 0.1
    assert new.weight_version == "1:1"


async def test_a_refused_publish_keeps_the_weights_and_lets_replies_go_on(
    engine_client: EngineClient, tmp_path: Path
) -> None:
    reply = asyncio.create_task(
        engine_client.generate_once(PROMPT, SamplingParams(max_new_tokens=300, ignore_eos=True))
    )
    await asyncio.sleep(0.1)
    with pytest.raises(EngineRefused):
        await engine_client.update_weights(tmp_path / "absent", "1:1")
    assert (await reply).finish.spans == (WeightSpan("1:0", 0, 300),)
    assert await engine_client.weight_version() == "1:0"


async def test_a_cancelled_publish_leaves_no_pause(engine_client: EngineClient, tiny_models: Path) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01):
        publish = asyncio.create_task(engine_client.update_weights(tiny_models / "student-next", "1:1"))
        await asyncio.sleep(delay)
        publish.cancel()
        await asyncio.wait([publish])
        assert await engine_client.weight_version(timeout_s=10) in ("1:0", "1:1")


async def test_an_abandoned_pause_is_ended_by_continue_generation(engine_client: EngineClient) -> None:
    await engine_client._http.answer("POST", "/pause_generation", {"mode": "retract"}, 10)
    with pytest.raises(EngineUnavailable):
        await engine_client.weight_version(timeout_s=1)
    await engine_client.model_info()
    await engine_client.continue_generation()
    assert await engine_client.weight_version() == "1:0"
