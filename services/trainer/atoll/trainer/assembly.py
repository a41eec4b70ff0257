"""Puts a trainer together: everything that acts for the scenario, around the channels to its neighbours."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration
from atoll.common.failpoints import reached
from atoll.families.driver import TEACHER_ENGINE, TeacherScorer
from atoll.families.samples import PromptRenderer
from atoll.trainer.backend import FamilyBinding, TrainingBackend
from atoll.trainer.backends import layout_of
from atoll.trainer.batch_reader import BatchReader
from atoll.trainer.calls import NOT_LET_IN, not_let_in
from atoll.trainer.chain import Chain, ChainVersion, ScenarioFacts
from atoll.trainer.commits import Committer
from atoll.trainer.head_loader import HeadLoader
from atoll.trainer.job_families import JobFamilies, JobFamily
from atoll.trainer.job_queue import JobBody, JobQueue
from atoll.trainer.job_records import JobRecords
from atoll.trainer.job_service import JobService, TrainerFacts
from atoll.trainer.jobs import Jobs
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.loading import WorkerModel
from atoll.trainer.looking import JobLooks
from atoll.trainer.preflight import resolve_bound_family, run_settings, vocabulary_size
from atoll.trainer.preparing import JobPreparer
from atoll.trainer.progress import LookAgain, TrainingSetup
from atoll.trainer.publishing import Engine, Publisher
from atoll.trainer.recovery import way_back
from atoll.trainer.refused_head import automatic_rollback_id
from atoll.trainer.retries import Patience
from atoll.trainer.schedule import rate_schedule
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.staging import Stager
from atoll.trainer.teacher_prompts import ModelRenderer
from atoll.trainer.teacher_start import refuse_missing_teacher
from atoll.trainer.transaction import JobRunner

TAKE_UP_PAUSE_SECONDS = 1.0
"""Before a registry that answered with an error is asked again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ScenarioRun:
    """What the registry says that this trainer is to do."""

    chain: Chain
    facts: ScenarioFacts
    model_directory: Path
    """Of version 0, which the reference model needs for ever; config and tokenizer are the same in every version."""
    vocab_size: int


async def read_scenario(settings: TrainerSettings, registry: grpc.aio.Channel, patience: Patience) -> ScenarioRun:
    """Waits for the registry. Raises BadConfiguration for a scenario that it does not have or does not tell."""
    chain = Chain(registry, settings.scenario)
    try:
        facts = await patience.ask("scenario", lambda: _facts(chain))
        base = await patience.ask("version 0", lambda: chain.version(0))
        model_directory = await patience.ask("version 0's model", lambda: chain.location(base.model_digest))
    except AtollError as error:
        if isinstance(error, BadConfiguration):
            raise
        if error.reason in NOT_LET_IN:
            raise not_let_in(error) from error
        message = f"the registry at {settings.registry} does not tell scenario {settings.scenario}: {error.message}"
        raise BadConfiguration(message) from error
    return ScenarioRun(chain, facts, model_directory, vocabulary_size(model_directory))


@dataclass
class Readiness:
    """Health: SERVING while this trainer holds the lease and its workers can be trained."""

    tell: Callable[[bool], Awaitable[None]]
    held: bool = False
    trainable: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        return self.held and self.trainable

    async def note_held(self, held: bool) -> None:
        self.held = held
        await self._say()

    async def note_trainable(self, trainable: bool) -> None:
        self.trainable = trainable
        await self._say()

    async def wait(self) -> None:
        """Returns once it is ready."""
        while not self.ready:
            self.changed.clear()
            await self.changed.wait()

    async def _say(self) -> None:
        await self.tell(self.ready)
        self.changed.set()


@dataclass(frozen=True)
class Trainer:
    """The parts of a trainer. `work` lists what must run, each for ever; nothing acts without the lease."""

    lease: LeaseKeeper
    queue: JobQueue
    jobs: Jobs
    runner: JobRunner
    publisher: Publisher
    service: JobService
    readiness: Readiness

    def work(self, address: str) -> Sequence[Coroutine[Any, Any, None]]:
        """`address`: where others reach this trainer."""
        return (
            self.lease.run_forever(address),
            self.follow_lease(),
            self.runner.run_forever(),
            self.publisher.run_forever(),
        )

    async def follow_lease(self) -> None:
        """With every lease that is acquired, goes on with the jobs that are recorded as open."""
        while True:
            await self.lease.token()
            try:
                await self.jobs.take_up()
            except AtollError as error:
                # What is in memory may be a step that took an hour: no reason to end the process.
                log.error("the registry does not tell which jobs are open, asking again", error=error.message)
                await asyncio.sleep(TAKE_UP_PAUSE_SECONDS)
                continue
            await self.readiness.note_held(True)
            self.publisher.wake()
            await self.lease.lost()
            await self.readiness.note_held(False)

    async def step_down(self) -> None:
        """Call once the work was cancelled, to stop on purpose: another trainer can go on at once."""
        try:
            await self.runner.give_back()
        except (AtollError, LookAgain) as error:
            log.warning("the stopped attempt counts as a crash", error=str(error))
        await self.lease.release()


