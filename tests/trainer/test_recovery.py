"""Real Megatron workers, a real registry, a real driver process that is killed with SIGKILL in the middle of a step."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
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
JOBS = 3


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

    def job(self, number: int) -> trainer_service_pb2.SubmitJobRequest:
        """Job `number`, sampled from version `number`; the same content in every scenario."""
        numbers = np.random.default_rng(number)
        batch = [
            FakeSample(
                sample_id=f"s{number}-{i}",
                score=float(i % 2),
                group=f"g{i // 2}",
                tokens=tuple(numbers.integers(3, 1000, 24).tolist()),
                prompt_length=6 + i,
                weight_versions=(f"1:{number}",),
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


async def calm(line: Line) -> None:
    async with line.trainer() as (stub, _):
        for number in range(JOBS):
            await stub.SubmitJob(line.job(number))
            job = await finish(stub, f"job-{number}")
            assert job.state == job_pb2.JOB_STATE_SERVED, job


async def killed(line: Line) -> None:
    async with line.trainer() as (stub, process):
        await stub.SubmitJob(line.job(0))
        assert (await finish(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        for worker in workers:
            worker.suspend()  # the step cannot end before the kill, however slow this machine is
        await stub.SubmitJob(line.job(1))
        async for reply in stub.WatchJob(trainer_service_pb2.WatchJobRequest(job_id="job-1")):
            if reply.job.state == job_pb2.JOB_STATE_RUNNING:
                break
        for worker in workers:
            worker.resume()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert alive == [], "workers outlived the driver"
    assert [version.number for version in await line.chain()] == [0, 1]
    async with line.trainer() as (stub, _):
        first = (await stub.SubmitJob(line.job(0))).job
        assert first.version == 1
        for number in range(1, JOBS):
            await stub.SubmitJob(line.job(number))
            job = await finish(stub, f"job-{number}")
            assert job.state == job_pb2.JOB_STATE_SERVED, job


async def test_a_trainer_killed_in_mid_step_reaches_the_weights_of_one_that_was_not(
    tiny_models: Path, tmp_path: Path
) -> None:
    registry = f"127.0.0.1:{free_port()}"
    definition = {"family": "grpo", "options": OPTIONS, "base_model": str(tiny_models / "student"), "max_staleness": 0}
    environment = {
        "ATOLL_REGISTRY_PORT": registry.partition(":")[2],
        "ATOLL_REGISTRY_DATABASE_URL": f"sqlite:///{tmp_path}/registry.db",
        "ATOLL_REGISTRY_STORE": str(tmp_path / "store"),
        "ATOLL_REGISTRY_SCENARIOS": json.dumps([{"scenario_id": s, **definition} for s in ("calm", "killed")]),
    }
    async with AsyncExitStack() as stack:
        process = stack.enter_context(service("atoll.registry", environment, tmp_path / "registry.log"))
        await healthy(registry, process, tmp_path / "registry.log")
        lines = []
        for scenario in ("calm", "killed"):
            (tmp_path / scenario).mkdir()
            samples, engine = FakeSamples(), PublishEngine()  # type: ignore[abstract]
            server = GrpcServer("127.0.0.1", 0, None)
            sample_service_pb2_grpc.add_SampleServiceServicer_to_server(samples, server.grpc)
            await server.start(["atoll.api.gateway.v1.SampleService"])
            stack.push_async_callback(server.stop)
            await engine.start()
            stack.push_async_callback(engine.stop)
            gateway = f"127.0.0.1:{server.port}"
            lines.append(Line(scenario, registry, samples, gateway, engine, tmp_path / scenario))
        await asyncio.gather(calm(lines[0]), killed(lines[1]))
        chains = [await line.chain() for line in lines]
    for chain in chains:
        assert [(version.number, version.job_id) for version in chain] == [
            (0, ""),
            *((number + 1, f"job-{number}") for number in range(JOBS)),
        ]
    weights = [[version.model_digest for version in chain] for chain in chains]
    assert len(set(weights[0])) == JOBS + 1
    assert weights[0] == weights[1]
    assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(chains[0][1].metrics)
    assert [line.engine.served for line in lines] == ["1:3", "1:3"]
