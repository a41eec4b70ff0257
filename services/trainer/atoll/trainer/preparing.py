"""The phases of a job before it is RUNNING: pull, admit, score, prepare. Repeating them is harmless."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from atoll.api.registry.v1 import job_record_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.families.driver import JobContext
from atoll.families.samples import ReportedSample
from atoll.trainer.admission import Admitted, Dropped, ProducedSample, admit, producing_numbers
from atoll.trainer.backend import TrainingBackend
from atoll.trainer.batch_reader import BatchReader
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.job_queue import JobQueue
from atoll.trainer.loading import WorkerModel
from atoll.trainer.preparation import PreparedJob, prepare_batch, score_batch, shape_batch
from atoll.trainer.progress import JobEnded, Progress, TrainingSetup
from atoll.trainer.retries import Patience
from atoll.trainer.teacher_client import TimedTeacher


@dataclass(frozen=True, eq=False)
class ReadyJob:
    """What RUNNING needs."""

    prepared: PreparedJob
    metrics: Mapping[str, float]
    """Of the phases so far."""


class JobPreparer:
    """Brings a job to where its optimizer steps can be taken, telling the queue of every phase."""

    def __init__(
        self,
        queue: JobQueue,
        chain: Chain,
        reader: BatchReader,
        backend: TrainingBackend,
        model: WorkerModel,
        setup: TrainingSetup,
        patience: Patience,
    ) -> None:
        self._queue = queue
        self._chain = chain
        self._reader = reader
        self._backend = backend
        self._model = model
        self._setup = setup
        self._patience = patience

    async def prepare(self, progress: Progress, head: ChainVersion, attempt: int) -> ReadyJob:
        """Admits against this head, which only another holder of the lease could move before RUNNING is recorded.

        Raises JobEnded (DROPPED), JobCancelled, the AtollError of a batch that cannot be pulled, and of rows that
        cannot be trained one that blames their samples.
        """
        body, clock = progress.body, progress.clock
        progress.found_family = await self._setup.families.find(body.family, body.options, self._model.families)
        if not progress.family.is_own:
            with clock.phase("switch"):
                await asyncio.to_thread(self._backend.check_family, progress.family.binding)
        with clock.phase("pull"):
            items = await self._patience.ask("rows", lambda: self._reader.read(body.job_id, body.sample_ids))
        with clock.phase("admit"):
            admitted = await self._admit(items, head)
        await self._queue.advance(body.job_id, job_pb2.JOB_STATE_ADMITTED, attempt=attempt)
        prepared = await self._prepare(progress, items, head, attempt)
        return ReadyJob(prepared, {**prepared.metrics, **admitted.metrics})

    async def _admit(self, items: tuple[ReportedSample, ...], head: ChainVersion) -> Admitted:
        samples = [
            ProducedSample(item.sample.sample_id, tuple(span.weight_version for span in item.sample.versions))
            for item in items
        ]
        numbers = producing_numbers(samples, head)
        versions = await self._patience.ask("producing versions", lambda: self._chain.versions(numbers))
        verdict = admit(samples, head, versions, self._setup.max_staleness)
        if isinstance(verdict, Dropped):
            dropped = job_record_pb2.JOB_PHASE_DROPPED
            raise JobEnded(dropped, verdict.reason, verdict.message, verdict.sample_ids)
        return verdict

    async def _prepare(
        self, progress: Progress, items: tuple[ReportedSample, ...], head: ChainVersion, attempt: int
    ) -> PreparedJob:
        body, clock, job, family = progress.body, progress.clock, progress.family, progress.family.family
        teacher = None if self._setup.teacher is None else TimedTeacher(self._setup.teacher, clock)
        context = JobContext(str(head.weight_version), datetime.now(UTC), teacher)
        with clock.phase("prepare"):
            # In a thread: a large batch takes seconds to shape, and the lease is renewed in this loop.
            batch = await asyncio.to_thread(shape_batch, body.job_id, attempt, items, job)
        with clock.phase("score"):
            batch = await asyncio.to_thread(score_batch, batch, family, context)
        await self._queue.advance(body.job_id, job_pb2.JOB_STATE_SCORED)
        with clock.phase("prepare"):
            state = job.state(self._model.families)
            prepared = await asyncio.to_thread(prepare_batch, batch, family, state, context)
        # Whoever watches sees so far what the steps will be taken on.
        metrics = {**prepared.metrics, **clock.metrics()}
        await self._queue.advance(body.job_id, job_pb2.JOB_STATE_PREPARED, metrics=metrics)
        return prepared
