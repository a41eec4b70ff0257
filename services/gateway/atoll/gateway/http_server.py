"""uvicorn inside the gateway's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from atoll.common.auth import refuse_open_listener
from atoll.common.errors import BadConfiguration
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

DRAIN_SECONDS = 20
"""How long answers in progress may take at a stop; then they are cut, and nothing of them is recorded."""


HEADER_SECONDS = 30.0
"""How long a client may take from connecting, or from a request's first byte, to the end of the headers."""


class _Protocol(HttpToolsProtocol):
    """Hangs up on a client whose request does not begin; the body has a limit of its own (middleware.py)."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """Leaves signals to the process, which has more to stop than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Binds when made, answers from start() to stop(); `port` is the port that was bound (0 picks a free one)."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        """Raises BadConfiguration when the port is taken, or open to others without a token."""
        refuse_open_listener(host, token, "ATOLL_GATEWAY_HOST")
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise BadConfiguration(
                f"cannot listen on {host}:{port}: {error.strerror}", field="ATOLL_GATEWAY_PORT"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Returns when requests are answered."""
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Takes no more requests and lets those in progress end, for DRAIN_SECONDS."""
        if self._server is None or self._serving is None:
            self._listener.close()
            return
        self._server.should_exit = True
        await self._serving


def _listen(host: str, port: int) -> socket.socket:
    # The protocol is named because asyncio switches Nagle's algorithm off only for sockets that name it, and
    # socket.create_server() names none: every answer of two writes would wait 40 ms for the client's acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
