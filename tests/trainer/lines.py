"""Scenarios with real Megatron workers, a real registry and real driver processes; gateway and engine are fakes."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from atoll.api.gateway.v1 import sample_service_pb2_grpc
from atoll.api.registry.v1 import version_pb2, version_service_pb2, version_service_pb2_grpc
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common import structs
from atoll.common.channels import open_channel
from atoll.common.server import GrpcServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import JsonValue

from tests.engines import free_port
from tests.fakes.publish_engine import PublishEngine
from tests.fakes.samples import FakeSample, FakeSamples

OPTIONS: dict[str, JsonValue] = {"groups_per_step": 2, "n_samples_per_prompt": 2, "groups_per_optimizer_step": 1}


@contextmanager
def service(module: str, environment: Mapping[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A service as a deployment starts it; SIGTERM at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=clean | dict(environment), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def healthy(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Returns once the service is SERVING; fails with the end of its log when it dies first."""
    async with asyncio.timeout(120), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest())
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                await asyncio.sleep(0.1)


@dataclass
class Line:
    """One scenario with its trainer's surroundings."""

    scenario: str
    registry: str
    samples: FakeSamples
    gateway: str
    engine: PublishEngine
    directory: Path
    checkpoint_every: int = 1

    @asynccontextmanager
    async def trainer(
        self,
    ) -> AsyncIterator[tuple["trainer_service_pb2_grpc.TrainerServiceAsyncStub", "subprocess.Popen[bytes]"]]:
        port = free_port()
        environment = {
            "ATOLL_TRAINER_PORT": str(port),
            "ATOLL_TRAINER_SCENARIO": self.scenario,
            "ATOLL_TRAINER_REGISTRY": self.registry,
            "ATOLL_TRAINER_GATEWAY": self.gateway,
            "ATOLL_TRAINER_ENGINES": json.dumps([self.engine.base_url]),
            "ATOLL_TRAINER_RUN_DIR": str(self.directory / "run"),
            "ATOLL_TRAINER_LEARNING_RATE": "0.01",
            "ATOLL_TRAINER_PUBLISH_POLL_S": "0.1",
            "ATOLL_TRAINER_LEASE_TTL_S": "3",
            "ATOLL_TRAINER_CHECKPOINT_EVERY_N_VERSIONS": str(self.checkpoint_every),
        }
        log = self.directory / "trainer.log"
        with service("atoll.trainer.driver", environment, log) as process:
            await healthy(f"127.0.0.1:{port}", process, log)
            async with open_channel(f"127.0.0.1:{port}") as channel:
                yield trainer_service_pb2_grpc.TrainerServiceStub(channel), process

    def job(
        self, number: int, weight_version: str = "", content: int | None = None
    ) -> trainer_service_pb2.SubmitJobRequest:
        """Job `number`, sampled from version `number`; the same content in every scenario.

        Content n is what job n has by default, under this job's sample ids.
        """
        numbers = np.random.default_rng(number if content is None else content)
        batch = [
            FakeSample(
                sample_id=f"s{number}-{i}",
                score=float(i % 2),
                group=f"g{i // 2}",
                tokens=tuple(numbers.integers(3, 1000, 24).tolist()),
                prompt_length=6 + i,
                weight_versions=(weight_version or f"1:{number}",),
                log_prob=-6.9,
            )
            for i in range(4)
        ]
        self.samples.batches[f"job-{number}"] = batch
        return trainer_service_pb2.SubmitJobRequest(
            job_id=f"job-{number}",
            scenario=self.scenario,
            family="grpo",
            options=structs.struct_from(OPTIONS),
            sample_ids=[sample.sample_id for sample in batch],
        )

    async def chain(self) -> list[version_pb2.Version]:
        """Oldest first."""
        async with open_channel(self.registry) as channel:
            stub = version_service_pb2_grpc.VersionServiceStub(channel)
            reply = await stub.ListVersions(version_service_pb2.ListVersionsRequest(scenario=self.scenario))
        return list(reply.versions)[::-1]


async def finish(stub: "trainer_service_pb2_grpc.TrainerServiceAsyncStub", job_id: str) -> job_pb2.Job:
    """The job once it is final."""
    async with asyncio.timeout(120):
        async for reply in stub.WatchJob(trainer_service_pb2.WatchJobRequest(job_id=job_id)):
            job = reply.job
    return job


@asynccontextmanager
async def lines(
    scenarios: Sequence[str], base_model: Path, directory: Path, checkpoint_every: int = 1
) -> AsyncIterator[list[Line]]:
    """A registry with these scenarios, and around each a gateway and an engine."""
    registry = f"127.0.0.1:{free_port()}"
    definition = {"family": "grpo", "options": OPTIONS, "base_model": str(base_model), "max_staleness": 0}
    environment = {
        "ATOLL_REGISTRY_PORT": registry.partition(":")[2],
        "ATOLL_REGISTRY_DATABASE_URL": f"sqlite:///{directory}/registry.db",
        "ATOLL_REGISTRY_STORE": str(directory / "store"),
        "ATOLL_REGISTRY_SCENARIOS": json.dumps([{"scenario_id": name, **definition} for name in scenarios]),
    }
    async with AsyncExitStack() as stack:
        process = stack.enter_context(service("atoll.registry", environment, directory / "registry.log"))
        await healthy(registry, process, directory / "registry.log")
        made = []
        for scenario in scenarios:
            (directory / scenario).mkdir()
            samples, engine = FakeSamples(), PublishEngine()  # type: ignore[abstract]
            server = GrpcServer("127.0.0.1", 0, None)
            sample_service_pb2_grpc.add_SampleServiceServicer_to_server(samples, server.grpc)
            await server.start(["atoll.api.gateway.v1.SampleService"])
            stack.push_async_callback(server.stop)
            await engine.start()
            stack.push_async_callback(engine.stop)
            gateway = f"127.0.0.1:{server.port}"
            made.append(Line(scenario, registry, samples, gateway, engine, directory / scenario, checkpoint_every))
        yield made
