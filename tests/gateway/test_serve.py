"""The gateway as a process: what it refuses to start with, what a kill leaves, how it stops."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.http_gateway import HELLO, SCENARIO
from tests.gateway.processes import free_port, service_beside, service_environment


def settings_of(registry: str, engine: str, directory: Path, **more: str) -> dict[str, str]:
    return {
        "ATOLL_GATEWAY_REGISTRY": registry,
        "ATOLL_GATEWAY_ENGINES": json.dumps([engine]),
        "ATOLL_GATEWAY_DATABASE_URL": f"sqlite:///{directory / 'gateway.db'}",
        "ATOLL_GATEWAY_GRPC_PORT": "0",
        **more,
    }


async def post(port: int, path: str, body: object) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def test_kill_minus_nine_between_reply_and_report_loses_no_sample(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    port = free_port()
    settings = settings_of(registry_address, engine.url, tmp_path, ATOLL_GATEWAY_PORT=str(port))

    async with service_beside("atoll.gateway", settings, tmp_path / "log", port) as process:
        replies = await asyncio.gather(*(post(port, "/v1/chat/completions", HELLO) for _ in range(8)))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    receipts = [body["atoll"]["receipt"] for status, body in replies if status == 200]
    assert len(receipts) == 8
    async with service_beside("atoll.gateway", settings, tmp_path / "log", port):
        for index, receipt in enumerate(receipts[:4]):
            metadata = {"group": f"g{index // 2}"}
            status, answer = await post(
                port, "/atoll/report", {"receipt": receipt, "score": index, "metadata": metadata}
            )
            assert status == 200, answer
        assert answer["job_id"].startswith("job-")


async def test_a_stop_signal_lets_a_stream_end_and_then_exits_with_0(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.behaviour.pause_s = 0.2
    port = free_port()
    settings = settings_of(registry_address, engine.url, tmp_path, ATOLL_GATEWAY_PORT=str(port))
    async with service_beside("atoll.gateway", settings, tmp_path / "log", port) as process:
        body = {**HELLO, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            await response.content.readany()
            process.send_signal(signal.SIGTERM)
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b'"receipt"' in rest
        assert await asyncio.to_thread(process.wait, 20) == 0
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["service"] for line in log if line["event"] == "gateway stops"] == ["gateway"]


def refused_start(settings: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.gateway"],
        env=service_environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done
    return done.stderr


def test_listening_for_others_without_a_token_refuses_to_start(tmp_path: Path) -> None:
    settings = settings_of("127.0.0.1:1", "http://127.0.0.1:1", tmp_path, ATOLL_GATEWAY_HOST="0.0.0.0")
    problem = refused_start(settings)
    assert "ATOLL_TOKEN" in problem and "0.0.0.0" in problem
    assert not (tmp_path / "gateway.db").exists()


def test_bad_settings_are_all_named(tmp_path: Path) -> None:
    settings = settings_of("127.0.0.1:1", "x", tmp_path, ATOLL_GATEWAY_PORT="many", ATOLL_GATEWAY_COLOUR="blue")
    problem = refused_start(settings)
    assert "ATOLL_GATEWAY_PORT" in problem and "ATOLL_GATEWAY_COLOUR" in problem


async def test_a_port_that_is_taken_refuses_to_start(engine: FakeEngine, tmp_path: Path) -> None:
    port = engine.url.rpartition(":")[2]
    settings = settings_of("127.0.0.1:1", engine.url, tmp_path, ATOLL_GATEWAY_PORT=port)
    assert port in await asyncio.to_thread(refused_start, settings)


async def test_it_starts_before_its_registry_and_says_that_it_is_missing(tmp_path: Path, engine: FakeEngine) -> None:
    port, nowhere = free_port(), free_port()
    settings = settings_of(f"127.0.0.1:{nowhere}", engine.url, tmp_path, ATOLL_GATEWAY_PORT=str(port))
    async with service_beside("atoll.gateway", settings, tmp_path / "log", port):
        status, answer = await post(port, "/v1/chat/completions", {**HELLO, "model": SCENARIO})
        assert status == 503 and answer["error"]["code"] == "service_unavailable"
