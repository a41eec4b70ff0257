"""Several trainers behind one gateway: whoever holds the lease gets the jobs, and a dead one is passed over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.errors import AtollError, BadConfiguration
from atoll.common.server import GrpcServer
from atoll.gateway.assembly import build_gateway
from atoll.gateway.trainers import Stub, Trainers, trainer_addresses

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry
from tests.fakes.trainer import FakeTrainer, serve_trainer
from tests.gateway.store_world import OPTIONS, SCENARIO, World, eventually, settings_for, standings

pytestmark = pytest.mark.usefixtures("both_databases")


@asynccontextmanager
async def two_trainers(directory: Path, *trainers: FakeTrainer) -> AsyncIterator[tuple[World, list[GrpcServer]]]:
    """A gateway that knows several trainers, in this order."""
    registry = FakeScenarioRegistry()
    registry.add(SCENARIO, "grpo", OPTIONS)
    servers = [await serve_trainer(trainer) for trainer in trainers]
    front = await serve_registry(registry)
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    settings = settings_for(directory, front.port, None).model_copy(update={"trainer": addresses})
    gateway = build_gateway(settings)
    await gateway.start()
    try:
        yield World(gateway, registry, trainers[0]), servers
    finally:
        await gateway.stop()
        for server in (*servers, front):
            await server.grpc.stop(None)


@pytest.mark.parametrize("setting", ["", "a:1,", "a:1,a:1", ","])
def test_addresses_that_are_none_are_refused(setting: str) -> None:
    with pytest.raises(BadConfiguration, match="trainer"):
        trainer_addresses(setting)


def test_addresses_are_divided_by_commas() -> None:
    assert trainer_addresses("a:1, b:2") == ("a:1", "b:2") and trainer_addresses("a:1") == ("a:1",)


async def test_a_job_goes_to_the_trainer_that_holds_the_lease(tmp_path: Path) -> None:
    standby, holder = FakeTrainer(), FakeTrainer(ending=job_pb2.JOB_STATE_COMMITTED)
    standby.holder = False
    async with two_trainers(tmp_path, standby, holder) as (world, _):
        await world.batch("a")
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})
        await world.batch("b")
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 4})
        assert len(standby.submitted) == 1 and len(holder.submitted) == 2, "it remembers who answered"


async def test_a_trainer_of_another_scenario_is_passed_over(tmp_path: Path) -> None:
    other, right = FakeTrainer(scenario="chat"), FakeTrainer(ending=job_pb2.JOB_STATE_COMMITTED)
    other.refusals += [AtollError("trains chat", reason=errors_pb2.REASON_NOT_TRAINED_HERE)] * 2
    async with two_trainers(tmp_path, other, right) as (world, _):
        await world.batch()
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})


async def test_when_the_holder_dies_the_job_goes_to_the_one_that_took_the_lease(tmp_path: Path) -> None:
    first, second = FakeTrainer(), FakeTrainer(ending=job_pb2.JOB_STATE_COMMITTED)
    second.holder = False
    async with two_trainers(tmp_path, first, second) as (world, servers):
        job_id, _ = await world.batch()
        await first.wait_for(1)
        await servers[0].grpc.stop(None)
        second.holder = True
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})
        assert set(first.submitted) == set(second.submitted) == {job_id}


async def test_a_job_that_stands_still_at_a_deposed_trainer_is_taken_to_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.trainer_client.STANDSTILL_SECONDS", 0.2)
    first, second = FakeTrainer(), FakeTrainer(ending=job_pb2.JOB_STATE_COMMITTED)
    first.heartbeat_s = 0.05
    async with two_trainers(tmp_path, first, second) as (world, _):
        await world.batch()
        await first.wait_for(1)
        first.holder = False
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})


async def test_what_all_of_them_say_is_told_rather_than_that_one_is_away() -> None:
    standby = FakeTrainer()
    standby.holder = False
    server = await serve_trainer(standby)
    trainers = Trainers([f"127.0.0.1:{server.port}", "127.0.0.1:1"], None)

    async def submit(stub: Stub) -> trainer_service_pb2.SubmitJobResponse:
        return await stub.SubmitJob(trainer_service_pb2.SubmitJobRequest(job_id="job-1", scenario=SCENARIO), timeout=5)

    with pytest.raises(AtollError) as refusal:
        await trainers.ask(SCENARIO, submit)
    assert refusal.value.code == "not_lease_holder" and "10.0.0.9:7200" in refusal.value.message
    await trainers.close()
    await server.grpc.stop(None)


async def test_reads_go_to_the_holder_and_to_a_standby_when_there_is_none() -> None:
    standby, holder = FakeTrainer(), FakeTrainer()
    standby.holder = False
    servers = [await serve_trainer(trainer) for trainer in (standby, holder)]
    trainers = Trainers([f"127.0.0.1:{server.port}" for server in servers], None)
    found = await trainers.stub_of(SCENARIO, 5)
    assert (await found.GetTrainer(trainer_service_pb2.GetTrainerRequest())).lease_holder
    await servers[1].grpc.stop(None)
    found = await trainers.stub_of(SCENARIO, 5)
    assert not (await found.GetTrainer(trainer_service_pb2.GetTrainerRequest())).lease_holder
    with pytest.raises(AtollError, match=r"no trainer of this deployment|connect"):
        await trainers.stub_of("chat", 5)
    await trainers.close()
    await servers[0].grpc.stop(None)