def assemble(
    settings: TrainerSettings,
    run: ScenarioRun,
    backend: TrainingBackend,
    registry: grpc.aio.Channel,
    gateway: grpc.aio.Channel,
    engines: Sequence[Engine],
    teacher: TeacherScorer | None,
    tell_serving: Callable[[bool], Awaitable[None]],
    patience: Patience,
    holder: str | None = None,
    predecessor: str = "",
) -> Trainer:
    """Starts nothing. Raises BadConfiguration for a family that cannot be trained here."""
    chain = run.chain
    families = _families(settings, run, has_teacher=teacher is not None)
    setup = TrainingSetup(
        families=families,
        schedule=rate_schedule(settings),
        max_staleness=run.facts.max_staleness,
        max_attempts=settings.max_attempts,
        checkpoint_every_n_versions=settings.checkpoint_every_n_versions,
        teacher=teacher,
    )
    lease = LeaseKeeper(registry, settings.scenario, settings.lease_ttl_s, holder=holder, predecessor=predecessor)
    queue, records, readiness = JobQueue(), JobRecords(registry, settings.scenario), Readiness(tell_serving)

    def wake(_: ChainVersion | None = None) -> None:
        publisher.wake()

    jobs = Jobs(queue, records, chain, lease, patience, on_remembered=wake)

    async def served(number: int) -> None:
        if await queue.mark_served(number):
            reached("trainer.published")

    async def roll_back_from(head: ChainVersion) -> None:
        number = await patience.ask("way back", lambda: way_back(chain, head))
        if number is None:
            log.error("there is no other version to go back to", head=head.number)
            return
        job_id = automatic_rollback_id(settings.scenario, head.number)
        await jobs.submit(JobBody.rollback(job_id, settings.scenario, number), _refuse_nothing)

    publisher = Publisher(
        engines,
        chain,
        patience,
        min_engines=settings.min_engines,
        poll_s=settings.publish_poll_s,
        on_served=served,
        held=lease.held,
        publish_timeout_s=settings.publish_timeout_s,
        on_refused_head=roll_back_from,
    )
    model, committer = WorkerModel(backend, chain, patience), Committer(chain, patience)
    loader = HeadLoader(model, chain, records, committer, lease, patience, readiness.note_trainable, on_commit=wake)
    runner = JobRunner(
        queue,
        JobLooks(records, chain, lease, patience),
        lease,
        chain,
        JobPreparer(queue, chain, BatchReader(gateway), backend, model, setup, patience),
        backend,
        model,
        loader,
        Stager(registry, settings.scenario, backend, patience),
        committer,
        setup,
        patience,
        on_commit=wake,
    )
    own = families.own.family.name
    told = TrainerFacts(settings.scenario, own, settings.backend, layout_of(settings), settings.engines)
    service = JobService(queue, jobs, lease, families, model, told)
    return Trainer(lease, queue, jobs, runner, publisher, service, readiness)


def _families(settings: TrainerSettings, run: ScenarioRun, *, has_teacher: bool) -> JobFamilies:
    told = run_settings(settings, run.facts, run.vocab_size)
    family = resolve_bound_family(run.facts, told)
    refuse_missing_teacher(family, has_teacher=has_teacher)

    def make_renderer() -> PromptRenderer:
        return ModelRenderer.from_directory(run.model_directory, told.seq_length)

    own = JobFamily(
        family,
        FamilyBinding(family.reference(), run.facts.options, told),
        is_own=True,
        renderer=make_renderer() if family.needs_prompt_renderer else None,
    )
    return JobFamilies(own, make_renderer, [TEACHER_ENGINE] if has_teacher else [])


async def _facts(chain: Chain) -> ScenarioFacts:
    try:
        return await chain.facts()
    except AtollError as error:
        if error.reason == errors_pb2.REASON_SCENARIO_NOT_FOUND:
            raise BadConfiguration(
                f"ATOLL_TRAINER_SCENARIO is {chain.scenario!r}, which the registry does not have: {error.message}"
            ) from error
        raise


async def _refuse_nothing() -> None:
    """For what the trainer submits by itself."""
