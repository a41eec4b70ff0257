"""A report is recorded whole or not at all, and completes a batch exactly once."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, NotFound
from atoll.families.catalog import make_family
from atoll.gateway.database import Database, microseconds
from atoll.gateway.head import Head
from atoll.gateway.job_settling import settle
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import BatchState, JobOutcome, NewReport, ReportAnswer, Settlement
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows, reports, request_answers
from sqlalchemy import func, select, update

from tests.gateway.store_world import (
    SCENARIO,
    batch_states,
    bound_scenario,
    head_at,
    new_sample,
    report_on,
    standings,
    url_of,
)

pytestmark = pytest.mark.usefixtures("both_databases")


class Desk:
    """An intake without a registry, and what it needs around it."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(url_of(directory))
        self.receipts = Receipts(self.database.key("receipts"))
        self.writer = SampleWriter(self.database)
        self.woken = 0
        self.head: Head | None = None
        self.max_staleness = 0
        self.pending = PendingReports()
        self.intake = ReportIntake(
            self.database, self.receipts, self._binding, lambda _: self.head, self.pending, self._wake
        )

    async def _binding(self, scenario: str) -> BoundScenario:
        return replace(bound_scenario(scenario), max_staleness=self.max_staleness)

    def _wake(self) -> None:
        self.woken += 1

    async def record(self, scenario: str = SCENARIO, **properties: Any) -> str:
        receipt = self.receipts.issue(scenario)
        await self.writer.record(new_sample(receipt, scenario, **properties))
        return receipt

    async def refusal(self, report: NewReport) -> AtollError:
        """The refusal of a report; nothing may be stored by it."""
        before = self.counts()
        with pytest.raises(AtollError) as refusal:
            await self.intake.create(report)
        assert self.counts() == before
        return refusal.value

    def counts(self) -> list[int]:
        with self.database.reading() as connection:
            return [
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (reports, request_answers, batch_rows)
            ]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    await desk.writer.stop()
    desk.database.close()


async def test_the_report_that_completes_a_group_reserves_the_batch_and_is_told_its_job(desk: Desk) -> None:
    first, second = await desk.record(), await desk.record()
    early = await desk.intake.create(report_on(first))
    assert early.job_id == "" and desk.woken == 0 and standings(desk.database) == {"pending": 2}
    answer = await desk.intake.create(report_on(second, score=0.5))
    assert batch_states(desk.database) == {answer.job_id: "open"} and desk.woken == 1
    assert standings(desk.database) == {"reserved": 2}
    assert (answer.report.score, answer.report.metadata, answer.report.receipts) == (0.5, {"group": "q1"}, (second,))


async def test_reports_that_complete_nothing_wait(desk: Desk) -> None:
    for group in ("a", "b", "c"):
        assert (await desk.intake.create(report_on(await desk.record(), group=group))).job_id == ""
    assert batch_states(desk.database) == {}


async def test_a_replay_gets_the_first_answer_and_stores_nothing(desk: Desk) -> None:
    first, second = await desk.record(), await desk.record()
    await desk.intake.create(report_on(first, request_id="r1"))
    answer = await desk.intake.create(report_on(second, request_id="r2"))
    counts = desk.counts()
    assert await desk.intake.create(report_on(second, request_id="r2")) == answer
    assert answer.job_id and desk.counts() == counts
    settle(desk.database, answer.job_id, JobOutcome(BatchState.COMMITTED, version=1))
    assert await desk.intake.create(report_on(second, request_id="r2")) == answer, "also when the job is over"


async def test_the_same_body_is_the_same_whatever_its_spelling(desk: Desk) -> None:
    receipt = await desk.record()
    metadata: dict[str, Any] = {"group": "q1", "n": 4, "x": {"a": 1, "b": 2}}
    one = replace(report_on(receipt, request_id="r1", score=1), metadata=metadata)
    other = replace(one, score=1.0, metadata={"x": {"b": 2.0, "a": 1.0}, "n": 4.0, "group": "q1"})
    assert await desk.intake.create(one) == await desk.intake.create(other)


@pytest.mark.parametrize(
    "change",
    [
        {"score": 0.9},
        {"metadata": {"group": "q2"}},
        {"feedback": "well done"},
    ],
)
async def test_another_body_under_the_same_request_id_is_refused(desk: Desk, change: dict[str, Any]) -> None:
    report = report_on(await desk.record(), request_id="r1")
    await desk.intake.create(report)
    refusal = await desk.refusal(replace(report, **change))
    assert (refusal.code, refusal.field) == ("request_id_reused", "request_id")


async def test_request_ids_are_scoped_by_scenario_and_kept_for_seven_days(desk: Desk) -> None:
    report = report_on(await desk.record(), request_id="r1")
    await desk.intake.create(report)
    elsewhere = replace(report, scenario="chat", receipts=(await desk.record("chat"),))
    await desk.intake.create(elsewhere)
    old = microseconds(datetime.now(UTC) - timedelta(days=7, seconds=1))
    with desk.database.writing() as connection:
        connection.execute(update(request_answers).where(request_answers.c.scenario == "chat").values(created_us=old))
    assert (await desk.refusal(elsewhere)).code == "already_consumed", "the id is forgotten, the receipt is not"
    assert (await desk.intake.create(report)).report.receipts == report.receipts


