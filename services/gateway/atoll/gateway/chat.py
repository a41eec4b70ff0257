"""POST /v1/chat/completions: prepare, sample, record, answer. In this order: no answer is ever lost.

```
Chat --ChatRun--> chunks --(stream: frames as they come)--> record (durable) --> the last byte of the reply
```
"""

from collections.abc import AsyncIterator

import structlog
from atoll.common.errors import AtollError
from atoll.gateway.chat_request import ChatPreparer
from atoll.gateway.chat_run import ChatRun
from atoll.gateway.client_gone import ClientGone, unless_gone
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.http_errors import CLIENT_CLOSED_REQUEST, hidden_defect
from atoll.gateway.openai_reply import StreamFrames, error_frame, receipt_header, whole_reply
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenario_choice import HEADER
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

log = structlog.get_logger(__name__)


class ChatAnswerer:
    """Answers chat requests, plain and streamed."""

    def __init__(self, preparer: ChatPreparer, pool: EnginePool, writer: SampleWriter, timeout_s: float) -> None:
        """timeout_s: bounds the sampling of one request."""
        self._preparer = preparer
        self._pool = pool
        self._writer = writer
        self._timeout_s = timeout_s

    async def answer(self, request: Request) -> Response:
        """Raises AtollError for every refusal, before a sample is stored."""
        chat = await self._preparer.prepare(await request.body(), request.headers.get(HEADER))
        run = ChatRun(chat, self._pool, self._writer, self._timeout_s)
        work = _first_frames(run) if chat.request.stream else _whole(run)
        try:
            with structlog.contextvars.bound_contextvars(scenario=chat.scenario, receipt=chat.receipts[0]):
                return await unless_gone(work, request.receive)
        except ClientGone:
            await run.abandon()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            await run.close()
            raise


async def _whole(run: ChatRun) -> Response:
    async for _ in run.chunks():
        pass
    await run.record(*run.completions)
    body = whole_reply(run.chat, run.completions)
    return Response(body, media_type="application/json", headers=receipt_header(run.chat))


async def _first_frames(run: ChatRun) -> Response:
    """Answers once the first tokens are there: until then an engine that is down is a 503, not a broken stream."""
    frames = _frames(run)
    return FrameResponse(run, await anext(frames), frames)


async def _frames(run: ChatRun) -> AsyncIterator[bytes]:
    frames = StreamFrames(run.chat)
    started: set[int] = set()
    async for completion, chunk in run.chunks():
        parts: list[bytes] = []
        if completion.index not in started:
            started.add(completion.index)
            parts.append(frames.role(completion.index))
        if chunk.text:
            parts.append(frames.text(completion.index, chunk.text))
        # Without text, half a character is held back or the end token came.
        if parts:
            yield b"".join(parts)
        if chunk.finish is not None:
            await run.record(completion)
            yield frames.end(completion)
    yield frames.closing(run.completions)


class FrameResponse(Response):
    """Sends frames as they are made. When the client leaves, the run is abandoned; when it fails, an error ends it."""

    media_type = "text/event-stream"

    def __init__(self, run: ChatRun, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__(headers={**receipt_header(run.chat), "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._run = run
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send(send), receive)
        except ClientGone:
            await self._run.abandon()
        finally:
            await self._run.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._guarded():
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for frame in self._rest:
                yield frame
        except AtollError as error:
            chat = self._run.chat
            log.warning("stream broke", scenario=chat.scenario, receipt=chat.receipts[0], problem=error.message)
            yield error_frame(error)
        except Exception as error:
            yield error_frame(hidden_defect(error))
