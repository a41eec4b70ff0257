"""A gateway with its HTTP side in the test's own event loop, on real sockets, before engines that the test chooses."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from atoll.gateway.app import build_app
from atoll.gateway.assembly import Gateway, build_gateway
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.http_server import HttpServer
from atoll.gateway.records import PackedSample, Sample
from atoll.gateway.settings import GatewaySettings

SCENARIO = "math"
HELLO = {"model": SCENARIO, "messages": [{"role": "user", "content": "Say hello."}]}


@dataclass(frozen=True)
class Answer:
    """What a client got. Example: Answer(200, {"x-atoll-receipt": "4f0c..."}, {"choices": [...]})"""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, str]:
        error = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


@dataclass(frozen=True)
class HttpGateway:
    """A gateway and a client of it."""

    url: str
    gateway: Gateway
    engines: EnginePool
    client: aiohttp.ClientSession

    async def chat(self, body: object = None, **fields: Any) -> Answer:
        """Posts HELLO with the fields, or the body as it is."""
        return await self.post("/v1/chat/completions", {**HELLO, **fields} if body is None else body)

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as response:
            return Answer(response.status, _lower(response.headers), json.loads(await response.read() or b"null"))

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        async with self.client.get(self.url + path, headers=headers) as response:
            return Answer(response.status, _lower(response.headers), json.loads(await response.read()))

    async def stream(self, **fields: Any) -> list[Any]:
        """The frames of a streamed answer; "[DONE]" is the last one when it was sent."""
        async with self.client.post(
            self.url + "/v1/chat/completions", json={**HELLO, "stream": True, **fields}
        ) as response:
            assert response.status == 200, await response.text()
            return frames_of(await response.read())

    async def samples(self) -> list[Sample]:
        """Everything that is stored, newest first."""
        page, _ = await self.gateway.samples.page(SCENARIO, None, 1000, "")
        return list(page)

    async def sample(self, receipt: str) -> PackedSample:
        return await self.gateway.samples.get(SCENARIO, receipt)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def frames_of(data: bytes) -> list[Any]:
    events = data.decode().split("\n\n")
    assert events.pop() == "", "the last event is not complete"
    payloads = [event.removeprefix("data: ") for event in events]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@asynccontextmanager
async def http_gateway(
    registry: str, directory: Path, engines: tuple[str, ...], **settings: Any
) -> AsyncIterator[HttpGateway]:
    """registry: host:port. directory: of the database."""
    chosen = GatewaySettings(
        registry=registry,
        engines=engines,
        database_url=f"sqlite:///{directory / 'gateway.db'}",
        port=0,
        grpc_port=0,
        **settings,
    )
    http = HttpServer(chosen.host, chosen.port, chosen.token_text)
    gateway = build_gateway(chosen)
    pool = EnginePool(chosen.engines, chosen.request_timeout_s)
    await gateway.start()
    await pool.start()
    await http.start(build_app(chosen, gateway, pool))
    try:
        async with aiohttp.ClientSession() as client:
            yield HttpGateway(f"http://127.0.0.1:{http.port}", gateway, pool, client)
    finally:
        await http.stop()
        await pool.stop()
        await gateway.stop()
