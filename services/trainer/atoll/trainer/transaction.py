"""One training job from its rows to a version of the chain: pull, admit, score, prepare, train, stage, commit.

Commit comes before publish, and publishing never undoes it. Whatever goes wrong, the runner looks again at what the
registry says and at what the workers hold, and lets `decision.next_action` choose the next step.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.trainer.v1 import job_pb2
from atoll.api.trainer.v1.job_pb2 import JobState
from atoll.common.errors import AtollError, InternalError
from atoll.families.driver import JobContext
from atoll.families.samples import ReportedSample
from atoll.trainer.admission import Admitted, Dropped, ProducedSample, admit, producing_numbers
from atoll.trainer.backend import BackendCrashed, StepRefused, TrainingBackend
from atoll.trainer.batch_reader import BatchReader
from atoll.trainer.chain import Chain, ChainVersion, NewVersion
from atoll.trainer.decision import Action, Situation, next_action
from atoll.trainer.job_queue import JobBody, JobCancelled, JobQueue
from atoll.trainer.loading import WorkerModel
from atoll.trainer.preparation import PreparedJob, prepare_batch, sample_of, score_batch, shape_batch
from atoll.trainer.progress import JobEnded, Progress, TrainingSetup
from atoll.trainer.retries import Patience
from atoll.trainer.staging import Stager
from atoll.trainer.trained_families import driver_state
from atoll.trainer.training import train_steps

log = structlog.get_logger(__name__)

ASK_AGAIN = frozenset({errors_pb2.REASON_PARENT_NOT_HEAD, errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY})
"""Refusals of a commit after which the registry is asked what happened."""
RESTAGE = frozenset({errors_pb2.REASON_STAGING_NOT_FOUND, errors_pb2.REASON_ARTIFACT_MISMATCH})
"""Refusals of a seal after which the artifacts are written again."""


class JobRunner:
    """Runs the jobs of the queue, one at a time."""

    def __init__(
        self,
        queue: JobQueue,
        chain: Chain,
        reader: BatchReader,
        backend: TrainingBackend,
        model: WorkerModel,
        stager: Stager,
        setup: TrainingSetup,
        patience: Patience,
        on_commit: Callable[[ChainVersion], None],
        on_trainable: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._chain = chain
        self._reader = reader
        self._backend = backend
        self._model = model
        self._stager = stager
        self._setup = setup
        self._patience = patience
        self._on_commit = on_commit
        self._on_trainable = on_trainable

    async def run_forever(self) -> None:
        """Takes one job after the other, in the order they were submitted."""
        while True:
            record = await self._queue.next_job()
            with structlog.contextvars.bound_contextvars(job_id=record.body.job_id):
                await self.run(record.body)

    async def run(self, body: JobBody) -> None:
        """Brings one job to its end, whatever that is. Raises nothing but cancellation of the task."""
        progress = Progress(body)
        while True:
            try:
                if await self._step(progress):
                    return
            except JobCancelled:
                log.info("job cancelled")
                return
            except JobEnded as end:
                await self._end(body, end.state, end.reason, end.message, end.sample_ids)
                return
            except BackendCrashed as crash:
                self._model.touch()
                progress.crashes += 1
                progress.forget_training()
                log.error("workers lost", attempt=progress.crashes, error=crash.message)
            except InternalError as error:
                await self._end(body, job_pb2.JOB_STATE_FAILED, error.reason, error.message, ())
                return
            except AtollError as error:
                if error.reason == errors_pb2.REASON_STORAGE_FULL:
                    await self._defer(progress, error.message)
                    continue
                named = sample_of(error, body.sample_ids)
                await self._end(body, job_pb2.JOB_STATE_REFUSED, error.reason, error.message, named)
                return
            except Exception as defect:
                self._model.touch()
                log.error("defect", exc_info=defect)
                reason = errors_pb2.REASON_INTERNAL
                await self._end(body, job_pb2.JOB_STATE_FAILED, reason, f"a defect of Atoll: {defect!r}", ())
                return

    async def _step(self, progress: Progress) -> bool:
        """Looks, decides, does one thing. True when the job has ended."""
        job_id = progress.body.job_id
        self._queue.raise_if_cancelled(job_id)
        # The head first: a head that holds this job's samples is then never looked at as if the job were not committed.
        head = await self._patience.ask("head", self._chain.head)
        situation = Situation(
            committed=await self._patience.ask("job's version", lambda: self._chain.version_of_job(job_id)),
            head=head,
            loaded=self._model.number,
            trained_from=progress.trained_from,
            staged=progress.staged is not None,
            crashes=progress.crashes,
            max_attempts=self._setup.max_attempts,
        )
        match next_action(situation):
            case Action.ADOPT:
                assert situation.committed is not None
                await self._adopt(progress, situation.committed)
                return True
            case Action.FAIL:
                message = f"the workers crashed in {progress.crashes} attempts; their logs tell why"
                raise JobEnded(job_pb2.JOB_STATE_FAILED, errors_pb2.REASON_TRAINING_CRASHED, message)
            case Action.DISCARD:
                log.warning("the head moved, the job starts over", head=situation.head.number)
                progress.forget_training()
            case Action.LOAD_HEAD:
                await self._load(progress, situation.head)
            case Action.TRAIN:
                await self._train(progress, situation.head)
            case Action.STAGE:
                await self._stage(progress)
            case Action.COMMIT:
                await self._commit(progress)
        return False

    async def _load(self, progress: Progress, head: ChainVersion) -> None:
        """Loads the head. One that does not load is no job's fault: the job waits, as often as it takes."""
        try:
            await self._model.load(head)
        except AtollError as error:
            await self._on_trainable(False)
            log.error("the head does not load, trying again", version=head.number, error=error.message)
            await asyncio.sleep(self._patience.pause_s(progress.failed_loads))
            progress.failed_loads += 1
        else:
            await self._on_trainable(True)
            progress.failed_loads = 0

    async def _train(self, progress: Progress, head: ChainVersion) -> None:
        body, clock, advance = progress.body, progress.clock, self._queue.advance
        progress.found_family = self._setup.families.of(body.family, body.options or {}, self._model.families)
        if not progress.family.is_own:
            await asyncio.to_thread(self._backend.check_family, progress.family.binding)
        with clock.phase("pull"):
            items = await self._patience.ask("rows", lambda: self._reader.read(body.job_id, body.sample_ids))
        with clock.phase("admit"):
            admitted = await self._admit(items, head)
        await advance(body.job_id, job_pb2.JOB_STATE_ADMITTED, attempt=progress.attempt)
        prepared = await self._prepare(progress, items, head)
        await self._stager.refuse_without_room(head)
        await advance(body.job_id, job_pb2.JOB_STATE_RUNNING)
        self._model.touch()
        with clock.phase("train"):
            trained = await self._take_steps(progress, prepared, head)
        progress.trained_from, progress.new_state = head.number, prepared.new_state
        metrics = {**prepared.metrics, **admitted.metrics, **trained}
        # The chain takes finite numbers only, and a metric is no reason to lose a step.
        progress.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}

    async def _admit(self, items: tuple[ReportedSample, ...], head: ChainVersion) -> Admitted:
        samples = [
            ProducedSample(item.sample.sample_id, tuple(span.weight_version for span in item.sample.versions))
            for item in items
        ]
        numbers = producing_numbers(samples, head)
        versions = await self._patience.ask("producing versions", lambda: self._chain.versions(numbers))
        verdict = admit(samples, head, versions, self._setup.max_staleness)
        if isinstance(verdict, Dropped):
            reason = errors_pb2.REASON_STALE_SAMPLE
            raise JobEnded(job_pb2.JOB_STATE_DROPPED, reason, verdict.message, verdict.sample_ids)
        return verdict

    async def _prepare(self, progress: Progress, items: tuple[ReportedSample, ...], head: ChainVersion) -> PreparedJob:
        body, clock, job, family = progress.body, progress.clock, progress.family, progress.family.family
        context = JobContext(str(head.weight_version), datetime.now(UTC), self._setup.teacher)
        try:
            batch = shape_batch(body.job_id, progress.attempt, items, job)
            with clock.phase("score"):
                batch = await asyncio.to_thread(score_batch, batch, family, context)
            await self._queue.advance(body.job_id, job_pb2.JOB_STATE_SCORED)
            with clock.phase("prepare"):
                state = job.state(self._model.families)
                prepared = await asyncio.to_thread(prepare_batch, batch, family, state, context)
        except JobCancelled:
            raise
        except AtollError as error:
            named = sample_of(error, body.sample_ids)
            raise JobEnded(job_pb2.JOB_STATE_REFUSED, error.reason, error.message, named) from error
        await self._queue.advance(body.job_id, job_pb2.JOB_STATE_PREPARED)
        return prepared

    async def _take_steps(self, progress: Progress, prepared: PreparedJob, head: ChainVersion) -> Mapping[str, float]:
        job = progress.family
        try:
            return await asyncio.to_thread(
                train_steps, self._backend, job.family, job.binding, self._setup.schedule, prepared.steps
            )
        except StepRefused as refusal:
            if refusal.steps_taken == 0:
                self._model.hold(head, self._model.families)
            raise JobEnded(job_pb2.JOB_STATE_REFUSED, refusal.reason, refusal.message, refusal.sample_ids) from refusal

    async def _stage(self, progress: Progress) -> None:
        job_id = progress.body.job_id
        state = driver_state(progress.families_after(self._model.families))
        try:
            progress.staged = await self._stager.stage(job_id, progress.attempt, state, progress.clock)
        except AtollError as error:
            if error.reason not in RESTAGE:
                raise
            if progress.restages >= self._setup.max_attempts:
                raise JobEnded(job_pb2.JOB_STATE_FAILED, error.reason, error.message) from error
            progress.restages += 1
            log.warning("staging again", error=error.message)
            return
        progress.metrics = {**progress.metrics, **progress.clock.metrics()}
        await self._queue.advance(job_id, job_pb2.JOB_STATE_STAGED, metrics=progress.metrics)

    async def _commit(self, progress: Progress) -> None:
        assert progress.staged is not None and progress.trained_from is not None
        body = progress.body
        new = NewVersion(
            job_id=body.job_id,
            expected_parent=progress.trained_from,
            family=body.family,
            model_digest=progress.staged.model_digest,
            checkpoint_digest=progress.staged.checkpoint_digest,
            consumed_sample_ids=body.sample_ids,
            metrics=progress.metrics,
            family_state=progress.new_state,
        )
        try:
            with progress.clock.phase("commit"):
                await self._patience.ask("commit", lambda: self._chain.commit(new))
        except AtollError as error:
            log.warning("commit refused", error=error.message)
            if error.reason == errors_pb2.REASON_ARTIFACT_NOT_FOUND:
                progress.staged = None  # the registry was away for so long that retention took the bytes
            elif error.reason in ASK_AGAIN:
                progress.forget_training()
            else:
                raise

    async def _adopt(self, progress: Progress, committed: ChainVersion) -> None:
        """The chain has the job. The workers keep their weights when they are the committed ones."""
        staged = progress.staged
        if staged is not None and staged.checkpoint_digest == committed.checkpoint_digest:
            self._model.hold(committed, progress.families_after(self._model.families))
        metrics = {**committed.metrics, **progress.clock.metrics()}
        job_id, number = progress.body.job_id, committed.number
        await self._queue.advance(job_id, job_pb2.JOB_STATE_COMMITTED, version=number, metrics=metrics)
        log.info("committed", version=number)
        self._on_commit(committed)

    async def _defer(self, progress: Progress, message: str) -> None:
        """Waits for room in the store; a caller may cancel meanwhile."""
        reason = errors_pb2.REASON_STORAGE_FULL
        try:
            await self._queue.advance(progress.body.job_id, job_pb2.JOB_STATE_DEFERRED, reason=reason, message=message)
        except JobCancelled:
            return  # the next step's advance says so again
        log.warning("job deferred", error=message)
        await asyncio.sleep(self._patience.max_s)

    async def _end(
        self,
        body: JobBody,
        state: JobState.ValueType,
        reason: Reason.ValueType,
        message: str,
        sample_ids: tuple[str, ...],
    ) -> None:
        try:
            await self._queue.advance(
                body.job_id, state, reason=reason, message=message, rejected_sample_ids=sample_ids
            )
        except JobCancelled:
            return
        log.warning("job ended without a version", state=JobState.Name(state), error=message)
