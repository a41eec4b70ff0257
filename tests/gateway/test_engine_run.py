"""Engines that are down, slow, or several."""

import asyncio
import time
from pathlib import Path

import pytest
from atoll.gateway.engine_pool import EnginePool

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.http_gateway import SCENARIO, HttpGateway, http_gateway
from tests.gateway.store_world import eventually, head_at


async def test_an_engine_that_comes_back_within_the_retries_answers_the_waiting_request(
    web: HttpGateway, engine: FakeEngine
) -> None:
    await engine.stop()
    waiting = asyncio.create_task(web.chat())
    await asyncio.sleep(0.7)
    assert not waiting.done()
    await engine.start()
    answer = await waiting
    assert answer.status == 200
    assert [sample.receipt for sample in await web.samples()] == [answer.headers["x-atoll-receipt"]]


async def test_an_engine_that_stays_down_is_a_503_after_a_bounded_time(
    web: HttpGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.5)
    await engine.stop()
    start = time.monotonic()
    answer = await web.chat()
    assert answer.status == 503 and answer.error["code"] == "engine_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    assert 0.3 < time.monotonic() - start < 3
    assert await web.samples() == []


async def test_overload_is_tried_again_and_a_refusal_is_not(web: HttpGateway, engine: FakeEngine) -> None:
    engine.behaviour.refusals = [(503, "queue full"), (500, "oops")]
    assert (await web.chat()).status == 200
    assert len(engine.requests) == 3
    engine.behaviour.refusals = [(400, "no such parameter")]
    refused = await web.chat()
    assert refused.status == 502 and refused.error["code"] == "engine_refused"
    assert "no such parameter" in refused.error["message"]
    assert len(engine.requests) == 4


async def test_every_try_has_a_name_of_its_own_at_the_engine(web: HttpGateway, engine: FakeEngine) -> None:
    engine.behaviour.refusals = [(503, "queue full")]
    answer = await web.chat()
    receipt = answer.headers["x-atoll-receipt"]
    assert [request["rid"] for request in engine.requests] == [f"{receipt}-1", f"{receipt}-2"]


async def test_a_request_that_outlasts_its_deadline_is_a_503_and_frees_the_engine(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.behaviour.pause_s = 5.0
    async with http_gateway(registry_address, tmp_path, (engine.url,), request_timeout_s=0.5) as web:
        start = time.monotonic()
        assert (await web.chat()).status == 503
        assert time.monotonic() - start < 3
        await asyncio.sleep(0.1)
        assert engine.hung_up >= 1 and web.engines.engines[0].in_flight == 0
        assert await web.samples() == []


async def test_requests_go_to_the_engine_that_serves_the_head(registry_address: str, tmp_path: Path) -> None:
    async with FakeEngine() as behind, FakeEngine() as current:
        behind.weight_version = "1:7"
        async with http_gateway(registry_address, tmp_path, (behind.url, current.url)) as web:
            for _ in range(4):
                assert (await web.chat()).body["atoll"]["weight_version"] == "1:0"
            assert not behind.requests and len(current.requests) == 4
            await current.stop()
            assert (await web.chat()).body["atoll"]["weight_version"] == "1:7"


async def test_an_engine_of_an_older_version_than_the_heads_parent_never_answers(
    registry_address: str, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.3)
    async with http_gateway(registry_address, tmp_path, (engine.url,)) as web:
        heads = {SCENARIO: head_at(3)}
        monkeypatch.setattr(web.gateway.scenarios, "head", heads.get)
        answer = await web.chat()
        assert answer.status == 503 and not engine.requests
        assert "no engine serves the head 1:3, they serve 1:0" in answer.error["message"]
        engine.weight_version = "1:2"
        assert (await web.chat()).body["atoll"]["weight_version"] == "1:2", "asked again at once, not two seconds later"


async def test_an_engine_that_is_silent_keeps_no_news_of_the_others_back(
    registry_address: str, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_pool.PROBE_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr("atoll.gateway.engine_pool.FIRST_ANSWER_SECONDS", 0.3)
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with http_gateway(registry_address, tmp_path, (url, engine.url)) as web:
        engine.weight_version = "1:1"
        await eventually(lambda: web.engines.engines[1].weight_version == "1:1", seconds=2.0)
        assert not web.engines.engines[0].healthy
    silent.close()


async def test_what_is_no_engine_is_told_and_asked_again(
    registry_address: str, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_pool.PROBE_INTERVAL_SECONDS", 0.05)
    pool = EnginePool((engine.url,), 5.0)
    monkeypatch.setattr(engine, "model_path", object())
    await pool.start()
    assert not pool.engines[0].healthy and pool.engines[0].problem
    monkeypatch.undo()
    await eventually(lambda: pool.engines[0].healthy)
    await pool.stop()


async def test_requests_are_spread_over_engines_of_one_version(registry_address: str, tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        one.behaviour.pause_s = two.behaviour.pause_s = 0.02
        async with http_gateway(registry_address, tmp_path, (one.url, two.url)) as web:
            answers = await asyncio.gather(*(web.chat() for _ in range(8)))
            assert {answer.status for answer in answers} == {200}
            assert len(one.requests) == len(two.requests) == 4


async def test_a_gateway_without_engines_says_so(registry_address: str, tmp_path: Path) -> None:
    async with http_gateway(registry_address, tmp_path, ()) as web:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.2)
            answer = await web.chat()
        assert answer.status == 503 and "no serving engine" in answer.error["message"]
