"""The jobs this process knows: a record each, one running at a time, and whoever watches them.

```
SUBMITTED -> ADMITTED -> SCORED -> PREPARED -> RUNNING -> STAGED -> COMMITTED -> SERVED
     \\__ DROPPED, REFUSED, FAILED, CANCELLED (until STAGED)     \\__ DEFERRED: waits, then goes on
```
The runner moves a record (`advance`), a caller cancels it (`cancel`), the publisher ends it (`mark_served`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.trainer.v1 import job_pb2
from atoll.api.trainer.v1.job_pb2 import JobState
from atoll.common.errors import AtollError, Conflict, NotFound
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
COMMITTED_OR_SERVED = frozenset({job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_SERVED})
NOT_CANCELLABLE = FINAL | COMMITTED_OR_SERVED | {job_pb2.JOB_STATE_STAGED}

FINAL_JOBS_KEPT = 1_000
"""Older final jobs are forgotten; the registry still knows the committed ones."""


@dataclass(frozen=True)
class JobBody:
    """What a caller submits; the same id with another body is refused.

    Example: JobBody("job-1f...", "chat", "grpo", {"groups_per_step": 4}, ("4f0c...", "77aa..."))
    """

    job_id: str
    scenario: str
    family: str
    options: Mapping[str, JsonValue] | None
    """None for a job that an earlier process committed: the chain keeps no options."""
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class JobRecord:
    """A job as it stands; replaced as a whole with every change."""

    body: JobBody
    order: int
    """1 for the first job of this process."""
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
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._submitted = 0
        # A watcher resumes from a revision it saw before a restart, so revisions grow over restarts as well.
        self._revision = time.time_ns() // 1_000_000

    def find(self, job_id: str) -> JobRecord | None:
        return self._records.get(job_id)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFound (JOB_NOT_FOUND)."""
        record = self._records.get(job_id)
        if record is None:
            raise NotFound(f"this trainer knows no job {job_id!r}", reason=errors_pb2.REASON_JOB_NOT_FOUND)
        return record

    def newest_first(self, before: int | None, size: int) -> Sequence[JobRecord]:
        """At most `size` jobs, the last submitted first; only those with an `order` below `before`."""
        newest = (r for r in reversed(self._records.values()) if before is None or r.order < before)
        return list(islice(newest, size))

    async def submit(self, body: JobBody) -> JobRecord:
        """Queues a new job."""
        # Before anything is awaited: a caller that goes away then must not leave a job that nobody runs.
        self._waiting.put_nowait(body.job_id)
        return await self._put(self._fresh(body, job_pb2.JOB_STATE_SUBMITTED))

    async def remember_committed(self, body: JobBody, version: int, metrics: Mapping[str, float]) -> JobRecord:
        """Takes in a job that an earlier process committed."""
        record = self._fresh(body, job_pb2.JOB_STATE_COMMITTED)
        return await self._put(replace(record, version=version, metrics=metrics))

    async def next_job(self) -> JobRecord:
        """Waits for the next job that is still to run."""
        while True:
            record = self._records.get(await self._waiting.get())
            if record is not None and not record.final:
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

    async def cancel(self, job_id: str) -> JobRecord:
        """Ends a job that is not staged. Cancelling a cancelled one answers it again.

        Raises NotFound (JOB_NOT_FOUND), Conflict (JOB_NOT_CANCELLABLE).
        """
        record = self.get(job_id)
        if record.state == job_pb2.JOB_STATE_CANCELLED:
            return record
        if record.state in NOT_CANCELLABLE:
            raise Conflict(
                f"job {job_id} is {JobState.Name(record.state).removeprefix('JOB_STATE_')}; a job can be cancelled "
                "until its weights are staged",
                reason=errors_pb2.REASON_JOB_NOT_CANCELLABLE,
            )
        reason = errors_pb2.REASON_JOB_CANCELLED
        cancelled = replace(record, state=job_pb2.JOB_STATE_CANCELLED, reason=reason, message="cancelled by a caller")
        return await self._put(cancelled)

    async def mark_served(self, number: int) -> None:
        """The engines answer with version `number`: every committed job up to it is SERVED."""
        for record in list(self._records.values()):
            committed = record.state == job_pb2.JOB_STATE_COMMITTED
            if committed and record.version is not None and record.version <= number:
                waited = (datetime.now(UTC) - record.updated_at).total_seconds()
                metrics = {**record.metrics, "perf/publish_seconds": waited}
                await self._put(replace(record, state=job_pb2.JOB_STATE_SERVED, metrics=metrics))

    async def watch(self, job_id: str, from_revision: int, heartbeat_s: float) -> AsyncIterator[JobRecord]:
        """The job after every change past `from_revision`, repeated when nothing changes, until it is final.

        Changes that follow each other faster than the watcher reads are joined. Raises NotFound.
        """
        seen = from_revision
        while True:
            record = self.get(job_id)
            if record.revision > seen:
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

    def _fresh(self, body: JobBody, state: JobState.ValueType) -> JobRecord:
        now = datetime.now(UTC)
        self._submitted += 1
        return JobRecord(body, self._submitted, state, 0, now, now)

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
