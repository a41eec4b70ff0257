"""What becomes of pending reports when no new report comes: settled, or in a batch, and never forgotten."""

import asyncio
from pathlib import Path

import pytest
from atoll.api.registry.v1 import version_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.gateway.job_settling import settle
from atoll.gateway.records import BatchState, JobOutcome, NewReport, Settlement

from tests.fakes.trainer import FakeTrainer
from tests.gateway.store_world import (
    SCENARIO,
    World,
    batch_states,
    eventually,
    new_sample,
    open_world,
    report_on,
    standings,
)

pytestmark = pytest.mark.usefixtures("both_databases")

GRID = {"groups_per_step": 1, "rollouts_per_group": 3}


async def settled_reason(world: World, receipt: str, scenario: str = SCENARIO) -> str:
    return (await world.gateway.samples.get(scenario, receipt)).sample.settled_reason


async def test_a_report_that_the_head_left_behind_is_settled_without_another_report(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        (receipt,) = await world.record()
        await world.gateway.reports.create(report_on(receipt))
        world.registry.append(SCENARIO)
        await eventually(lambda: standings(world.gateway.database) == {"settled": 1})
        assert (await settled_reason(world, receipt)).startswith("stale_sample: produced by 1:0, the head is 1:1")


async def test_a_rollback_settles_pending_reports_and_reserved_batches_end_with_the_trainers_word(
    tmp_path: Path,
) -> None:
    async with open_world(tmp_path) as world:
        job_id, reserved = await world.batch()
        (pending,) = await world.record()
        await world.gateway.reports.create(report_on(pending, group="q2"))
        await world.trainer.wait_for(1)
        world.registry.append(SCENARIO, incarnation=2, operation=version_pb2.OPERATION_ROLLBACK, restores=0)
        await eventually(lambda: standings(world.gateway.database) == {"reserved": 2, "settled": 1})
        assert "of another incarnation" in await settled_reason(world, pending)
        world.trainer.move(job_id, job_pb2.JOB_STATE_DROPPED, "produced by 1:0, of another incarnation")
        await eventually(lambda: standings(world.gateway.database) == {"settled": 3})
        assert await settled_reason(world, reserved[0]) == "stale_sample: produced by 1:0, of another incarnation"
        fresh = await world.record_of("2:1", 2)
        for receipt in fresh:
            await world.gateway.reports.create(report_on(receipt))
        await world.trainer.wait_for(2)


async def test_a_recovery_that_brought_the_weights_back_settles_nothing(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.registry.append(SCENARIO)
        await eventually(lambda: world.head_number() == 1)
        (fresh,) = await world.record_of("1:1", 1)
        await world.gateway.reports.create(report_on(fresh))
        recovery = version_pb2.OPERATION_RECOVERY
        world.registry.append(SCENARIO, incarnation=2, operation=recovery, restores=0, same_weights=True)
        await eventually(lambda: world.head_number() == 2)
        (later,) = await world.record_of("2:2", 1)
        answer = await world.gateway.reports.create(report_on(later))
        assert answer.job_id and standings(world.gateway.database) == {"reserved": 2}


async def test_samples_of_versions_that_a_recovery_lost_are_settled_as_lost(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        for _ in range(2):
            world.registry.append(SCENARIO)
        await eventually(lambda: world.head_number() == 2)
        (lost,) = await world.record_of("1:2", 1)
        await world.gateway.reports.create(report_on(lost))
        world.registry.append(SCENARIO, incarnation=2, operation=version_pb2.OPERATION_RECOVERY, restores=1)
        await eventually(lambda: standings(world.gateway.database) == {"settled": 1})
        assert (await settled_reason(world, lost)).startswith("lost_version: produced by 1:2, the head is 2:3")
        (kept,) = await world.record_of("1:1", 1)
        answer = await world.gateway.reports.create(report_on(kept, group="q2"))
        assert answer.settled is None, "the weights of 1:1 are served again"


async def test_a_grid_that_lost_a_cell_is_settled_whole(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.registry.add("grid", "sdpo", GRID)
        world.registry.scenarios["grid"].max_staleness = 1
        bound = await world.gateway.scenarios.get("grid")
        assert bound.max_staleness == 1
        for number in (1, 2):
            world.registry.append("grid")
            await eventually(lambda number=number: world.head_number("grid") == number)  # type: ignore[misc]
        reported = []
        for version, step, rollout in (("1:1", 0, 0), ("1:2", 0, 1), ("1:2", 1, 0)):
            (receipt,) = await world.record_of(version, 1, "grid")
            metadata = {"step": step, "group": 0, "rollout": rollout, **GRID}
            await world.gateway.reports.create(NewReport("grid", (receipt,), score=1.0, metadata=metadata))
            reported.append(receipt)
        world.registry.append("grid")
        await eventually(lambda: standings(world.gateway.database) == {"pending": 1, "settled": 2})
        assert "produced by 1:1, the head is 1:3" in await settled_reason(world, reported[0], "grid")
        taken_along = await settled_reason(world, reported[1], "grid")
        assert taken_along.startswith("stale_sample: its batch needs report") and "produced by 1:1" in taken_along


async def test_a_batch_cancelled_while_its_gateway_died_is_formed_at_the_next_start(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        await world.trainer.wait_for(1)
        database = world.gateway.database
        # As the gateway leaves it when it dies between the settling and the forming.
        await world.gateway.forming.stop()
        outcome = JobOutcome(BatchState.CANCELLED, Settlement("job_cancelled", "by hand"))
        await asyncio.to_thread(settle, database, job_id, outcome)
        assert standings(database) == {"pending": 2}
    async with open_world(tmp_path, FakeTrainer(ending=job_pb2.JOB_STATE_COMMITTED)) as world:
        await eventually(lambda: standings(world.gateway.database) == {"consumed": 2})
        (again,) = world.trainer.submitted
        assert again != job_id and list(world.trainer.requests[again].sample_ids) == receipts
        assert batch_states(world.gateway.database) == {job_id: "cancelled", again: "committed"}


async def test_a_scenario_whose_family_is_broken_keeps_no_other_from_being_looked_at(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.registry.add("abroken", "grpo", {"no_such_option": 1})
        receipt = world.gateway.receipts.issue("abroken")
        await world.gateway.writer.record(new_sample(receipt, "abroken"))
        # Reported before the scenario's options became unusable.
        world.insert_report("abroken", receipt)
        (stale,) = await world.record()
        await world.gateway.reports.create(report_on(stale))
        world.registry.append(SCENARIO)
        await eventually(lambda: standings(world.gateway.database) == {"pending": 1, "settled": 1})
