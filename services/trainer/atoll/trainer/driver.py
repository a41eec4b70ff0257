"""`python -m atoll.trainer.driver`: boots a trainer and runs it until SIGTERM.

```
settings -> registry: scenario -> family -> preflight -> gRPC, health NOT_SERVING: standing by
lease acquired -> workers load the head -> health SERVING
                    |-> runner: the open jobs, then one after the other
                    |-> publisher: engines to the head, for ever
lease lost -> nothing is begun, no engine is touched, until it is acquired again
```
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog
from atoll.api.trainer.v1 import trainer_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.engine_client import EngineClient
from atoll.common.server import GrpcServer, run_service, wait_for_stop_signal
from atoll.trainer.assembly import Trainer, assemble, read_scenario
from atoll.trainer.backend import TrainingBackend
from atoll.trainer.backends import make_backend
from atoll.trainer.job_service import SERVICE_NAME
from atoll.trainer.predecessor import holder_ids
from atoll.trainer.preflight import refuse_settings
from atoll.trainer.retries import Patience
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.teacher_start import connect_teacher

STEP_DOWN_SECONDS = 5.0
"""How long the registry is asked to take note of a stop; a lease that is not given up runs out."""

log = structlog.get_logger(__name__)


async def main(settings: TrainerSettings) -> None:
    """Boots, serves, and stops the workers on the way out, also when the boot fails."""
    refuse_settings(settings)
    backend = make_backend(settings)
    try:
        async with AsyncExitStack() as stack:
            running = await boot(settings, backend, stack)
            stop = asyncio.create_task(wait_for_stop_signal())
            done, _ = await asyncio.wait({stop, *running.tasks}, return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping", asked=stop in done)
            await running.step_down()
            for task in done - {stop}:
                task.result()
    finally:
        await asyncio.to_thread(backend.close)


@dataclass(frozen=True)
class RunningTrainer:
    """What `boot` started."""

    server: GrpcServer
    trainer: Trainer
    backend: TrainingBackend
    tasks: tuple[asyncio.Task[None], ...]
    """They never end by themselves: one that does is a defect or a refusal, and the process stops with it."""

    async def step_down(self) -> None:
        """Stops on purpose: what was begun is given back, so that another trainer can go on at once."""
        for task in self.tasks:
            await _cancel(task)
        # First: what they are about to write must not meet the next holder's try of the same attempt.
        await asyncio.to_thread(self.backend.kill)
        try:
            async with asyncio.timeout(STEP_DOWN_SECONDS):
                await self.trainer.step_down()
        except TimeoutError:
            log.warning("the registry did not take note of the stop")


async def boot(settings: TrainerSettings, backend: TrainingBackend, stack: AsyncExitStack) -> RunningTrainer:
    """Returns once calls are answered; what was started stops with the stack. Raises BadConfiguration.

    `trainer.readiness` tells when the lease is held and the head is loaded; until then the trainer stands by.
    """
    patience = Patience(settings.retry_initial_s, settings.retry_max_s)
    registry = await stack.enter_async_context(open_channel(settings.registry, settings.token_text))
    gateway = await stack.enter_async_context(open_channel(settings.gateway, settings.token_text))
    run = await read_scenario(settings, registry, patience)
    teacher = await connect_teacher(settings, run.model_directory, patience, stack)
    engines = [await stack.enter_async_context(EngineClient(url, run.vocab_size)) for url in settings.engines]
    server = GrpcServer(settings.host, settings.port, settings.token_text)
    holder, predecessor = stack.enter_context(holder_ids(settings.run_dir, settings.scenario))
    trainer = assemble(
        settings, run, backend, registry, gateway, engines, teacher, server.set_serving, patience, holder, predecessor
    )
    trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(trainer.service, server.grpc)
    await server.start([SERVICE_NAME], serving=False)
    stack.push_async_callback(server.stop)
    address = settings.address or f"{settings.host}:{server.port}"
    tasks = tuple(asyncio.create_task(work) for work in trainer.work(address))
    for task in tasks:
        stack.push_async_callback(_cancel, task)
    log.info("trainer answers", scenario=settings.scenario, port=server.port)
    return RunningTrainer(server, trainer, backend, tasks)


async def _cancel(task: asyncio.Task[None]) -> None:
    if task.done():
        # `main` raises what it died of.
        return
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    except Exception as defect:
        log.error("a background task had died", exc_info=defect)


if __name__ == "__main__":
    run_service("trainer", TrainerSettings, main)
