"""Drives open batches through the trainer, in order within a scenario, and settles them.

```
report_intake: batch OPEN -> TrainerClient.run: SubmitJob, WatchJob -> job_settling: one transaction -> the next batch
```
The database is the queue: a restarted gateway, or another one on the same database, finds the open batches and
submits them under their ids. Two gateways may drive the same batch: submitting and settling are both repeatable.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import AtollError
from atoll.gateway.database import Database
from atoll.gateway.job_settling import settle
from atoll.gateway.records import Batch, BatchRow, BatchState, JobOutcome
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.tables import batch_rows, batches, reports
from atoll.gateway.trainer_client import TrainerClient, state_word
from sqlalchemy import func, select
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(__name__)

POLL_SECONDS = 5.0
"""How soon batches of a gateway that died are taken up by another one."""
RETRY_MAX_SECONDS = 5.0
"""Longest pause before a trainer that was away is asked again: what a batch waits for after it is back."""


@dataclass(frozen=True)
class ScenarioTraining:
    """Example: ScenarioTraining("math", open_batches=1, pending_reports=3, job_id="job-1a...", job_state="running",
    last_error="", head_number=2, weight_version="1:2")"""

    scenario: str
    open_batches: int
    pending_reports: int
    job_id: str
    """The job that is being driven; empty when none."""
    job_state: str
    last_error: str
    """Why the last job made no version or waits, or why the trainer does not answer; empty when all is well."""
    head_number: int | None
    weight_version: str | None


@dataclass(frozen=True)
class TrainingStatus:
    """Example: TrainingStatus(scenarios=(...,))"""

    scenarios: tuple[ScenarioTraining, ...]


@dataclass(frozen=True)
class _Progress:
    """What the trainer last said about a scenario's job. Example: _Progress("job-1a...", "running")"""

    job_id: str = ""
    job_state: str = ""
    trouble: str = ""
    """Why the trainer cannot be asked, or what the job waits for; empty when it goes on."""


