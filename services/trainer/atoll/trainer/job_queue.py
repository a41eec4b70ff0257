"""The jobs that this process runs or was asked about: a record each, one running at a time, and whoever watches them.

```
SUBMITTED -> ADMITTED -> SCORED -> PREPARED -> RUNNING -> STAGED -> COMMITTED -> SERVED
     \\__ DROPPED, REFUSED, FAILED, CANCELLED (until STAGED)     \\__ DEFERRED: waits, then goes on
```
The runner moves a record (`advance`), a caller cancels it (`end_cancelled`), the publisher ends it (`mark_served`).
What is here is for watchers and forgotten with the process: the registry's records (`job_records`) are what counts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.trainer.v1 import job_pb2
from atoll.api.trainer.v1.job_pb2 import JobState
from atoll.common.errors import AtollError, NotFound
from pydantic import JsonValue

FINAL = frozenset(
    {
        job_pb2.JOB_STATE_SERVED,
        job_pb2.JOB_STATE_DROPPED,
        job_pb2.JOB_STATE_REFUSED,
        job_pb2.JOB_STATE_FAILED,
        job_pb2.JOB_STATE_CANCELLED,
    }
)
FINAL_JOBS_KEPT = 1_000
"""Older final jobs are forgotten; the registry still knows them."""


@dataclass(frozen=True)
class JobBody:
    """What a caller submits; the same id with another body is refused.

    Example: JobBody("job-1f...", "chat", "grpo", {"groups_per_step": 4}, ("4f0c...", "77aa..."))
    """

    job_id: str
    scenario: str
    family: str
    options: Mapping[str, JsonValue] | None
    """None for a job that was committed before records were kept: the chain keeps no options."""
    sample_ids: tuple[str, ...]
    restores: int | None = None
    """For a rollback, which trains nothing: the version to bring back."""

    @classmethod
    def rollback(cls, job_id: str, scenario: str, version: int) -> "JobBody":
        return cls(job_id, scenario, "", None, (), version)


@dataclass(frozen=True)
class JobRecord:
    """A job as it stands; replaced as a whole with every change."""

    body: JobBody
    order: int
    """The order in which jobs were recorded, and run."""
    state: JobState.ValueType
    revision: int
    """Grows with every change of any job."""
    created_at: datetime
    updated_at: datetime
    reason: Reason.ValueType = errors_pb2.REASON_UNSPECIFIED
    message: str = ""
    rejected_sample_ids: tuple[str, ...] = ()
    attempt: int = 1
    version: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        return self.state in FINAL


class JobCancelled(AtollError):
    """Raised to the runner when it wants to move a job that a caller cancelled meanwhile."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} was cancelled", reason=errors_pb2.REASON_JOB_CANCELLED)


