"""What happens to every HTTP request before it is routed.

```
Defects: what nobody expected is logged once -> TokenCheck -> ChatLimit: no more at once than allowed
    -> BodyLimit: neither too large nor too slow -> the routes
```
"""

import asyncio

from atoll.api.errors.v1 import errors_pb2
from atoll.common.auth import check_token
from atoll.common.errors import AtollError
from atoll.gateway.http_errors import error_response, hidden_defect
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/healthz"})
"""Answered without a token: probes carry none."""

MAX_BODY_BYTES = 8 << 20
"""A million tokens of English; more than any engine here takes."""

BODY_SECONDS = 60.0
"""How long a body may take to arrive: 8 MiB at a megabit a second. A client that trickles holds a connection and memory
for nothing."""

CHAT_PATH = "/v1/chat/completions"

DISCARD_BYTES = 128 << 20
DISCARD_SECONDS = 10.0
"""How much of a refused body is read and thrown away. A connection that is closed while its client still sends is
reset, and the client never sees the refusal."""


class Defects:
    """Answers what nobody expected, and logs it once: the server below would log it again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            answer = error_response(hidden_defect(error))
            # An answer that has begun is cut, which its client sees.
            if not started:
                await answer(scope, receive, send)


class ChatLimit:
    """Refuses a chat with 429 while as many as allowed are being answered, before its body is read."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT_PATH:
            await self._app(scope, receive, send)
            return
        if self._running >= self._most:
            refusal = AtollError(
                f"{self._running} chats are being answered, which is as many as may be at once; try again",
                reason=errors_pb2.REASON_TOO_MANY_REQUESTS,
                retry_after_s=1.0,
            )
            await error_response(refusal)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


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


class _BodyTooSlow(AtollError):
    """Raised into the reader of a body that does not arrive."""

    def __init__(self) -> None:
        super().__init__(
            f"the body did not arrive within {BODY_SECONDS:g} s; send it at once",
            reason=errors_pb2.REASON_REQUEST_TIMEOUT,
        )


class BodyLimit:
    """Refuses a body over the limit with 413, whether or not its length is announced; it is never held in memory. One
    that is not there in time is refused with 408."""

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

        seen, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:
                # What comes now is that the client left, and that may take as long as the answer.
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooSlow from None
            if message["type"] == "http.request":
                complete = not message.get("more_body", False)
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
