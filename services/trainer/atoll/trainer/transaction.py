"""One job from its record to a version of the chain: prepare, train, stage, commit.

Commit comes before publish, and publishing never undoes it. Whatever goes wrong, the runner looks again at what the
registry says and at what the workers hold, and lets `decision.decide` choose the next step. Every write carries the
fencing token of the look that decided it: one that is refused for its token is decided anew.
"""

import asyncio
import math
from collections.abc import Callable, Mapping

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2, version_pb2
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import AtollError, InternalError
from atoll.common.failpoints import reached
from atoll.trainer.backend import BackendCrashed, StepRefused, TrainingBackend
from atoll.trainer.calls import NOT_LET_IN
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.commits import Committer
from atoll.trainer.decision import Action, Situation, crashes, decide, to_hold
from atoll.trainer.head_loader import HeadLoader
from atoll.trainer.job_queue import JobBody, JobCancelled, JobQueue
from atoll.trainer.job_records import RecordedJob, StagedVersion
from atoll.trainer.job_views import STATE_OF_PHASE, metrics_of_end
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.loading import WorkerModel
from atoll.trainer.looking import JobLooks, Look, moved
from atoll.trainer.preparation import sample_of
from atoll.trainer.preparing import JobPreparer, ReadyJob
from atoll.trainer.progress import JobEnded, LookAgain, Progress, TrainingSetup
from atoll.trainer.retries import Patience
from atoll.trainer.staging import RESTAGE, StagedArtifacts, Stager
from atoll.trainer.trained_families import driver_state
from atoll.trainer.training import train_steps

log = structlog.get_logger(__name__)

REFUSED, FAILED = job_record_pb2.JOB_PHASE_REFUSED, job_record_pb2.JOB_PHASE_FAILED


