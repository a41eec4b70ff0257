"""Two trainers on one scenario: one acts, the other stands by, and what the first had begun is gone on with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2, job_record_service_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, Unavailable
from atoll.common.rpc_errors import from_rpc_error
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.backend import FakeBackend
from tests.trainer.world import Stub, World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@asynccontextmanager
async def second(here: World) -> AsyncIterator[World]:
    """Another trainer of the same scenario, around the same services."""
    other = World(here.registry, here.samples, here.engine, here.settings, here.stack, FakeBackend())
    try:
        yield other
    finally:
        await other.kill()


async def refusal(call: object) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return from_rpc_error(refused.value)


async def record_of(here: World, job_id: str) -> job_record_pb2.JobRecord:
    request = job_record_service_pb2.GetJobRecordRequest(scenario="chat", job_id=job_id)
    record: job_record_pb2.JobRecord = (await here.registry.ask("GetJobRecord", request)).record
    return record


async def served(here: World, stub: Stub, name: str, version: int) -> job_pb2.Job:
    """One job from submission to its end."""
    await stub.SubmitJob(here.job(name, pair(name, versions=(f"1:{version}",))))
    return await until(stub, name)


async def test_a_standby_answers_with_the_holders_address_and_is_not_serving(here: World) -> None:
    holder = await here.start()
    assert (await served(here, holder, "job-0", 0)).version == 1
    async with second(here) as other:
        stub = await other.stand_by()
        assert here.trainer is not None and other.trainer is not None
        async with asyncio.timeout(5):
            while not other.trainer.trainer.lease.holder_address:
                await asyncio.sleep(0.01)
        told = await stub.GetTrainer(trainer_service_pb2.GetTrainerRequest())
        address = f"127.0.0.1:{here.trainer.server.port}"
        assert (told.lease_holder, told.holder_address) == (False, address)
        lease = other.trainer.trainer.lease
        asked = mock.Mock(side_effect=lease.refuse_unless_held)
        lease.refuse_unless_held = asked  # type: ignore[method-assign]
        rollback = trainer_service_pb2.SubmitRollbackRequest(job_id="back", scenario="chat", version=0)
        cancel = trainer_service_pb2.CancelJobRequest(job_id="job-0")
        for call in (
            stub.SubmitJob(here.job("job-1", pair("b"))),
            stub.SubmitRollback(rollback),
            stub.CancelJob(cancel),
        ):
            error = await refusal(call)
            assert isinstance(error, Unavailable) and error.reason == errors_pb2.REASON_NOT_LEASE_HOLDER
            assert address in error.message
        assert asked.call_count == 3, "the channel did not ask the standby again"
        # What is known for ever, it knows as well.
        assert (await stub.GetJob(trainer_service_pb2.GetJobRequest(job_id="job-0"))).job.version == 1
        assert len((await stub.ListJobs(trainer_service_pb2.ListJobsRequest())).jobs) == 1
        async with open_channel(f"127.0.0.1:{other.trainer.server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert other.backend.loads == []


async def test_a_registry_that_fails_to_tell_which_jobs_are_open_ends_no_trainer(here: World) -> None:
    defect = AtollError("a defect of Atoll", reason=errors_pb2.REASON_INTERNAL)
    here.registry.refusals["ListJobRecords"] = [defect, defect]
    assert (await served(here, await here.start(), "job-0", 0)).version == 1


async def test_a_trainer_that_is_killed_in_mid_step_is_followed_by_the_standby(here: World) -> None:
    holder = await here.start()
    async with second(here) as other:
        stub = await other.stand_by()
        stuck = here.elsewhere(asyncio.Event().wait, patient=False)
        here.backend.before["second_step"] = [stuck]
        await holder.SubmitJob(here.job("job-0", pair("a")))
        await until(holder, "job-0", job_pb2.JOB_STATE_RUNNING)
        await here.kill()
        assert other.trainer is not None
        await asyncio.wait_for(other.trainer.trainer.readiness.wait(), 10)
        # Nobody submits it again: it is recorded.
        job = await until(stub, "job-0")
        assert (job.state, job.version, job.attempt) == (job_pb2.JOB_STATE_SERVED, 1, 2)
        assert (await served(other, stub, "job-1", 1)).version == 2
    assert [version.number for version in await here.registry.versions()] == [0, 1, 2]


async def test_a_holder_that_was_cut_off_in_mid_step_cannot_commit_and_goes_on_once_it_is_holder_again(
    here: World,
) -> None:
    holder = await here.start()
    taken = here.elsewhere(lambda: here.registry.take_lease("another", ttl_s=2))
    here.backend.before["second_step"] = [taken]
    await holder.SubmitJob(here.job("job-0", pair("a")))
    async with asyncio.timeout(10):
        while (await record_of(here, "job-0")).phase != job_record_pb2.JOB_PHASE_RUNNING:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        while here.trainer is None or here.trainer.trainer.lease.held():
            await asyncio.sleep(0.01)
    assert len(await here.registry.versions()) == 1, "it was fenced"
    assert (await refusal(holder.SubmitJob(here.job("job-1", pair("b"))))).reason == errors_pb2.REASON_NOT_LEASE_HOLDER
    here.registry.pass_time(3)
    async with asyncio.timeout(10):
        while (await record_of(here, "job-0")).phase != job_record_pb2.JOB_PHASE_COMMITTED:
            await asyncio.sleep(0.01)
    assert here.backend.trained_jobs == 1, "the head had not moved: the step was kept"


async def test_a_registry_that_is_away_for_longer_than_the_ttl_does_not_throw_a_step_away(here: World) -> None:
    here.settings = here.settings.model_copy(update={"lease_ttl_s": 1.0})
    stub = await here.start()
    assert here.trainer is not None
    lease = here.trainer.trainer.lease
    token = lease.token_now()

    async def cut_off() -> None:
        here.registry.away = True
        while lease.held():
            await asyncio.sleep(0.05)
        here.registry.pass_time(10)

    here.backend.before["second_step"] = [here.elsewhere(cut_off)]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    async with asyncio.timeout(10):
        while lease.held():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        here.registry.away = False
        while (await record_of(here, "job-0")).phase != job_record_pb2.JOB_PHASE_COMMITTED:
            await asyncio.sleep(0.02)
    assert here.backend.trained_jobs == 1
    record = await record_of(here, "job-0")
    assert record.attempt == 1 and record.fencing_token > token


async def test_the_workers_of_a_trainer_that_stops_are_gone_before_another_one_may_try_the_same_attempt(
    here: World,
) -> None:
    await here.start()
    workers: dict[str, object] = {}
    here.registry.after["ReleaseLease"] = lambda: workers.update(at_release=here.backend.weights)
    assert here.backend.weights is not None
    await here.stop()
    assert workers == {"at_release": None}


async def test_a_trainer_that_stops_on_purpose_hands_over_at_once_and_its_attempt_is_no_crash(here: World) -> None:
    holder = await here.start()
    async with second(here) as other:
        stub = await other.stand_by()
        here.backend.before["second_step"] = [here.elsewhere(asyncio.Event().wait, patient=False)]
        await holder.SubmitJob(here.job("job-0", pair("a")))
        await until(holder, "job-0", job_pb2.JOB_STATE_RUNNING)
        await here.stop()
        assert other.trainer is not None
        await asyncio.wait_for(other.trainer.trainer.readiness.wait(), 10)
        job = await until(stub, "job-0")
        assert (job.version, job.attempt) == (1, 1)
