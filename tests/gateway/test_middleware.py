"""The token, bodies that are too large or too slow, too many chats at once, and defects."""

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
from tests.gateway.store_world import eventually

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
    assert [log for log in logs if log["log_level"] == "error"] == [] and await web.samples() == []


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


async def trickle(web: HttpGateway, head: bytes, body: bytes) -> tuple[bytes, int]:
    """Sends a request's head at once and its body a byte at a time; the answer's bytes until the connection is closed,
    and how many bytes of the body were taken."""
    host, _, port = web.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    answer, sent = asyncio.create_task(reader.read()), 0
    while not answer.done() and sent < len(body):
        writer.write(body[sent : sent + 1])
        sent += 1
        await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        received = await answer
    writer.close()
    return received, sent


async def test_a_body_that_trickles_in_is_refused_and_its_connection_closed(
    web: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.middleware.BODY_SECONDS", 0.3)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
    answer, sent = await trickle(web, head, b" " * 1000)
    assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer and sent < 100
    assert (await web.chat()).status == 200


async def test_headers_that_trickle_in_are_not_waited_for(web: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.gateway.http_server.HEADER_SECONDS", 0.3)
    answer, sent = await trickle(web, b"", f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Long: ".encode() + b"a" * 1000)
    assert answer == b"" and sent < 100


async def test_an_answer_may_take_longer_than_a_body(
    web: HttpGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.middleware.BODY_SECONDS", 0.2)
    monkeypatch.setattr("atoll.gateway.http_server.HEADER_SECONDS", 0.2)
    engine.behaviour.pause_s = 0.1
    assert (await web.chat()).status == 200 and (await web.stream())[-1] == "[DONE]"


@pytest.mark.parametrize("streamed", [True, False])
async def test_one_chat_more_than_allowed_is_told_to_come_again(
    registry_address: str, engine: FakeEngine, tmp_path: Path, streamed: bool
) -> None:
    engine.behaviour.pause_s = 0.1
    async with http_gateway(registry_address, tmp_path, (engine.url,), max_chats=2) as web:
        running = [asyncio.create_task(web.stream() if streamed else web.chat()) for _ in range(2)]
        await eventually(lambda: len(engine.requests) == 2)
        refused = await web.chat()
        assert refused.status == 429 and refused.error["code"] == "too_many_requests"
        assert refused.error["type"] == "rate_limit_error" and refused.headers["retry-after"] == "1"
        assert (await web.get("/atoll/status")).status == 200, "everything else goes on"
        await asyncio.gather(*running)
        assert (await web.chat()).status == 200 and len(await web.samples()) == 3


async def test_a_chat_that_is_refused_or_whose_client_leaves_gives_its_place_back(
    registry_address: str, engine: FakeEngine, tmp_path: Path
) -> None:
    async with http_gateway(registry_address, tmp_path, (engine.url,), max_chats=1) as web:
        assert (await web.chat(temperature=9)).status == 400
        engine.behaviour.pause_s = 0.1
        leaving = asyncio.create_task(web.chat())
        await eventually(lambda: len(engine.requests) == 1)
        leaving.cancel()
        engine.behaviour.pause_s = 0.0
        while (answer := await web.chat()).status == 429:
            await asyncio.sleep(0.01)
        assert answer.status == 200


async def test_a_defect_is_answered_and_logged_once(
    web: HttpGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_scenario: str) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(web.gateway.scenarios, "head", broken)
    with capture_logs() as logs:
        answer = await web.chat()
    assert answer.status == 500 and answer.error["code"] == "internal"
    [entry] = [log for log in logs if log["log_level"] == "error"]
    assert entry["incident"] in answer.error["message"]
    assert caplog.records == [], "the server below says nothing of it"