class JobRunner:
    """Runs the jobs of the queue, one at a time."""

    def __init__(
        self,
        queue: JobQueue,
        registry: JobLooks,
        lease: LeaseKeeper,
        chain: Chain,
        preparer: JobPreparer,
        backend: TrainingBackend,
        model: WorkerModel,
        loader: HeadLoader,
        stager: Stager,
        committer: Committer,
        setup: TrainingSetup,
        patience: Patience,
        on_commit: Callable[[ChainVersion], None],
    ) -> None:
        self._queue = queue
        self._registry = registry
        self._lease = lease
        self._chain = chain
        self._preparer = preparer
        self._backend = backend
        self._model = model
        self._loader = loader
        self._stager = stager
        self._committer = committer
        self._setup = setup
        self._patience = patience
        self._on_commit = on_commit
        self._running: Progress | None = None

    async def run_forever(self) -> None:
        """Loads the head once this process may act, then takes one job after the other, in their recorded order.

        Raises BadConfiguration for a head that does not load at first.
        """
        await self._loader.take_over()
        while True:
            body = (await self._queue.next_job()).body
            with structlog.contextvars.bound_contextvars(job_id=body.job_id):
                await self.run(body)

    async def run(self, body: JobBody) -> None:
        """Brings one job to its end, whatever that is. Raises nothing but cancellation of the task."""
        progress = self._running = Progress(body)
        while not await self._turn(progress):
            pass
        self._running = None

    async def give_back(self) -> None:
        """Call once `run_forever` was cancelled, to stop for good: a stop on purpose is no crash."""
        progress = self._running
        if progress is None or not progress.begun or not self._lease.held():
            return
        look = await self._registry.look(progress.body)
        record = look.record
        if record.phase == job_record_pb2.JOB_PHASE_RUNNING and record.attempt == progress.begun:
            await self._registry.put(look, moved(record, job_record_pb2.JOB_PHASE_RECORDED, attempt=record.attempt - 1))

    async def _turn(self, progress: Progress) -> bool:
        """Looks, decides, does one thing. True when the job has ended."""
        token = 0
        try:
            look = await self._registry.look(progress.body)
            token = look.token
            return await self._act(progress, look)
        except LookAgain:
            log.info("the registry moved on, looking again")
        except JobCancelled:
            log.info("job cancelled")
            return True
        except JobEnded as end:
            progress.ending = end
        except BackendCrashed as crash:
            self._model.touch()
            progress.lose_memory()
            log.error("workers lost", error=crash.message)
        except AtollError as error:
            await self._consider(progress, error, token)
        except Exception as defect:
            self._model.touch()
            log.error("defect", exc_info=defect)
            await self._consider(progress, InternalError(f"a defect of Atoll: {defect!r}"), token)
        return False

    async def _consider(self, progress: Progress, error: AtollError, token: int) -> None:
        """What an error that no step expected means for the job."""
        if error.reason == errors_pb2.REASON_FENCED:
            log.warning("fenced", error=error.message)
            self._lease.doubt(token)
        elif progress.ending is not None:
            log.error("the job cannot be ended, trying again", error=error.message)
            await asyncio.sleep(self._patience.max_s)
        elif error.reason in NOT_LET_IN:
            log.error("a service does not let this trainer in, trying again", error=error.message)
            await asyncio.sleep(self._patience.max_s)
        elif error.reason == errors_pb2.REASON_STORAGE_FULL:
            progress.no_room = error.message
        elif isinstance(error, InternalError):
            progress.ending = JobEnded(FAILED, error.reason, error.message)
        else:
            named = sample_of(error, progress.body.sample_ids)
            progress.ending = JobEnded(REFUSED, error.reason, error.message, named)

    async def _act(self, progress: Progress, look: Look) -> bool:
        memory = progress.memory(self._model.number)
        known = Situation(look.record, look.head, memory, self._lease.held(), self._setup.max_attempts)
        match decide(known):
            case Action.WAIT:
                await self._lease.token()
            case Action.ADOPT:
                await self._adopt(progress, look)
                return True
            case Action.END:
                await self._end(look.record)
                return True
            case Action.CONCLUDE:
                assert progress.ending is not None
                await self._registry.put_end(look, progress.ending)
            case Action.FAIL:
                message = f"it crashed in {crashes(look.record, progress.begun) + progress.lost_early} attempts"
                raise JobEnded(FAILED, errors_pb2.REASON_TRAINING_CRASHED, f"{message}; the workers' logs tell why")
            case Action.DEFER:
                await self._defer(progress, look)
            case Action.DISCARD:
                log.warning("the head moved, the job starts over", head=look.head.number)
                progress.forget_training()
            case Action.ROLL_BACK:
                await self._committer.roll_back(progress.body, look.head, look.token)
            case Action.RECOVER | Action.LOAD_HEAD as action:
                with progress.clock.phase("load"):
                    await self._loader.hold(look.head, action, look.token)
            case Action.TRAIN:
                await self._train(progress, look)
            case Action.STAGE:
                await self._stage(progress, look)
            case Action.COMMIT:
                await self._commit(progress, look)
        return False

    async def _train(self, progress: Progress, look: Look) -> None:
        head, attempt = look.head, crashes(look.record, progress.begun) + 1
        ready = await self._preparer.prepare(progress, head, attempt)
        durable = self._setup.is_checkpoint(head.number + 1)
        await self._stager.refuse_without_room(head, durable=durable)
        with progress.clock.phase("record"):
            await self._registry.put(look, moved(look.record, job_record_pb2.JOB_PHASE_RUNNING, attempt=attempt))
        reached("trainer.running")
        # Before anything is awaited: a stop from here on gives this attempt back.
        progress.begun, progress.staged_is_gone = attempt, False
        await self._queue.advance(progress.body.job_id, job_pb2.JOB_STATE_RUNNING, attempt=attempt)
        self._model.touch()
        with progress.clock.phase("train"):
            trained = await self._take_steps(progress, ready, head)
        reached("trainer.stepped")
        progress.trained_from, progress.new_state = head.number, ready.prepared.new_state
        metrics = {**ready.metrics, **trained}
        # The chain takes finite numbers only, and a metric is no reason to lose a step.
        progress.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}

    async def _take_steps(self, progress: Progress, ready: ReadyJob, head: ChainVersion) -> Mapping[str, float]:
        job = progress.family
        before = await asyncio.to_thread(self._backend.steps_taken)
        try:
            trained = await asyncio.to_thread(
                train_steps, self._backend, job.family, job.binding, self._setup.schedule, ready.prepared.steps
            )
        except StepRefused as refusal:
            if refusal.steps_taken == 0:
                self._model.hold(head, self._model.families)
            raise JobEnded(REFUSED, refusal.reason, refusal.message, refusal.sample_ids) from refusal
        moved_weights = await asyncio.to_thread(self._backend.steps_taken) != before
        progress.unmoved_model = "" if moved_weights else head.model_digest
        return trained

    async def _stage(self, progress: Progress, look: Look) -> None:
        assert progress.trained_from is not None
        try:
            if progress.staged is None:
                await self._write(progress, durable=self._setup.is_checkpoint(progress.trained_from + 1))
            assert progress.staged is not None
            staged = StagedVersion(
                parent=progress.trained_from,
                model_digest=progress.staged.model_digest,
                checkpoint_digest=progress.staged.checkpoint_digest,
                metrics=progress.metrics,
                family_state=progress.new_state,
            )
            attempt = max(look.record.attempt, progress.begun)
            await self._registry.put(
                look, moved(look.record, job_record_pb2.JOB_PHASE_STAGED, attempt=attempt, staged=staged)
            )
        except AtollError as error:
            if error.reason not in RESTAGE:
                raise
            progress.staged = None
            if progress.restages >= self._setup.max_attempts:
                raise JobEnded(FAILED, error.reason, error.message) from error
            progress.restages += 1
            log.warning("staging again", error=error.message)
            return
        progress.staged_is_gone = False
        reached("trainer.staged")
        await self._queue.advance(progress.body.job_id, job_pb2.JOB_STATE_STAGED, metrics=progress.metrics)

    async def _write(self, progress: Progress, *, durable: bool) -> None:
        state = driver_state(progress.families_after(self._model.families))
        job_id, clock, unmoved = progress.body.job_id, progress.clock, progress.unmoved_model
        progress.staged = await self._stager.stage(
            job_id, progress.begun, state, clock, durable=durable, unmoved_model=unmoved
        )
        progress.metrics = {**progress.metrics, **clock.metrics()}

    async def _commit(self, progress: Progress, look: Look) -> None:
        with progress.clock.phase("commit"):
            if not await self._committer.commit_staged(look.record, look.token):
                progress.staged, progress.staged_is_gone = None, True

    async def _adopt(self, progress: Progress, look: Look) -> None:
        """The chain has the job. The workers keep their weights when they are the committed ones."""
        job_id, staged = progress.body.job_id, progress.staged
        committed = await self._patience.ask("job's version", lambda: self._chain.version_of_job(job_id))
        if committed is None:
            raise InternalError(f"job {job_id} is recorded as committed, and the chain has no version of it")
        if staged == StagedArtifacts(committed.model_digest, committed.checkpoint_digest):
            self._model.hold(committed, progress.families_after(self._model.families))
        metrics = {**committed.metrics, **progress.clock.metrics()}
        version = committed.number
        await self._queue.advance(job_id, job_pb2.JOB_STATE_COMMITTED, version=version, metrics=metrics)
        log.info("committed", version=version)
        self._on_commit(committed)
        if committed.operation == version_pb2.OPERATION_ROLLBACK and self._model.number != look.head.number:
            await self._loader.hold(look.head, to_hold(look.head), look.token)

    async def _defer(self, progress: Progress, look: Look) -> None:
        """Waits for room in the store; a caller may cancel meanwhile, until the job is staged."""
        reason, message = errors_pb2.REASON_STORAGE_FULL, progress.no_room
        await self._registry.put_waiting(look, reason, message)
        await self._queue.advance(progress.body.job_id, job_pb2.JOB_STATE_DEFERRED, reason=reason, message=message)
        log.warning("job deferred", error=message)
        await asyncio.sleep(self._patience.max_s)
        progress.no_room = ""

    async def _end(self, record: RecordedJob) -> None:
        """Tells whoever watches how the job has ended without a version."""
        log.warning("job ended without a version", phase=JobPhase.Name(record.phase), error=record.message)
        await self._queue.advance(
            record.body.job_id,
            STATE_OF_PHASE[record.phase],
            reason=record.reason,
            message=record.message,
            rejected_sample_ids=record.rejected_sample_ids,
            metrics=metrics_of_end(record),
        )