class JobQueue:
    """Belongs to one event loop: no method is called from a thread."""

    def __init__(self) -> None:
        self._records: dict[str, JobRecord] = {}
        self._waiting: asyncio.PriorityQueue[tuple[int, str]] = asyncio.PriorityQueue()
        self._changed = asyncio.Condition()
        self._served = -1
        # A watcher resumes from a revision it saw before a restart, so revisions grow over restarts as well.
        self._revision = time.time_ns() // 1_000_000

    def find(self, job_id: str) -> JobRecord | None:
        return self._records.get(job_id)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFound (JOB_NOT_FOUND)."""
        record = self._records.get(job_id)
        if record is None:
            raise job_not_found(job_id)
        return record

    def unfinished(self) -> frozenset[str]:
        """The ids of all jobs that are still to run, or running."""
        return frozenset(job_id for job_id, record in self._records.items() if _runs(record))

    async def take_in(self, record: JobRecord) -> JobRecord:
        """A job as the registry tells it; one that has not ended is queued."""
        # Before anything is awaited: a caller that goes away then must not leave a job that nobody runs.
        if _runs(record):
            self._waiting.put_nowait((record.order, record.body.job_id))
        return await self._put(record)

    async def next_job(self) -> JobRecord:
        """Waits for the next job that is still to run."""
        while True:
            _, job_id = await self._waiting.get()
            record = self._records.get(job_id)
            if record is not None and _runs(record):
                return record

    async def advance(
        self,
        job_id: str,
        state: JobState.ValueType,
        *,
        reason: Reason.ValueType = errors_pb2.REASON_UNSPECIFIED,
        message: str = "",
        rejected_sample_ids: tuple[str, ...] = (),
        attempt: int | None = None,
        version: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> JobRecord:
        """Moves a job; what is left out stays, reasons are cleared. Raises JobCancelled when a caller ended it."""
        self.raise_if_cancelled(job_id)
        record = self._records[job_id]
        moved = replace(
            record,
            state=state,
            reason=reason,
            message=message,
            rejected_sample_ids=rejected_sample_ids,
            attempt=record.attempt if attempt is None else attempt,
            version=record.version if version is None else version,
            metrics=record.metrics if metrics is None else metrics,
        )
        return await self._put(moved)

    def raise_if_cancelled(self, job_id: str) -> None:
        """Raises JobCancelled when a caller ended the job."""
        if self._records[job_id].state == job_pb2.JOB_STATE_CANCELLED:
            raise JobCancelled(job_id)

    async def end_cancelled(self, cancelled: JobRecord) -> JobRecord:
        """A caller has ended the job, which the runner learns when it next moves it."""
        known = self._records.get(cancelled.body.job_id)
        return known if known is not None and known.final else await self._put(cancelled)

    def as_served(self, record: JobRecord) -> JobRecord:
        """The same record; SERVED when it is committed and the engines are known to answer with its version."""
        committed = record.state == job_pb2.JOB_STATE_COMMITTED
        if not committed or record.version is None or record.version > self._served:
            return record
        return replace(record, state=job_pb2.JOB_STATE_SERVED)

    async def mark_served(self, number: int) -> bool:
        """The engines answer with version `number`: every committed job up to it is SERVED. Whether there was one."""
        self._served, ended = max(self._served, number), False
        for record in list(self._records.values()):
            served = self.as_served(record)
            if served is not record:
                waited = (datetime.now(UTC) - record.updated_at).total_seconds()
                await self._put(replace(served, metrics={**record.metrics, "perf/publish_seconds": waited}))
                ended = True
        return ended

    async def watch(self, job_id: str, from_revision: int, heartbeat_s: float) -> AsyncIterator[JobRecord]:
        """The job after every change past `from_revision`, repeated when nothing changes, until it is final.

        The final state is told whatever the revision. Changes that follow each other faster than the watcher reads are
        joined. Raises NotFound.
        """
        # Another trainer gave it, by a clock that is ahead of this one.
        seen = 0 if from_revision > self._revision else from_revision
        while True:
            record = self.get(job_id)
            if record.final or record.revision > seen:
                seen = record.revision
                yield record
            if record.final:
                return
            if not await self._changes(job_id, seen, heartbeat_s):
                yield self.get(job_id)

    async def _changes(self, job_id: str, after: int, within_s: float) -> bool:
        """Waits until the job has a revision past `after`; False when it has not in time."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                return await self._changed.wait_for(lambda: self.get(job_id).revision > after)
        except TimeoutError:
            return False

    async def _put(self, record: JobRecord) -> JobRecord:
        self._revision += 1
        stored = replace(record, revision=self._revision, updated_at=datetime.now(UTC))
        self._records[record.body.job_id] = stored
        self._forget_old()
        async with self._changed:
            self._changed.notify_all()
        return stored

    def _forget_old(self) -> None:
        final = [job_id for job_id, record in self._records.items() if record.final]
        for job_id in final[: max(0, len(final) - FINAL_JOBS_KEPT)]:
            del self._records[job_id]


def _runs(record: JobRecord) -> bool:
    return not record.final and record.state != job_pb2.JOB_STATE_COMMITTED


def job_not_found(job_id: str) -> NotFound:
    return NotFound(f"nobody recorded a job {job_id[:80]!r}", reason=errors_pb2.REASON_JOB_NOT_FOUND)
