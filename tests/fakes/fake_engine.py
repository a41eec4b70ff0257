"""The part of SGLang's HTTP interface that the gateway calls, with a deterministic token stream and faults on demand.

As a process: `python -m tests.fakes.fake_engine --port 30000`.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

END_TOKEN = 2


@dataclass
class Behaviour:
    """What the replies to come look like. Tests change it while the engine runs."""

    length: int = 6
    """Tokens of a reply, the end token included, unless max_new_tokens cuts it."""
    pause_s: float = 0.0
    """Before every token."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and message of the next calls of /generate, one each."""
    hang_up_after: int | None = None
    """Drops the connection after this many tokens."""
    cut_after: int | None = None
    """Ends the reply as aborted by the engine after this many tokens."""
    gap_in_spans: bool = False
    """The last token has no weight version."""
    switch_at: int | None = None
    """From this token on, weights "1:<n+1>" sample."""
    characters: str = ""
    """Text of the reply, one character over two tokens each: the first has no text yet."""


class FakeEngine:
    """Use as an async context manager; `url` is its base URL."""

    def __init__(self, port: int = 0, *, keep_requests: bool = True, host: str = "127.0.0.1") -> None:
        self.behaviour = Behaviour()
        self.weight_version = "1:0"
        self.model_path = "model"
        self.context_length: int | None = 2048
        self.requests: list[dict[str, Any]] = []
        """Bodies of /generate."""
        self.aborted: list[str] = []
        """Names given to /abort_request."""
        self.sampled = 0
        """Tokens of all replies."""
        self.hung_up = 0
        """Replies whose reader went away."""
        self._keep_requests = keep_requests
        self._cut: dict[str, asyncio.Event] = {}
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Again after stop(): on the port it had."""
        app = web.Application(client_max_size=64 << 20)
        self.routes(app)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{self._port}"

    def routes(self, app: web.Application) -> None:
        """Adds what this engine answers."""
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)

    async def stop(self) -> None:
        """Nothing listens on the port any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _model_info(self, _request: web.Request) -> web.Response:
        info = {"model_path": self.model_path, "weight_version": self.weight_version, "architectures": ["Fake"]}
        return web.json_response(info)

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"context_length": self.context_length})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._cut:
            self._cut[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._keep_requests:
            self.requests.append(body)
        if self.behaviour.refusals:
            status, message = self.behaviour.refusals.pop(0)
            return web.json_response({"error": {"message": message, "code": status}}, status=status)
        frames = self._frames(body)
        try:
            if not body.get("stream"):
                return web.json_response(_joined([frame async for frame in frames]))
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for frame in frames:
                await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.hung_up += 1
            raise
        except _HangUp:
            assert request.transport is not None
            request.transport.abort()
            raise
        return response

    async def _frames(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        behaviour, first_version = self.behaviour, self.weight_version
        length = min(behaviour.length, body["sampling_params"]["max_new_tokens"])
        cut = self._cut.setdefault(body.get("rid", ""), asyncio.Event())
        sent = 0
        versions: list[str] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            if behaviour.hang_up_after == sent:
                raise _HangUp
            if behaviour.pause_s:
                await _sleep_until(cut, behaviour.pause_s)
            if cut.is_set() or behaviour.cut_after == sent:
                finish = {"type": "abort", "message": "Abort in the engine"}
                yield _frame(body, [], "", sent, finish, self._spans(versions))
                return
            version, sampled = await self._sample(body["input_ids"], sent, first_version)
            token = END_TOKEN if sent == behaviour.length - 1 else sampled
            versions.append(version)
            sent += 1
            self.sampled += 1
            if sent == length:
                stopped = token == END_TOKEN
                finish = {"type": "stop", "matched": END_TOKEN} if stopped else {"type": "length", "length": length}
            text = self._text(token, sent)
            yield _frame(body, [token], text, sent, finish, self._spans(versions))

    def _text(self, token: int, sent: int) -> str:
        if self.behaviour.characters:
            return self.behaviour.characters[sent // 2 - 1] if sent % 2 == 0 else ""
        return "" if token == END_TOKEN else text_of(token)

    async def _sample(self, input_ids: list[int], position: int, first_version: str) -> tuple[str, int]:
        """The weight version that samples at a position of the reply, and the token."""
        at = self.behaviour.switch_at
        version = first_version
        if at is not None and position >= at:
            incarnation, number = first_version.split(":")
            version = f"{incarnation}:{int(number) + 1}"
        return version, token_at(input_ids, position)

    def _spans(self, versions: list[str]) -> list[dict[str, Any]]:
        """One span per run of equal versions."""
        told = versions[:-1] if self.behaviour.gap_in_spans else versions
        if not told:
            return [{"version": self.weight_version, "start": 0, "end": 0}]
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(told):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
        return spans


class _HangUp(Exception):
    """The engine dies."""


def token_at(input_ids: list[int], position: int) -> int:
    """The token that is sampled at a position of the reply; depends on the prompt, so that mixed-up replies show."""
    return 300 + (sum(input_ids) + 7 * position) % 500


def text_of(token: int) -> str:
    return f" {token}"


def log_prob_at(position: int) -> float:
    return -0.25 * (position + 1)


def top_k_at(position: int, k: int) -> list[tuple[float, int]]:
    """Log-probs and ids of the likeliest tokens at a position of the reply."""
    return [(log_prob_at(position) - rank, 100 * position + rank) for rank in range(k)]


def _frame(
    body: dict[str, Any], ids: list[int], text: str, sent: int, finish: dict[str, Any] | None, spans: list[Any]
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": body.get("rid", ""),
        "finish_reason": finish,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": sent,
        "cached_tokens": 0,
        "weight_version": spans[-1]["version"],
        "output_token_logprobs": [[log_prob_at(sent - 1), token, None] for token in ids],
    }
    k = body.get("top_logprobs_num", 0)
    if k:
        meta["output_top_logprobs"] = [[[*entry, None] for entry in top_k_at(sent - 1, k)] for _ in ids]
    if finish is not None:
        meta["weight_versions"] = spans
    return {"text": text, "output_ids": ids, "meta_info": meta}


def _joined(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """A plain answer from the frames of a streamed one."""
    meta = dict(frames[-1]["meta_info"])
    meta["output_token_logprobs"] = [e for frame in frames for e in frame["meta_info"]["output_token_logprobs"]]
    if "output_top_logprobs" in meta:
        meta["output_top_logprobs"] = [row for frame in frames for row in frame["meta_info"]["output_top_logprobs"]]
    ids = [token for frame in frames for token in frame["output_ids"]]
    return {"text": "".join(frame["text"] for frame in frames), "output_ids": ids, "meta_info": meta}


async def _sleep_until(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


async def _serve(port: int, length: int) -> None:
    engine = FakeEngine(port, keep_requests=False)
    engine.behaviour.length = length
    await engine.start()
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--length", type=int, default=16)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.length))
