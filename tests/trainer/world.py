"""A trainer with a real registry and fakes around it, in one process and behind real gRPC and HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from atoll.api.gateway.v1 import sample_service_pb2_grpc
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common import structs
from atoll.common.channels import open_channel
from atoll.common.server import GrpcServer
from atoll.trainer.driver import RunningTrainer, boot
from atoll.trainer.settings import TrainerSettings
from pydantic import JsonValue

from tests.fakes.backend import FakeBackend, write_model
from tests.fakes.publish_engine import PublishEngine
from tests.fakes.registry import RegistryUnderTest
from tests.fakes.samples import FakeSample, FakeSamples

Stub: TypeAlias = "trainer_service_pb2_grpc.TrainerServiceAsyncStub"

OPTIONS: dict[str, JsonValue] = {"groups_per_step": 1, "n_samples_per_prompt": 2}
RATE = 1e-3


def pair(
    name: str, *, versions: tuple[str, ...] = ("1:0",), tokens: tuple[int, ...] = (5, 6, 7, 8)
) -> list[FakeSample]:
    """A batch of one group: two samples, one rewarded."""
    return [
        FakeSample(f"{name}-{n}", score=float(n), group=name, weight_versions=versions, tokens=tokens) for n in range(2)
    ]


@dataclass
class World:
    """Everything a trainer talks to. `start` may be called again: a fresh trainer over the same registry."""

    registry: RegistryUnderTest
    samples: FakeSamples
    engine: PublishEngine
    settings: TrainerSettings
    stack: AsyncExitStack
    backend: FakeBackend
    family: str = "grpo"
    options: Mapping[str, JsonValue] = field(default_factory=lambda: OPTIONS)
    trainer: RunningTrainer | None = None
    trainer_stack: AsyncExitStack | None = None

    async def start(self) -> Stub:
        """A fresh trainer with fresh workers, once the one before has stopped on purpose."""
        await self.stop()
        self.backend = FakeBackend()
        return await self.boot()

    async def boot(self) -> Stub:
        """Boots with the backend as it is; returns once the trainer holds the lease and the head is loaded."""
        stub = await self.stand_by()
        assert self.trainer is not None
        ready = asyncio.create_task(self.trainer.trainer.readiness.wait())
        async with asyncio.timeout(10):
            await asyncio.wait({ready, *self.trainer.tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self.trainer.tasks:
            if task.done():
                ready.cancel()
                task.result()
        return stub

    async def stand_by(self) -> Stub:
        """Boots and waits for nothing."""
        self.trainer_stack = AsyncExitStack()
        self.trainer = await boot(self.settings, self.backend, self.trainer_stack)
        channel = await self.trainer_stack.enter_async_context(open_channel(f"127.0.0.1:{self.trainer.server.port}"))
        return trainer_service_pb2_grpc.TrainerServiceStub(channel)

    async def stop(self) -> None:
        """Stops the trainer as SIGTERM does."""
        if self.trainer is not None:
            await self.trainer.step_down()
        await self._close()

    async def kill(self) -> None:
        """Stops the trainer without its doing anything, and lets its lease run out."""
        await self._close()
        self.registry.pass_time(3_600)

    async def _close(self) -> None:
        self.trainer = None
        if self.trainer_stack is not None:
            await self.trainer_stack.aclose()
            self.trainer_stack = None

    def elsewhere(self, work: Callable[[], Coroutine[Any, Any, object]], *, patient: bool = True) -> Callable[[], None]:
        """A hook for a backend's thread, which waits for work on this event loop, or for a second if not patient."""
        loop, backend = asyncio.get_running_loop(), self.backend

        def wait() -> None:
            future = asyncio.run_coroutine_threadsafe(work(), loop)
            try:
                future.result(10 if patient else 1)
            except TimeoutError:
                future.cancel()
                if patient:
                    raise
                backend.crash()

        return wait

    def job(self, job_id: str, batch: Sequence[FakeSample]) -> trainer_service_pb2.SubmitJobRequest:
        """Makes the gateway know a batch, and the submission of it."""
        self.samples.batches[job_id] = batch
        return trainer_service_pb2.SubmitJobRequest(
            job_id=job_id,
            scenario="chat",
            family=self.family,
            options=structs.struct_from(self.options),
            sample_ids=[sample.sample_id for sample in batch],
        )


@asynccontextmanager
async def world(
    directory: Path,
    max_staleness: int = 0,
    family: str = "grpo",
    options: Mapping[str, JsonValue] = OPTIONS,
    tokenizer: bytes | None = None,
) -> AsyncIterator[World]:
    """The fakes, started; no trainer yet. `tokenizer`: the base model's tokenizer.json, where a test reads one."""
    async with AsyncExitStack() as stack:
        write_model(directory / "base", [1.0, 2.0, 3.0])
        if tokenizer is not None:
            (directory / "base" / "tokenizer.json").write_bytes(tokenizer)
        registry = RegistryUnderTest(directory, directory / "base", "chat", family, dict(options), max_staleness)
        stack.callback(registry.close)
        # What a fake does not implement is UNIMPLEMENTED on the wire.
        samples, engine = FakeSamples(), PublishEngine()  # type: ignore[abstract]
        await engine.start()
        stack.push_async_callback(engine.stop)
        (directory / "run").mkdir()
        server = GrpcServer("127.0.0.1", 0, None)
        registry.serve_on(server)
        sample_service_pb2_grpc.add_SampleServiceServicer_to_server(samples, server.grpc)
        await server.start(["atoll.api.registry.v1.VersionService"])
        stack.push_async_callback(server.stop)
        address = f"127.0.0.1:{server.port}"
        settings = TrainerSettings(
            port=0,
            scenario="chat",
            registry=address,
            gateway=address,
            engines=(engine.base_url,),
            run_dir=directory / "run",
            learning_rate=RATE,
            publish_poll_s=0.05,
            retry_initial_s=0.01,
            retry_max_s=0.05,
            lease_ttl_s=6.0,
        )
        here = World(registry, samples, engine, settings, stack, FakeBackend(), family, options)
        try:
            yield here
        finally:
            await here.stop()


async def until(stub: Stub, job_id: str, *states: job_pb2.JobState.ValueType) -> job_pb2.Job:
    """The job once it is in one of the states (any final one when none is given); fails after 10 seconds."""
    watch = stub.WatchJob(trainer_service_pb2.WatchJobRequest(job_id=job_id))
    try:
        async with asyncio.timeout(10):
            async for reply in watch:
                if reply.job.state in states:
                    return reply.job
        return reply.job
    finally:
        watch.cancel()  # a server that stops waits for its streams
