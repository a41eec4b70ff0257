"""Makes samples durable: concurrent requests share one transaction and its fsync.

```
record() --check, pack--> queue --one thread--> everything that waits, in one transaction --> every record() returns
```
"""

import asyncio
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, InternalError, Unavailable
from atoll.common.failpoints import reached
from atoll.gateway.database import Database
from atoll.gateway.records import NewSample
from atoll.gateway.sample_checks import check_sample
from atoll.gateway.sample_packing import SampleRow, pack, row_bytes
from atoll.gateway.tables import samples
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

log = structlog.get_logger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Samples that wait for the store, in all. Above it, record() waits for room before it queues."""

MAX_GROUP_SAMPLES = 512
MAX_GROUP_BYTES = 64 << 20
"""Bounds of one transaction: past them an fsync is amortised, and a longer one only delays the first of the group."""


SWITCH_SECONDS = 0.0005
"""How long the event loop may keep the interpreter while the writer wants it. SQLite gives the interpreter up at every
row, and with Python's 5 ms a group of 100 rows would wait half a second for a busy event loop: measured, a third less
throughput."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A packed sample and the request that waits for it."""

    row: SampleRow
    size: int
    done: asyncio.Future[None]


class SampleWriter:
    """One thread commits everything that waits in one transaction. Make it in the running event loop."""

    def __init__(self, database: Database, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._database = database
        self._max_waiting_bytes = max_waiting_bytes
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self.waiting_bytes = 0
        """Of the samples that are queued, about."""
        self._room = asyncio.Event()
        self._stopping = False
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="sample-writer", daemon=True)
        self._thread.start()

    async def record(self, sample: NewSample) -> None:
        """Returns when the sample is durable and its receipt valid. Once queued, it is stored even if the caller is
        cancelled.

        Raises InternalError(ENGINE_PROTOCOL) for a sample that does not add up, AtollError(STORAGE_FULL), Unavailable.
        """
        check_sample(sample)
        row = pack(sample)
        size = row_bytes(row)
        while self.waiting_bytes and self.waiting_bytes + size > self._max_waiting_bytes:
            self._room.clear()
            await self._room.wait()
        if self._stopping:
            raise Unavailable("the gateway is stopping; send the request again", reason=errors_pb2.REASON_NOT_READY)
        waiting = _Waiting(row, size, self._loop.create_future())
        self.waiting_bytes += size
        self._queue.put(waiting)
        await waiting.done

    async def stop(self) -> None:
        """Stores what waits, then ends the thread."""
        self._stopping = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            first = self._queue.get()
            if first is None:
                return
            group, stopping = self._group_from(first)
            self._store(group)

    def _group_from(self, first: _Waiting) -> tuple[list[_Waiting], bool]:
        """Everything that waits now, within bounds, and whether the end was among it."""
        group, total = [first], first.size
        while len(group) < MAX_GROUP_SAMPLES and total < MAX_GROUP_BYTES:
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                break
            if waiting is None:
                return group, True
            group.append(waiting)
            total += waiting.size
        return group, False

    def _store(self, group: Sequence[_Waiting]) -> None:
        error: Exception | None = None
        try:
            with self._database.writing() as connection:
                connection.execute(insert(samples), [waiting.row for waiting in group])
            reached("gateway.sample_recorded")
        except IntegrityError as conflict:
            if len(group) > 1:
                # One row that cannot be stored must not fail the others.
                for waiting in group:
                    self._store([waiting])
                return
            error = InternalError(f"sample {group[0].row['receipt']} is not recorded: {conflict.orig}")
        except AtollError as refusal:
            log.error("samples not stored", count=len(group), reason=refusal.code, error=refusal.message)
            error = refusal
        except Exception as defect:
            log.error("samples not stored", count=len(group), exc_info=defect)
            error = InternalError("the sample could not be stored: a defect of Atoll, which the log explains")
        self._loop.call_soon_threadsafe(self._finish, group, error)

    def _finish(self, group: Sequence[_Waiting], error: Exception | None) -> None:
        for waiting in group:
            self.waiting_bytes -= waiting.size
            if waiting.done.cancelled():
                continue
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)
        self._room.set()