class TrainingQueue:
    """Runs in the background for as long as the gateway runs. At most one job per scenario is driven at a time."""

    def __init__(
        self,
        database: Database,
        trainer: TrainerClient | None,
        scenarios: ScenarioDirectory,
        on_requeue: Callable[[], None] = lambda: None,
    ) -> None:
        """trainer: None leaves batches open. on_requeue: called when a cancelled batch put its reports back."""
        self._on_requeue = on_requeue
        self._database = database
        self._trainer = trainer
        self._scenarios = scenarios
        self._progress: dict[str, _Progress] = {}
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes up what is open."""
        if self._trainer is not None:
            self._main = asyncio.create_task(self._run(self._trainer))

    async def stop(self) -> None:
        """Stops driving; open batches stay open for the next start."""
        tasks = [task for task in (self._main, *self._drivers.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """A batch was formed."""
        self._wake.set()

    def busy(self) -> bool:
        """Whether a job is being driven."""
        return any(not driver.done() for driver in self._drivers.values())

    async def status(self) -> TrainingStatus:
        """What /atoll/status shows: every scenario that the gateway has heard of."""
        counts = await asyncio.to_thread(self._counts)
        names = sorted({*counts, *self._progress, *self._scenarios.known()})
        return TrainingStatus(tuple(self._status_of(name, counts.get(name, _Counts())) for name in names))

    async def _run(self, trainer: TrainerClient) -> None:
        while True:
            self._wake.clear()
            try:
                for scenario in await asyncio.to_thread(self._scenarios_with_open_batches):
                    driver = self._drivers.get(scenario)
                    if driver is None or driver.done():
                        driver = asyncio.create_task(self._drive(trainer, scenario))
                        # A batch that is formed while a driver ends must not wait for the next poll.
                        driver.add_done_callback(lambda _: self._wake.set())
                        self._drivers[scenario] = driver
            except AtollError as error:
                log.error("open batches not read", error=error.message)
            except Exception as defect:  # a loop that ended here would train nothing more, in silence
                log.error("open batches not read", exc_info=defect)
            # Not wait_for: Python 3.11's loses a cancellation that comes with the wake-up, and stop() would hang.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()

    async def _drive(self, trainer: TrainerClient, scenario: str) -> None:
        """One batch after another, until none is open. Never gives up."""

        def note_failure(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            trouble = error.message if isinstance(error, AtollError) else f"a defect of Atoll: {error!r}"
            known = self._progress.get(scenario, _Progress())
            self._progress[scenario] = replace(known, trouble=trouble)
            log.warning("job not driven, trying again", scenario=scenario, job=known.job_id, error=trouble)

        patience = AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.2, max=RETRY_MAX_SECONDS),
            retry=retry_if_exception_type(Exception),
            before_sleep=note_failure,
        )
        while await patience.copy()(self._drive_one, trainer, scenario):
            pass

    async def _drive_one(self, trainer: TrainerClient, scenario: str) -> bool:
        """Drives the oldest open batch to its end; False when none is open."""
        batch = await asyncio.to_thread(self._oldest_open, scenario)
        if batch is None:
            self._progress[scenario] = _Progress()
            return False
        self._progress[scenario] = replace(self._progress.get(scenario, _Progress()), job_id=batch.job_id)

        def on_change(job: job_pb2.Job) -> None:
            waits = job.message if job.state == job_pb2.JOB_STATE_DEFERRED else ""
            self._progress[scenario] = _Progress(batch.job_id, state_word(job), waits)

        outcome: JobOutcome = await trainer.run(batch, on_change)
        await asyncio.to_thread(settle, self._database, batch.job_id, outcome)
        if outcome.state is BatchState.CANCELLED:
            self._on_requeue()
        return True

    def _scenarios_with_open_batches(self) -> Sequence[str]:
        with self._database.reading() as connection:
            query = select(batches.c.scenario).where(batches.c.state == BatchState.OPEN.value).distinct()
            return list(connection.scalars(query))

    def _oldest_open(self, scenario: str) -> Batch | None:
        with self._database.reading() as connection:
            is_open = (batches.c.state == BatchState.OPEN.value) & (batches.c.scenario == scenario)
            row = connection.execute(select(batches).where(is_open).order_by(batches.c.position).limit(1)).one_or_none()
            if row is None:
                return None
            members = connection.execute(
                select(batch_rows.c.receipt, batch_rows.c.report_id)
                .where(batch_rows.c.job_id == row.job_id)
                .order_by(batch_rows.c.ordinal)
            )
            rows = tuple(BatchRow(receipt, report_id) for receipt, report_id in members)
        return Batch(row.job_id, row.scenario, row.family, row.options, row.epoch, rows)

    def _status_of(self, scenario: str, counts: "_Counts") -> ScenarioTraining:
        progress = self._progress.get(scenario, _Progress())
        head = self._scenarios.head(scenario)
        return ScenarioTraining(
            scenario=scenario,
            open_batches=counts.open_batches,
            pending_reports=counts.pending_reports,
            job_id=progress.job_id,
            job_state=progress.job_state,
            last_error=progress.trouble or counts.last_failure,
            head_number=None if head is None else head.number,
            weight_version=None if head is None else head.weight_version,
        )

    def _counts(self) -> dict[str, "_Counts"]:
        counts: dict[str, _Counts] = {}
        with self._database.reading() as connection:
            is_open = batches.c.state == BatchState.OPEN.value
            per_scenario = select(batches.c.scenario, func.count()).group_by(batches.c.scenario)
            for scenario, number in connection.execute(per_scenario.where(is_open)):
                counts[scenario] = _Counts(open_batches=number)
            waiting = select(reports.c.scenario, func.count()).where(reports.c.job_id.is_(None))
            for scenario, number in connection.execute(waiting.group_by(reports.c.scenario)):
                counts[scenario] = replace(counts.get(scenario, _Counts()), pending_reports=number)
            newest = select(func.max(batches.c.position)).where(~is_open).group_by(batches.c.scenario)
            ended = select(batches).where(batches.c.position.in_(newest))
            for row in connection.execute(ended.where(batches.c.state != BatchState.COMMITTED.value)):
                known = counts.get(row.scenario, _Counts())
                counts[row.scenario] = replace(known, last_failure=f"{row.job_id} {row.state}: {row.reason}")
        return counts


@dataclass(frozen=True)
class _Counts:
    """Example: _Counts(open_batches=1, pending_reports=3, last_failure="job-1a... dropped: stale_sample: ...")"""

    open_batches: int = 0
    pending_reports: int = 0
    last_failure: str = ""
