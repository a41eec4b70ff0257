"""Reports whose samples fell behind are settled with the reason, and spoil no batch."""

from dataclasses import replace

import pytest
from atoll.families.catalog import make_family
from atoll.gateway.records import NewReport, ReportAnswer
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows
from sqlalchemy import select

from tests.gateway.desk import Desk
from tests.gateway.store_world import (
    SCENARIO,
    head_at,
    report_on,
    standings,
)

pytestmark = pytest.mark.usefixtures("both_databases")


async def test_a_report_left_over_from_an_older_version_is_settled_and_spoils_no_batch(desk: Desk) -> None:
    desk.head = head_at(0)
    left_over = await desk.record()
    await desk.intake.create(report_on(left_over))
    desk.head = head_at(1)
    fresh = [await desk.record(weight_version="1:1") for _ in range(2)]
    first = await desk.intake.create(report_on(fresh[0]))
    assert first.job_id == "" and standings(desk.database) == {"settled": 1, "pending": 2}
    second = await desk.intake.create(report_on(fresh[1]))
    with desk.database.reading() as connection:
        rows = connection.scalars(select(batch_rows.c.receipt).where(batch_rows.c.job_id == second.job_id))
        assert list(rows) == fresh
    refusal = await desk.refusal(report_on(left_over, request_id="again"))
    assert refusal.code == "already_consumed"
    assert "stale_sample: produced by 1:0, the head is 1:1 and max_staleness is 0" in refusal.message


async def test_a_report_that_may_still_be_admitted_waits(desk: Desk) -> None:
    desk.max_staleness = 1
    desk.head = head_at(1)
    old, new = await desk.record(), await desk.record(weight_version="1:1")
    await desk.intake.create(report_on(old))
    assert (await desk.intake.create(report_on(new))).job_id and standings(desk.database) == {"reserved": 2}


async def test_one_outdated_sample_settles_all_samples_of_its_report(desk: Desk) -> None:
    desk.head = head_at(2)
    turns = [await desk.record(weight_version="1:2"), await desk.record(weight_version="1:1")]
    report = replace(report_on(turns[0], request_id="r1"), receipts=tuple(turns))
    answer = await desk.intake.create(report)
    assert standings(desk.database) == {"settled": 2}
    assert answer.settled is not None and answer.settled.code == "stale_sample", "the reporter is told"
    assert "produced by 1:1, the head is 1:2" in answer.settled.message
    assert await desk.intake.create(report) == answer, "also when it asks again"


async def test_a_new_cell_is_not_taken_along_by_those_that_the_head_left_behind(desk: Desk) -> None:
    planned = {"groups_per_step": 1, "rollouts_per_group": 3}

    async def grid(scenario: str) -> BoundScenario:
        return BoundScenario(scenario, "sdpo", make_family("sdpo", planned), max_staleness=0)

    intake = ReportIntake(desk.database, desk.receipts, grid, lambda _: desk.head, desk.pending)

    async def report(rollout: int, weight_version: str) -> ReportAnswer:
        receipt = await desk.record(weight_version=weight_version)
        metadata = {"step": 0, "group": 0, "rollout": rollout, **planned}
        return await intake.create(NewReport(SCENARIO, (receipt,), score=1.0, metadata=metadata))

    desk.head = head_at(0)
    await report(0, "1:0")
    desk.head = head_at(1)
    assert (await report(1, "1:1")).settled is None
    assert standings(desk.database) == {"settled": 1, "pending": 1}
    late = await report(2, "1:0")
    assert late.settled is not None and late.settled.code == "stale_sample"
    assert standings(desk.database) == {"settled": 3}, "the grid that needed the late one goes with it"
    again = [await report(rollout, "1:1") for rollout in range(3)]
    assert again[-1].job_id, "the step may be sampled anew"
