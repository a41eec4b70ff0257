"""What happens to every HTTP request before it is routed: the token is checked, large bodies are refused."""

import asyncio

from atoll.api.errors.v1 import errors_pb2
from atoll.common.auth import check_token
from atoll.common.errors import AtollError
from atoll.gateway.http_errors import error_response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/healthz"})
"""Answered without a token: probes carry none."""

MAX_BODY_BYTES = 8 << 20
"""A million tokens of English; more than any engine here takes."""

DISCARD_BYTES = 128 << 20
DISCARD_SECONDS = 10.0
"""How much of a refused body is read and thrown away. A connection that is closed while its client still sends is
reset, and the client never sees the refusal."""


class TokenCheck:
    """Refuses a request without the deployment's bearer token, before a byte of its body is read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                check_token(Headers(scope=scope).get("authorization"), self._token)
            except AtollError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyTooLarge(AtollError):
    """Raised into the reader of a body that outgrew the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than {limit} bytes; send less text", reason=errors_pb2.REASON_BODY_TOO_LARGE
        )


class BodyLimit:
    """Refuses a body over the limit with 413, whether or not its length is announced; it is never held in memory."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._limit:
            # A client that asks first sends nothing when it is refused first.
            if headers.get("expect", "").lower() != "100-continue":
                await _discard(receive)
            await error_response(_BodyTooLarge(self._limit))(scope, receive, send)
            return

        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._limit:
                    await _discard(receive, message)
                    raise _BodyTooLarge(self._limit)
            return message

        await self._app(scope, counted, send)


async def _discard(receive: Receive, message: Message | None = None) -> None:
    """Reads to the end of the body, or as far as the bounds above allow."""
    seen = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while (message is None or message.get("more_body", False)) and seen < DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request":
                    return
                seen += len(message.get("body", b""))
    except TimeoutError:
        return