async def test_a_second_report_on_a_receipt_is_refused_in_every_state(desk: Desk) -> None:
    first, second = await desk.record(), await desk.record()
    await desk.intake.create(report_on(first, request_id="r1"))
    refusal = await desk.refusal(report_on(first, request_id="other"))
    assert refusal.code == "already_consumed" and "already has report" in refusal.message
    answer = await desk.intake.create(report_on(second, request_id="r2"))
    refusal = await desk.refusal(report_on(first, request_id="other"))
    assert refusal.code == "already_consumed" and f"reserved for training job {answer.job_id}" in refusal.message
    settle(desk.database, answer.job_id, JobOutcome(BatchState.COMMITTED, version=1))
    refusal = await desk.refusal(report_on(first, request_id="other"))
    assert refusal.code == "already_consumed" and f"consumed by training job {answer.job_id}" in refusal.message


async def test_receipts_without_a_sample_are_told_apart(desk: Desk) -> None:
    handed_out = desk.receipts.issue(SCENARIO)
    assert (await desk.refusal(report_on(handed_out))).code == "receipt_not_recorded"
    elsewhere = await desk.record("chat")
    for receipt in ("0" * 32, "", "x" * 10_000, "\ud800", elsewhere, desk.receipts.issue("chat")):
        refusal = await desk.refusal(report_on(receipt))
        assert (refusal.code, refusal.field) == ("receipt_not_found", "receipts")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("score", {"score": float("nan")}),
        ("score", {"score": float("inf")}),
        ("receipts", {"receipts": ()}),
        ("receipts", {"receipts": ("a", "a")}),
        ("receipts", {"receipts": tuple(str(number) for number in range(1001))}),
        ("request_id", {"request_id": "x" * 65}),
        ("request_id", {"request_id": "\ud800"}),
        ("metadata.x", {"metadata": {"group": "q1", "x": "\ud800"}}),
        ("metadata", {"metadata": {"group": "q1", "\ud800": 1}}),
        ("feedback", {"feedback": 4}),
        ("feedback", {"feedback": ["a"]}),
        ("metadata.x", {"metadata": {"group": "q1", "x": float("nan")}}),
        ("feedback.a.0", {"feedback": {"a": [float("-inf")]}}),
    ],
)
async def test_a_malformed_report_is_refused_by_its_field(desk: Desk, field: str, change: dict[str, Any]) -> None:
    refusal = await desk.refusal(replace(report_on(await desk.record()), **change))
    assert (refusal.code, refusal.field) == ("invalid_field", field)


async def test_the_familys_contract_is_checked_at_once(desk: Desk) -> None:
    report = report_on(await desk.record())
    for change, field in (({"score": None}, "score"), ({"metadata": {}}, "metadata.group")):
        refusal = await desk.refusal(replace(report, **change))
        assert (refusal.code, refusal.field) == ("report_refused", field)
    assert (await desk.intake.create(report)).report.receipts == report.receipts


async def test_samples_that_no_batch_may_hold_are_refused(desk: Desk) -> None:
    inexact, cold = await desk.record(exact=False), await desk.record(temperature=0.0)
    for receipt in (inexact, cold):
        assert (await desk.refusal(report_on(receipt))).code == "sample_not_exact"
    empty = await desk.record(response=0)
    assert (await desk.refusal(report_on(empty))).code == "report_refused"


async def test_one_bad_receipt_refuses_the_report_and_leaves_the_others_free(desk: Desk) -> None:
    good = await desk.record()
    refusal = await desk.refusal(replace(report_on(good), receipts=(good, desk.receipts.issue(SCENARIO))))
    assert refusal.code == "receipt_not_recorded"
    await desk.intake.create(report_on(good))


async def test_a_report_over_several_receipts_reserves_them_in_their_order(desk: Desk) -> None:
    turns = [await desk.record() for _ in range(3)]
    await desk.intake.create(replace(report_on(turns[0]), receipts=(turns[2], turns[0], turns[1])))
    last = await desk.record()
    answer = await desk.intake.create(report_on(last))
    with desk.database.reading() as connection:
        order = select(batch_rows.c.receipt).where(batch_rows.c.job_id == answer.job_id).order_by(batch_rows.c.ordinal)
        assert list(connection.scalars(order)) == [turns[2], turns[0], turns[1], last]


async def test_a_cancelled_batch_is_formed_again_under_another_job_id(desk: Desk) -> None:
    first, second, third = [await desk.record() for _ in range(3)]
    await desk.intake.create(report_on(first))
    job_id = (await desk.intake.create(report_on(second))).job_id
    assert settle(desk.database, job_id, JobOutcome(BatchState.CANCELLED, Settlement("job_cancelled", "by hand")))
    assert standings(desk.database) == {"pending": 3}
    await desk.intake.create(report_on(third))
    again = {name: state for name, state in batch_states(desk.database).items() if state == "open"}
    assert len(again) == 1 and job_id not in again and desk.woken == 2
    assert not settle(desk.database, job_id, JobOutcome(BatchState.COMMITTED)), "a batch ends once"


async def test_a_scenario_that_is_not_there_is_told_by_the_registry(desk: Desk) -> None:
    async def nowhere(scenario: str) -> BoundScenario:
        raise NotFound(f"no scenario {scenario}", reason=errors_pb2.REASON_SCENARIO_NOT_FOUND)

    intake = ReportIntake(desk.database, desk.receipts, nowhere, lambda _: None, desk.pending)
    with pytest.raises(NotFound):
        await intake.create(report_on(await desk.record()))


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


async def test_what_another_gateway_took_is_not_pending_here(desk: Desk) -> None:
    other = ReportIntake(desk.database, desk.receipts, desk._binding, lambda _: None, PendingReports())
    receipts = [await desk.record() for _ in range(4)]
    answers = [
        await intake.create(report_on(receipt))
        for intake, receipt in zip((desk.intake, other, desk.intake, other), receipts, strict=True)
    ]
    jobs = [answer.job_id for answer in answers]
    assert jobs[0] == jobs[2] == "" and jobs[1] != jobs[3] and standings(desk.database) == {"reserved": 4}


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
