"""Connections to an engine: kept while they are used, dropped before the engine drops them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from atoll.common import engine_http
from atoll.common.engine_http import EngineHttp


@pytest.fixture
async def connections() -> AsyncIterator[tuple[str, list[object]]]:
    """The base URL of a server, and the connection of each request that it got."""
    seen: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.transport)
        return web.Response(body=b"{}")

    app = web.Application()
    app.router.add_get("/model_info", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    await runner.cleanup()


async def test_an_idle_connection_is_dropped_before_the_engine_does_it(
    connections: tuple[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_http.KEEP_ALIVE_SECONDS < 5, "SGLang drops idle connections after five seconds"
    monkeypatch.setattr(engine_http, "KEEP_ALIVE_SECONDS", 0.5)
    url, seen = connections
    http = EngineHttp(url, 5.0)
    for pause_s in (0.0, 0.0, 1.5):
        await asyncio.sleep(pause_s)
        await http.answer("GET", "/model_info", None, 5.0)
    await http.close()
    assert seen[0] is seen[1]
    assert seen[2] is not seen[0]
