"""HTTP to one engine: one connection pool, and every transport failure as one of the engine errors."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import structlog
from atoll.common.engine_frames import raise_for_error, text_of_error
from atoll.common.engine_types import EngineUnavailable

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are dropped before SGLang drops them, after five seconds: a request that meets its end is lost."""

T = TypeVar("T")


class EngineHttp:
    """Connections to `base_url`; a read that is silent for `idle_timeout_s` fails."""

    def __init__(self, base_url: str, idle_timeout_s: float) -> None:
        self._base_url = base_url
        self._idle_timeout_s = idle_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None) -> bytes:
        """The body of a whole answer."""
        async with self.request(method, path, body, timeout_s) as response:
            return await response.read()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200 to read from; leaving the context early drops the connection.

        Raises:
            EngineUnavailable: no connection, no answer in time, a dropped connection, or a status that says so.
            EngineRefused: any other status.
        """
        if self._session is None:
            # As many connections as replies: the engine has the queue, and a second one here would hide it.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_SECONDS, sock_read=self._idle_timeout_s)
        try:
            async with self._session.request(method, self._base_url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise_for_error(text_of_error(await response.read()), response.status)
                yield response
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._base_url}{path} did not answer in time") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self._base_url}{path}: {error or type(error).__name__}") from error


async def finish_despite_cancel(work: Coroutine[object, object, T]) -> T:
    """Run `work` to its end even when the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            log.error("engine may be paused", exc_info=task.exception())
        raise cancelled
    return task.result()
