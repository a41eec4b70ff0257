"""What a publish does to requests in flight and to routing, as the gateway sees it: engines change under its hands."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from atoll.families.rows import VersionSpan
from atoll.gateway.head import Head

from tests.fakes.fake_engine import FakeEngine, token_at
from tests.gateway.http_gateway import HELLO, SCENARIO, HttpGateway, frames_of, http_gateway
from tests.gateway.store_world import eventually, head_at


class LiveEngine(FakeEngine):
    """Every token comes from the weights of its moment; `lies` are the weights of an update that failed half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.lies: str | None = None

    async def _sample(self, input_ids: list[int], position: int, first_version: str) -> tuple[str, int]:
        return self.lies or self.weight_version, token_at(input_ids, position)


@asynccontextmanager
async def live(
    registry: str, directory: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> AsyncIterator[tuple[HttpGateway, list[LiveEngine], dict[str, Head]]]:
    """A gateway before engines that can be published to; the dictionary is what it believes of heads."""
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 1.0)
    monkeypatch.setattr("atoll.gateway.engine_pool.PROBE_INTERVAL_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(LiveEngine()) for _ in range(count)]
        web = await stack.enter_async_context(http_gateway(registry, directory, tuple(e.url for e in engines)))
        heads = {SCENARIO: head_at(0)}
        monkeypatch.setattr(web.gateway.scenarios, "head", heads.get)
        yield web, engines, heads


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_reply_over_two_publishes_is_recorded_once_with_its_true_spans(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    async with live(registry_address, tmp_path, monkeypatch) as (web, [engine], heads):
        engine.behaviour.pause_s, engine.behaviour.length = 0.05, 9
        body = {**HELLO, "stream": streamed}
        asking = asyncio.create_task(web.client.post(web.url + "/v1/chat/completions", json=body))
        await eventually(lambda: web.engines.engines[0].in_flight == 1)
        for number in (1, 2):
            await asyncio.sleep(0.15)
            engine.weight_version, heads[SCENARIO] = f"1:{number}", head_at(number)
        response = await asking
        content = await response.read()
        last = frames_of(content)[-2] if streamed else json.loads(content)
        [sample] = await web.samples()
        assert last["atoll"] == {"receipt": sample.receipt, "weight_version": "1:2"}
        assert [span.weight_version for span in sample.spans] == ["1:0", "1:1", "1:2"]
        starts, ends = [span.start for span in sample.spans], [span.end for span in sample.spans]
        assert starts == [0, *ends[:-1]] and ends[-1] == sample.response_length == 9
        engine.behaviour.pause_s = 0.0
        await web.chat()
        assert (await web.samples())[0].spans == (VersionSpan(0, 9, "1:2"),)


async def test_one_engine_dies_and_one_lags(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(registry_address, tmp_path, monkeypatch, 2) as (web, [current, behind], heads):
        heads[SCENARIO], current.weight_version = head_at(1), "1:1"
        await eventually(lambda: web.engines.engines[0].weight_version == "1:1")
        for _ in range(4):
            assert (await web.chat()).body["atoll"]["weight_version"] == "1:1"
        assert not behind.requests, "while one serves the head, its parent is not asked"
        await current.stop()
        assert (await web.chat()).body["atoll"]["weight_version"] == "1:0", "while none does, the parent answers"
        heads[SCENARIO] = head_at(3)
        refused = await web.chat()
        assert refused.status == 503 and "they serve 1:0, 1:1" in refused.error["message"]
        behind.weight_version = "1:3"
        assert (await web.chat()).body["atoll"]["weight_version"] == "1:3"
        await current.start()
        await eventually(lambda: web.engines.engines[0].healthy)
        asked = len(current.requests)
        for _ in range(3):
            assert (await web.chat()).body["atoll"]["weight_version"] == "1:3"
        assert len(current.requests) == asked, "it came back with what it had"


async def test_an_engine_that_reports_an_older_name_of_the_heads_weights_takes_traffic_like_the_others(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(registry_address, tmp_path, monkeypatch, 2) as (web, [older, newer], heads):
        older.weight_version, newer.weight_version, heads[SCENARIO] = "1:2", "1:3", head_at(3, same=1)
        await web.engines.probe()
        older.behaviour.pause_s = newer.behaviour.pause_s = 0.02
        answers = await asyncio.gather(*(web.chat() for _ in range(8)))
        assert {answer.body["atoll"]["weight_version"] for answer in answers} == {"1:2", "1:3"}
        assert len(older.requests) == len(newer.requests) == 4


async def test_an_engine_whose_replies_come_from_other_weights_than_it_reports_takes_no_traffic_until_both_agree(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(registry_address, tmp_path, monkeypatch, 2) as (web, [broken, sound], _):
        broken.lies = "1:9"
        shown = web.engines.engines[0]
        while not shown.doubted:
            await web.chat()
        await eventually(lambda: "reports 1:0 and samples from 1:9" in shown.problem)
        answered = {sample.receipt for sample in await web.samples() if sample.spans[0].weight_version == "1:9"}
        for _ in range(4):
            assert (await web.chat()).body["atoll"]["weight_version"] == "1:0"
        await sound.stop()
        refused = await web.chat()
        assert refused.status == 503
        broken.lies = None
        await eventually(lambda: not shown.doubted)
        assert (await web.chat()).body["atoll"]["weight_version"] == "1:0"
        told = {sample.receipt for sample in await web.samples() if sample.spans[0].weight_version == "1:9"}
        assert told == answered, "what it sampled meanwhile is known by the weights it named, and there was no more"
