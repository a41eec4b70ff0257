"""Open batches reach the trainer in order and end exactly once, whatever happens to either side."""

import asyncio
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import Conflict, InvalidInput, Unavailable
from atoll.gateway.assembly import build_gateway
from atoll.gateway.records import SampleState

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry
from tests.fakes.trainer import FakeTrainer, serve_trainer
from tests.gateway.store_world import (
    OPTIONS,
    SCENARIO,
    World,
    batch_states,
    eventually,
    open_world,
    settings_for,
    standings,
)

pytestmark = pytest.mark.usefixtures("both_databases")


async def test_a_committed_job_consumes_its_samples(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        await world.trainer.wait_for(1)
        request = world.trainer.requests[job_id]
        assert (request.scenario, request.family, list(request.sample_ids)) == (SCENARIO, "grpo", receipts)
        assert request.options["n_samples_per_prompt"] == 2 and request.options["eps_clip"] == 0.2
        assert standings(world.gateway.database) == {"reserved": 2}
        world.trainer.move(job_id, job_pb2.JOB_STATE_RUNNING)
        world.trainer.move(job_id, job_pb2.JOB_STATE_COMMITTED)
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})
        assert batch_states(world.gateway.database) == {job_id: "committed"}
        sample = (await world.gateway.samples.get(SCENARIO, receipts[0])).sample
        assert (sample.state, sample.job_id) == (SampleState.CONSUMED, job_id)


async def test_a_dropped_job_settles_its_samples_with_the_reason_and_the_status_tells_it(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        await world.trainer.wait_for(1)
        world.trainer.move(job_id, job_pb2.JOB_STATE_DROPPED, "produced by 1:0, the head is 1:3")
        await eventually(lambda: standings(world.gateway.database) == {"settled": 2})
        sample = (await world.gateway.samples.get(SCENARIO, receipts[0])).sample
        assert sample.settled_reason == "stale_sample: produced by 1:0, the head is 1:3"
        await eventually(lambda: not world.gateway.training.busy())
        (status,) = (await world.gateway.training.status()).scenarios
        assert status.last_error == f"{job_id} dropped: {sample.settled_reason}"
        assert (status.open_batches, status.pending_reports, status.head_number) == (0, 0, 0)
        assert status.weight_version == "1:0"


async def test_a_cancelled_job_puts_its_samples_back_and_the_next_one_has_another_id(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        await world.trainer.wait_for(1)
        world.trainer.move(job_id, job_pb2.JOB_STATE_CANCELLED)
        await world.trainer.wait_for(2)
        again = world.trainer.submitted[-1]
        assert again != job_id and list(world.trainer.requests[again].sample_ids) == receipts, "without a new report"
        assert batch_states(world.gateway.database) == {job_id: "cancelled", again: "open"}
        world.trainer.move(again, job_pb2.JOB_STATE_COMMITTED)
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (job_pb2.JOB_STATE_DROPPED, "stale_sample"),
        (job_pb2.JOB_STATE_FAILED, "training_crashed"),
        (job_pb2.JOB_STATE_REFUSED, "batch_refused"),
    ],
)
async def test_what_ended_without_a_version_never_runs_again(
    tmp_path: Path, state: job_pb2.JobState.ValueType, code: str
) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        await world.trainer.wait_for(1)
        world.trainer.move(job_id, state, "why")
        await eventually(lambda: standings(world.gateway.database) == {"settled": 2})
        sample = (await world.gateway.samples.get(SCENARIO, receipts[0])).sample
        assert (sample.settled_code, sample.settled_reason) == (code, f"{code}: why")
    async with open_world(tmp_path) as world:
        other, _ = await world.batch("q2")
        await world.trainer.wait_for(1)
        assert world.trainer.submitted == [other], "not after a restart either"


async def test_jobs_of_a_scenario_are_submitted_one_after_another_in_the_order_they_were_formed(
    tmp_path: Path,
) -> None:
    async with open_world(tmp_path) as world:
        formed = [(await world.batch(f"q{number}"))[0] for number in range(3)]
        for number, job_id in enumerate(formed):
            await world.trainer.wait_for(number + 1)
            assert list(world.trainer.jobs) == formed[: number + 1]
            world.trainer.move(job_id, job_pb2.JOB_STATE_COMMITTED)
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 6})


async def test_a_trainer_that_refuses_a_job_for_ever_has_it_settled_and_the_next_one_goes_on(tmp_path: Path) -> None:
    trainer = FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)
    trainer.refusals.append(InvalidInput("options.eps_clip is bad", field="options"))
    async with open_world(tmp_path, trainer) as world:
        await world.batch("q1")
        await world.batch("q2")
        await eventually(lambda: list(batch_states(world.gateway.database).values()) == ["refused", "committed"])
        assert standings(world.gateway.database) == {"settled": 2, "consumed": 2}


