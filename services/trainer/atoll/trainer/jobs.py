"""Jobs as callers know them: submitted, found, listed and cancelled, whichever trainer ran them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import AtollError, Conflict
from atoll.common.failpoints import reached
from atoll.trainer.chain import Chain
from atoll.trainer.job_queue import JobBody, JobQueue, JobRecord, job_not_found
from atoll.trainer.job_records import JobRecords, RecordedJob
from atoll.trainer.job_views import view_of
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.retries import Patience

T = TypeVar("T")


@dataclass(frozen=True)
class JobPage:
    """Jobs, newest first; `next_token` is empty on the last page."""

    jobs: Sequence[JobRecord]
    next_token: str


class Jobs:
    """The registry's records, and over them what the queue of the lease's holder knows better."""

    def __init__(
        self,
        queue: JobQueue,
        records: JobRecords,
        chain: Chain,
        lease: LeaseKeeper,
        patience: Patience,
        on_remembered: Callable[[], None],
    ) -> None:
        """on_remembered: called when a job of an earlier process was taken in, whose version may be served already."""
        self._queue = queue
        self._records = records
        self._chain = chain
        self._lease = lease
        self._patience = patience
        self._on_remembered = on_remembered

    async def submit(self, body: JobBody, refuse: Callable[[], Awaitable[None]]) -> JobRecord:
        """The job as it stands; a new one is recorded and queued, unless `refuse` raises.

        Raises Unavailable (NOT_LEASE_HOLDER), Conflict (JOB_ID_REUSED), and for a rollback NotFound
        (VERSION_NOT_FOUND) and Conflict (NOT_RESTORABLE).
        """
        self._lease.refuse_unless_held()
        known = self._queue.find(body.job_id)
        if known is not None:
            refuse_other_body(known.body, body)
            return known
        recorded = await self._records.get(body.job_id)
        if recorded is None:
            await refuse()
            recorded = await self._record(body)
            reached("trainer.recorded")
        refuse_other_body(recorded.body, body)
        return await self._remember(recorded)

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound (JOB_NOT_FOUND)."""
        held = self._lease.held()
        known = self._queue.find(job_id)
        if held and known is not None:
            return known
        recorded = await self._records.get(job_id)
        if recorded is None:
            raise job_not_found(job_id)
        return await self._remember(recorded) if held else await self._view(recorded)

    async def page(self, size: int, token: str) -> JobPage:
        """Jobs of all trainers of the scenario; those of earlier processes without their metrics."""
        page = await self._records.page(size, token)
        live = self._queue.find if self._lease.held() else lambda job_id: None
        jobs = [live(job.body.job_id) or self._queue.as_served(view_of(job)) for job in page.jobs]
        return JobPage(jobs, page.next_token)

    async def cancel(self, job_id: str) -> JobRecord:
        """Ends a job that is not staged. Raises NotFound, Conflict (JOB_NOT_CANCELLABLE), Unavailable."""
        await self.get(job_id)
        self._lease.refuse_unless_held()
        cancelled = await self._fenced(lambda token: self._records.cancel(job_id, token))
        if cancelled is None:
            raise job_not_found(job_id)
        return await self._queue.end_cancelled(view_of(cancelled))

    async def take_up(self) -> None:
        """Call with every new token: queues what is open, and tells watchers what another holder ended."""
        open_jobs = await self._patience.ask("open jobs", self._records.open_jobs)
        for recorded in open_jobs:
            await self._remember(recorded)
        for job_id in self._queue.unfinished() - {recorded.body.job_id for recorded in open_jobs}:
            ended = await self._patience.ask("job's record", partial(self._records.get, job_id))
            if ended is not None and not ended.is_open:
                await self._queue.take_in(await self._patience.ask("job's version", partial(self._view, ended)))

    async def _record(self, body: JobBody) -> RecordedJob:
        new = RecordedJob(body, job_record_pb2.JOB_PHASE_RECORDED)
        return await self._fenced(lambda token: self._records.put(new, token))

    async def _fenced(self, write: Callable[[int], Awaitable[T]]) -> T:
        token = self._lease.token_now()
        try:
            return await write(token)
        except AtollError as error:
            if error.reason == errors_pb2.REASON_FENCED:
                self._lease.doubt(token)
                self._lease.refuse_unless_held()
            raise

    async def _remember(self, recorded: RecordedJob) -> JobRecord:
        view = await self._view(recorded)
        # Another call may have taken it in while the registry was asked.
        known = self._queue.find(recorded.body.job_id)
        if known is not None:
            return known
        if view.state == job_pb2.JOB_STATE_RUNNING:
            # It ran in a memory that is gone, and waits for its turn here.
            view = replace(view, state=job_pb2.JOB_STATE_SUBMITTED)
        taken = await self._queue.take_in(view)
        self._on_remembered()
        return taken

    async def _view(self, recorded: RecordedJob) -> JobRecord:
        if recorded.phase != job_record_pb2.JOB_PHASE_COMMITTED:
            return view_of(recorded)
        version = await self._chain.version_of_job(recorded.body.job_id)
        return self._queue.as_served(view_of(recorded, None if version is None else version.metrics))


def refuse_other_body(known: JobBody, given: JobBody) -> None:
    """Raises Conflict (JOB_ID_REUSED) naming the field that differs."""
    for field, before, now in (
        ("scenario", known.scenario, given.scenario),
        ("version", known.restores, given.restores),
        ("family", known.family, given.family),
        ("options", known.options, given.options),
        ("sample_ids", known.sample_ids, given.sample_ids),
    ):
        unknown = field == "options" and before is None
        if before != now and not unknown:
            raise Conflict(
                f"job {given.job_id} was submitted with another {field}; give a new batch a new job_id",
                reason=errors_pb2.REASON_JOB_ID_REUSED,
                field=field,
            )
