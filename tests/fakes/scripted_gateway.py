"""The gateway's HTTP side as commands see it: answers that a test wrote, and what it was asked."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class ScriptedGateway:
    """`answers` of a "METHOD /path" are given one after another, the last one for ever: status and body."""

    url: str = ""
    answers: dict[str, list[tuple[int, Any]]] = field(default_factory=lambda: defaultdict(list))
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    """What was asked, its query, and its body."""

    async def handle(self, request: web.Request) -> web.Response:
        key = f"{request.method} {request.path}"
        raw = await request.read()
        self.asked.append((key, dict(request.query), json.loads(raw) if raw else None))
        script = self.answers[key]
        if not script:
            error = {"message": f"nothing at {key}", "type": "not_found_error", "param": None, "code": "job_not_found"}
            return web.json_response({"error": error}, status=404)
        status, body = script.pop(0) if len(script) > 1 else script[0]
        return web.json_response(body, status=status)


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[ScriptedGateway]:
    gateway = ScriptedGateway()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", gateway.handle)
    async with TestServer(app) as server:
        gateway.url = f"http://{server.host}:{server.port}"
        yield gateway