async def test_a_trainer_that_cannot_take_the_job_now_is_asked_again_and_the_status_says_why(tmp_path: Path) -> None:
    trainer = FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)
    trainer.refusals += [
        Conflict("this trainer trains scenario chat", reason=errors_pb2.REASON_NOT_TRAINED_HERE),
        Conflict("this trainer trains scenario chat", reason=errors_pb2.REASON_NOT_TRAINED_HERE),
    ]
    async with open_world(tmp_path, trainer) as world:
        job_id, _ = await world.batch()
        await eventually(lambda: len(trainer.submitted) >= 1)
        (status,) = (await world.gateway.training.status()).scenarios
        assert status.last_error == "this trainer trains scenario chat" and status.job_id == job_id
        await eventually(lambda: batch_states(world.gateway.database) == {job_id: "committed"})
        assert trainer.submitted == [job_id] * 3


async def test_the_status_says_what_a_deferred_job_waits_for_and_forgets_it_when_the_job_goes_on(
    tmp_path: Path,
) -> None:
    async with open_world(tmp_path) as world:
        job_id, _ = await world.batch()
        await world.trainer.wait_for(1)

        async def told(state: str) -> str:
            async with asyncio.timeout(5):
                while True:
                    (status,) = (await world.gateway.training.status()).scenarios
                    if status.job_state == state:
                        return status.last_error
                    await asyncio.sleep(0.01)

        world.trainer.move(job_id, job_pb2.JOB_STATE_DEFERRED, "the store has 1 byte free")
        assert await told("deferred") == "the store has 1 byte free"
        world.trainer.move(job_id, job_pb2.JOB_STATE_RUNNING)
        assert await told("running") == ""


async def test_a_trainer_that_restarts_and_forgot_the_job_gets_it_again(tmp_path: Path) -> None:
    registry = FakeScenarioRegistry()
    registry.add(SCENARIO, "grpo", OPTIONS)
    registry_server, first = await serve_registry(registry), FakeTrainer()
    trainer_server = await serve_trainer(first)
    gateway = build_gateway(settings_for(tmp_path, registry_server.port, trainer_server.port))
    await gateway.start()
    try:
        job_id, _ = await World(gateway, registry, first).batch()
        await first.wait_for(1)
        await trainer_server.grpc.stop(None)
        second = FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)
        trainer_server = await serve_trainer(second, trainer_server.port)
        await eventually(lambda: standings(gateway.database) == {"consumed": 2})
        assert list(second.jobs) == [job_id]
    finally:
        await gateway.stop()
        await trainer_server.grpc.stop(None)
        await registry_server.grpc.stop(None)


async def test_a_gateway_that_restarts_submits_what_was_open_under_its_id(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, _ = await world.batch()
        await world.trainer.wait_for(1)
    async with open_world(tmp_path, FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)) as world:
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})
        assert world.trainer.submitted == [job_id]


async def test_two_gateways_on_one_database_settle_a_job_once(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with open_world(tmp_path, trainer) as one, open_world(tmp_path, trainer) as other:
        job_id, _ = await one.batch()
        other.gateway.training.wake()
        await eventually(lambda: len(trainer.submitted) >= 2)
        trainer.move(job_id, job_pb2.JOB_STATE_COMMITTED)
        await eventually(lambda: standings(one.gateway.database) == {"consumed": 2})
        await eventually(lambda: not one.gateway.training.busy() and not other.gateway.training.busy())
        assert batch_states(one.gateway.database) == {job_id: "committed"} and set(trainer.submitted) == {job_id}


async def test_without_a_trainer_batches_are_formed_and_wait(tmp_path: Path) -> None:
    registry = FakeScenarioRegistry()
    registry.add(SCENARIO, "grpo", OPTIONS)
    server = await serve_registry(registry)
    gateway = build_gateway(settings_for(tmp_path, server.port, None))
    await gateway.start()
    try:
        job_id, _ = await World(gateway, registry, FakeTrainer()).batch()
        assert batch_states(gateway.database) == {job_id: "open"}
    finally:
        await gateway.stop()
        await server.grpc.stop(None)


async def test_an_unavailable_answer_is_tried_again(tmp_path: Path) -> None:
    trainer = FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)
    trainer.refusals.append(Unavailable("starting"))
    async with open_world(tmp_path, trainer) as world:
        await world.batch()
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})


async def test_a_defect_in_one_look_does_not_end_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.gateway.training_queue.POLL_SECONDS", 0.05)
    trainer = FakeTrainer(ending=job_pb2.JOB_STATE_SERVED)
    async with open_world(tmp_path, trainer) as world:
        with monkeypatch.context() as broken:
            seen: list[int] = []

            def fail() -> list[str]:
                seen.append(1)
                raise RuntimeError("a defect")

            broken.setattr(world.gateway.training, "_scenarios_with_open_batches", fail)
            await eventually(lambda: len(seen) > 1)
        await world.batch()
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})


@pytest.mark.parametrize("ticks", range(5))
async def test_stopping_ends_whatever_it_interrupts(tmp_path: Path, ticks: int) -> None:
    """A wake-up and a cancellation in the same turn of the event loop: the cancellation must win."""
    async with open_world(tmp_path) as world:
        await eventually(lambda: world.gateway.scenarios.head(SCENARIO) is not None)
        world.gateway.training.wake()
        for _ in range(ticks):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await world.gateway.training.stop()
