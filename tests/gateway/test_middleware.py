"""The token, and bodies that are too large."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.conftest import TOKEN
from tests.gateway.http_gateway import HELLO, SCENARIO, HttpGateway, http_gateway

CHAT = "/v1/chat/completions"


def body_of(size: int) -> bytes:
    """A valid request of about this many bytes."""
    return json.dumps({"model": SCENARIO, "messages": [{"role": "user", "content": "a" * size}]}).encode()


def resident_bytes() -> int:
    """Memory of this process, which the gateway runs in."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size >> 16):
        yield b"a" * (1 << 16)


async def test_a_body_of_100_mb_is_413_announced_or_not_and_is_never_held(web: HttpGateway, engine: FakeEngine) -> None:
    before = resident_bytes()
    peak = before

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_bytes())
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    size = 100 << 20
    for headers in ({"content-length": str(size)}, {}):
        async with web.client.post(web.url + CHAT, data=pieces(size), headers=headers) as response:
            error = json.loads(await response.read())["error"]
            assert response.status == 413 and error["code"] == "body_too_large"
    watching.cancel()
    assert peak - before < 40 << 20, f"grew by {(peak - before) >> 20} MiB"
    assert await web.samples() == [] and engine.requests == []
    assert (await web.chat()).status == 200


async def test_the_limit_is_8_mib(web: HttpGateway) -> None:
    just_below = await web.post(CHAT, body_of((8 << 20) - 1000))
    assert just_below.status == 400 and just_below.error["code"] == "sequence_too_long"
    assert (await web.post(CHAT, body_of(8 << 20))).status == 413
    assert (await web.post("/atoll/report", body_of(8 << 20))).status == 413


@pytest.mark.parametrize("path", [CHAT, "/atoll/report"])
async def test_a_client_that_leaves_in_mid_body_is_no_defect(web: HttpGateway, path: str) -> None:
    host, _, port = web.url.removeprefix("http://").partition(":")
    with capture_logs() as logs:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.2)
    assert logs == [] and await web.samples() == []


async def test_a_client_that_asks_first_is_refused_before_it_sends_anything(web: HttpGateway) -> None:
    host, _, port = web.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.fixture
async def guarded(registry_address: str, engine: FakeEngine, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    async with http_gateway(registry_address, tmp_path, (engine.url,), token=TOKEN) as running:
        yield running


async def test_every_route_but_healthz_needs_the_token(guarded: HttpGateway, engine: FakeEngine) -> None:
    paths = ["/v1/models", "/atoll/status", f"/atoll/scenarios/{SCENARIO}/versions", "/openapi.json", "/nowhere"]
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
    ]
    for headers in wrong:
        answers = [await guarded.get(path, headers) for path in paths]
        answers += [await guarded.post(path, HELLO, headers) for path in (CHAT, "/atoll/report")]
        for answer in answers:
            assert answer.status == 401 and answer.error["code"] == "unauthenticated"
            assert answer.error["type"] == "authentication_error" and answer.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in json.dumps(answer.body)
        assert (await guarded.get("/healthz", headers)).status == 200
    assert engine.requests == [] and await guarded.samples() == []
    right = {"authorization": f"Bearer {TOKEN}"}
    assert (await guarded.post(CHAT, HELLO, right)).status == 200
    for path in paths[:-1]:
        assert (await guarded.get(path, right)).status == 200, path
