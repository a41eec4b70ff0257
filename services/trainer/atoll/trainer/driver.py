"""`python -m atoll.trainer.driver`: boots a trainer and runs it until SIGTERM.

```
settings -> registry: scenario, head -> family -> preflight -> workers load the head -> gRPC, health SERVING
                                                                   |-> publisher: engines to the head, for ever
                                                                   |-> runner: one job after the other
```
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import trainer_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.engine_client import EngineClient
from atoll.common.errors import AtollError, BadConfiguration, InvalidInput
from atoll.common.server import GrpcServer, run_service, wait_for_stop_signal
from atoll.families.driver import TEACHER_ENGINE
from atoll.families.samples import PromptRenderer
from atoll.trainer.backend import BackendCrashed, FamilyBinding, TrainingBackend
from atoll.trainer.backends import layout_of, make_backend
from atoll.trainer.batch_reader import BatchReader
from atoll.trainer.chain import Chain, ChainVersion, ScenarioFacts
from atoll.trainer.job_families import JobFamilies, JobFamily
from atoll.trainer.job_queue import JobQueue
from atoll.trainer.job_service import SERVICE_NAME, JobService, TrainerFacts
from atoll.trainer.loading import WorkerModel
from atoll.trainer.preflight import refuse_settings, resolve_bound_family, run_settings, vocabulary_size
from atoll.trainer.progress import TrainingSetup
from atoll.trainer.publishing import Publisher
from atoll.trainer.retries import Patience
from atoll.trainer.schedule import rate_schedule
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.staging import Stager
from atoll.trainer.teacher_client import TeacherClient
from atoll.trainer.teacher_prompts import ModelRenderer
from atoll.trainer.transaction import JobRunner

log = structlog.get_logger(__name__)


async def main(settings: TrainerSettings) -> None:
    """Boots, serves, and stops the workers on the way out, also when the boot fails."""
    refuse_settings(settings)
    backend = make_backend(settings)
    try:
        async with AsyncExitStack() as stack:
            trainer = await boot(settings, backend, stack)
            stop = asyncio.create_task(wait_for_stop_signal())
            done, _ = await asyncio.wait({stop, *trainer.tasks}, return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping", asked=stop in done)
            for task in done - {stop}:
                task.result()
    finally:
        await asyncio.to_thread(backend.close)


@dataclass(frozen=True)
class RunningTrainer:
    """What `boot` started."""

    server: GrpcServer
    queue: JobQueue
    tasks: tuple[asyncio.Task[None], ...]
    """They never end by themselves: one that does is a defect, and the process stops with it."""


async def boot(settings: TrainerSettings, backend: TrainingBackend, stack: AsyncExitStack) -> RunningTrainer:
    """Returns once jobs are taken; what was started stops with the stack. Raises BadConfiguration."""
    patience = Patience(settings.retry_initial_s, settings.retry_max_s)
    registry = await stack.enter_async_context(open_channel(settings.registry, settings.token_text))
    gateway = await stack.enter_async_context(open_channel(settings.gateway, settings.token_text))

    teacher = None
    if settings.teacher is not None:
        teacher_channel = await stack.enter_async_context(open_channel(settings.teacher, settings.token_text))
        teacher = TeacherClient(teacher_channel, patience)

    chain = Chain(registry, settings.scenario)
    facts = await patience.ask("scenario", lambda: _facts(chain))
    head = await patience.ask("head", chain.head)
    model_directory = await patience.ask("head's model", lambda: chain.location(head.model_digest))
    vocab_size = vocabulary_size(model_directory)
    run = run_settings(settings, facts, vocab_size)
    family = resolve_bound_family(facts, run)

    def make_renderer() -> PromptRenderer:
        return ModelRenderer.from_directory(model_directory, run.seq_length)

    own = JobFamily(
        family,
        FamilyBinding(family.reference(), facts.options, run),
        is_own=True,
        renderer=make_renderer() if family.needs_prompt_renderer else None,
    )
    families = JobFamilies(own, make_renderer, [TEACHER_ENGINE] if teacher is not None else [])

    model = WorkerModel(backend, chain, patience)
    await _load_head(model, head)

    server = GrpcServer(settings.host, settings.port, settings.token_text)
    queue = JobQueue()
    engines = [await stack.enter_async_context(EngineClient(url, vocab_size)) for url in settings.engines]
    publisher = Publisher(
        engines,
        chain,
        patience,
        min_engines=settings.min_engines,
        poll_s=settings.publish_poll_s,
        on_served=queue.mark_served,
    )
    runner = JobRunner(
        queue,
        chain,
        BatchReader(gateway),
        backend,
        model,
        Stager(registry, settings.scenario, backend, patience),
        TrainingSetup(
            families=families,
            schedule=rate_schedule(settings),
            max_staleness=facts.max_staleness,
            max_attempts=settings.max_attempts,
            teacher=teacher,
        ),
        patience,
        on_commit=lambda _: publisher.wake(),
        on_trainable=server.set_serving,
    )
    told = TrainerFacts(settings.scenario, family.name, settings.backend, layout_of(settings), settings.engines)
    service = JobService(queue, chain, families, model, told, on_remembered=publisher.wake)
    trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(service, server.grpc)
    await server.start([SERVICE_NAME])
    stack.push_async_callback(server.stop)
    tasks = tuple(asyncio.create_task(work) for work in (publisher.run_forever(), runner.run_forever()))
    for task in tasks:
        stack.push_async_callback(_cancel, task)
    log.info("trainer ready", scenario=settings.scenario, family=family.name, port=server.port, head=head.number)
    return RunningTrainer(server, queue, tasks)


async def _facts(chain: Chain) -> ScenarioFacts:
    try:
        return await chain.facts()
    except AtollError as error:
        if error.reason == errors_pb2.REASON_SCENARIO_NOT_FOUND:
            raise BadConfiguration(
                f"ATOLL_TRAINER_SCENARIO is {chain.scenario!r}, which the registry does not have: {error.message}"
            ) from error
        raise


async def _load_head(model: WorkerModel, head: ChainVersion) -> None:
    try:
        await model.load(head)
    except (BackendCrashed, InvalidInput) as error:
        raise BadConfiguration(f"version {head.number} cannot be loaded: {error.message}") from error


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    except Exception as defect:
        log.error("a background task had died", exc_info=defect)


if __name__ == "__main__":
    run_service("trainer", TrainerSettings, main)
