"""How many of the engine's likeliest tokens are recorded, and that they reach a reader of the sample."""

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from atoll.common.tensors import TensorReader
from atoll.gateway.records import PackedSample
from atoll.gateway.sample_packing import tensor_specs

from tests.engines import VOCAB_SIZE
from tests.fakes.fake_engine import FakeEngine, top_k_at
from tests.gateway.conftest import FAMILY_TOP_K
from tests.gateway.http_gateway import HELLO, HttpGateway, http_gateway


def assert_recorded(packed: PackedSample, k: int) -> None:
    """What a reader of the wire gets is what the engine told, token by token."""
    reader = TensorReader(tensor_specs(packed.sample))
    reader.add(packed.tensors)
    arrays = reader.arrays()
    expected = [top_k_at(position, k) for position in range(packed.sample.response_length)]
    assert packed.sample.response_length > 0
    assert arrays["top_k_ids"].tolist() == [[token for _, token in row] for row in expected]
    assert np.array_equal(arrays["top_k_log_probs"], np.array([[value for value, _ in row] for row in expected]))


async def test_nothing_is_captured_where_nobody_asks_for_it(web: HttpGateway, engine: FakeEngine) -> None:
    answer = await web.chat()
    assert engine.requests[0]["top_logprobs_num"] == 0
    packed = await web.sample(answer.headers["x-atoll-receipt"])
    assert packed.sample.top_k == 0
    assert [spec.name for spec in tensor_specs(packed.sample)] == ["token_ids", "loss_mask", "log_probs"]


@pytest.mark.parametrize(("setting", "expected"), [(0, FAMILY_TOP_K), (3, FAMILY_TOP_K), (9, 9)])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_family_or_the_setting_decides_whichever_wants_more(
    registry_address: str, engine: FakeEngine, tmp_path: Path, setting: int, expected: int, stream: bool
) -> None:
    async with http_gateway(registry_address, tmp_path, (engine.url,), capture_top_k=setting) as web:
        await (web.stream(model="judged") if stream else web.chat(model="judged"))
        assert engine.requests[0]["top_logprobs_num"] == expected
        [sample], _ = await web.gateway.samples.page("judged", None, 10, "")
        assert_recorded(await web.gateway.samples.get("judged", sample.receipt), expected)


async def test_every_choice_has_its_own(registry_address: str, engine: FakeEngine, tmp_path: Path) -> None:
    async with http_gateway(registry_address, tmp_path, (engine.url,), capture_top_k=2) as web:
        await web.chat(n=3)
        samples = await web.samples()
        assert len(samples) == 3
        for sample in samples:
            assert_recorded(await web.sample(sample.receipt), 2)


async def test_more_than_the_vocabulary_is_the_whole_vocabulary(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    async with http_gateway(registry_address, tmp_path, (engine.url,), capture_top_k=VOCAB_SIZE + 1) as web:
        assert (await web.chat(max_tokens=1)).status == 200
    assert engine.requests[0]["top_logprobs_num"] == VOCAB_SIZE


async def test_a_client_that_leaves_leaves_the_rows_of_its_tokens(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.behaviour.length, engine.behaviour.pause_s = 200, 0.02
    async with http_gateway(registry_address, tmp_path, (engine.url,), capture_top_k=2) as web:
        url = web.url + "/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json={**HELLO, "stream": True}) as response:
            await response.content.readany()
        async with asyncio.timeout(10):
            while not await web.samples():
                await asyncio.sleep(0.05)
        [sample] = await web.samples()
        assert sample.aborted
        assert_recorded(await web.sample(sample.receipt), 2)
