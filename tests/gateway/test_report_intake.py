"""A report is recorded whole or not at all, and completes a batch exactly once."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import NotFound
from atoll.gateway.database import microseconds
from atoll.gateway.job_settling import settle
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.records import BatchState, JobOutcome, Settlement
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows, request_answers
from sqlalchemy import select, update

from tests.gateway.desk import Desk
from tests.gateway.store_world import (
    SCENARIO,
    batch_states,
    report_on,
    standings,
)

pytestmark = pytest.mark.usefixtures("both_databases")


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


async def test_what_another_gateway_took_is_not_pending_here(desk: Desk) -> None:
    other = ReportIntake(desk.database, desk.receipts, desk._binding, lambda _: None, PendingReports())
    receipts = [await desk.record() for _ in range(4)]
    answers = [
        await intake.create(report_on(receipt))
        for intake, receipt in zip((desk.intake, other, desk.intake, other), receipts, strict=True)
    ]
    jobs = [answer.job_id for answer in answers]
    assert jobs[0] == jobs[2] == "" and jobs[1] != jobs[3] and standings(desk.database) == {"reserved": 4}
