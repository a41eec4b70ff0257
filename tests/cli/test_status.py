import json
from collections.abc import Mapping

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from atoll.cli.gateway_api import Json
from atoll.cli.status import read_status, status_view
from atoll.cli.versions import read_versions
from atoll.common.errors import AtollError, Unavailable
from rich.console import Console

NOWHERE = "127.0.0.1:1"


def shown(body: Mapping[str, Json]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(status_view(body))
    return capture.get()


async def answered(status: int, text: str) -> Mapping[str, Json]:
    """What read_status makes of one answer."""

    async def handle(request: web.Request) -> web.Response:
        assert request.path == "/atoll/status"
        assert request.headers["authorization"] == "Bearer secret"
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    async with TestServer(app) as server:
        return await read_status(f"http://{server.host}:{server.port}/", "secret")


def test_lists_of_objects_become_tables_and_plain_values_stand_together() -> None:
    text = shown(
        {
            "last_training_error": None,
            "ready": True,
            "scenarios": [{"scenario": "math", "head_number": 2}],
            "engines": [],
        }
    )
    assert [word in text for word in ("last_training_error", "yes", "scenarios", "head number", "math")] == [True] * 5


def test_a_few_objects_of_many_fields_stand_beside_each_other() -> None:
    engines: list[Json] = [{"url": f"http://{n}", "healthy": True, "version": "1:3"} for n in ("a", "b")]
    lines = shown({"engines": engines}).splitlines()
    assert any("url" in line and "http://a" in line and "http://b" in line for line in lines)


async def test_the_status_is_read_with_the_token() -> None:
    assert await answered(200, '{"scenarios": []}') == {"scenarios": []}


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (401, json.dumps({"error": {"message": "the request needs a token"}}), "401: the request needs a token"),
        (404, "<html>", "is it a gateway"),
        (200, "[1]", "not a JSON object"),
        (200, "<html>", "not a JSON object"),
    ],
)
async def test_an_answer_that_is_no_status_is_a_refusal_in_words(status: int, text: str, said: str) -> None:
    with pytest.raises(AtollError, match=said):
        await answered(status, text)


async def test_a_gateway_that_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=f"the gateway does not answer at http://{NOWHERE}/atoll/status"):
        await read_status(f"http://{NOWHERE}", None)


async def test_a_registry_that_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=f"the registry does not answer at {NOWHERE}"):
        await read_versions(NOWHERE, "math", None)
