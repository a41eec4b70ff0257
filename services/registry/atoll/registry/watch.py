"""WatchVersions: every version once, in order, at once after a commit here and soon after one elsewhere."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Unavailable
from atoll.registry.chain import Chain
from atoll.registry.types import Version

POLL_SECONDS = 0.5
"""Commits of other processes on the same database are seen this late at most."""

HEARTBEAT_SECONDS = 10.0
READ_AT_ONCE = 50


class CommitSignal:
    """Wakes every watch after a commit of this process, and ends them all at shutdown. For one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.closed = False

    def ticket(self) -> asyncio.Event:
        """Take it before reading: it is set by the first commit after this call, so none is missed."""
        return self._next

    def notify(self) -> None:
        fired, self._next = self._next, asyncio.Event()
        fired.set()

    def close(self) -> None:
        self.closed = True
        self.notify()


@dataclass(frozen=True)
class Event:
    """A version, or a heartbeat when there is none. Example: Event(revision=5, version=None)."""

    revision: int
    version: Version | None


async def watch(
    chain: Chain, signal: CommitSignal, scenario: str, from_revision: int, heartbeat_s: float = HEARTBEAT_SECONDS
) -> AsyncGenerator[Event, None]:
    """Yields events for ever.

    Raises what `Chain.check_revision` raises, and Unavailable(NOT_READY) when the service stops: the caller resumes
    from the last revision elsewhere.
    """
    await asyncio.to_thread(chain.check_revision, scenario, from_revision)
    loop = asyncio.get_running_loop()
    revision = from_revision
    last_sent = loop.time()
    while not signal.closed:
        ticket = signal.ticket()
        versions = await asyncio.to_thread(chain.since, scenario, revision, READ_AT_ONCE)
        for version in versions:
            yield Event(version.revision, version)
            revision = version.revision
        if versions:
            last_sent = loop.time()
            continue
        quiet = loop.time() - last_sent
        if quiet >= heartbeat_s:
            yield Event(revision, None)
            last_sent, quiet = loop.time(), 0.0
        try:
            async with asyncio.timeout(min(POLL_SECONDS, heartbeat_s - quiet)):
                await ticket.wait()
        except TimeoutError:
            continue
    raise Unavailable(
        "the registry is stopping; watch again from the last revision", reason=errors_pb2.REASON_NOT_READY
    )
