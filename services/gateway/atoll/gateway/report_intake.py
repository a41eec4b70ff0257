"""Takes reports: one transaction checks, records, and forms the batch that a report completes.

```
create() -> replayed? -> receipts pending? -> family's contract -> stored -> family's rule -> batch reserved -> job id
                                                                     '-> too old -> settled -> why
```
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import structlog
from atoll.common.failpoints import reached
from atoll.common.names import new_id
from atoll.families.batching import ReportView
from atoll.gateway.batching import form_batches, settle_outdated
from atoll.gateway.database import Database, lock_scenario, microseconds, moment_of
from atoll.gateway.head import Head
from atoll.gateway.pending_reports import PendingReport, PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import NewReport, Report, ReportAnswer
from atoll.gateway.report_checks import Reportable, checked_report, reportable
from atoll.gateway.request_replay import FirstAnswer, RequestKey, body_digest, first_answer, keep_answer
from atoll.gateway.sample_store import receipts_of
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import report_receipts, reports
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

log = structlog.get_logger(__name__)

METHOD = "CreateReport"
MAX_TRIES = 3
"""Two gateways may collide on a unique key where the database locks rows; the next try sees what the other did."""


class ReportIntake:
    """The same for HTTP and gRPC."""

    def __init__(
        self,
        database: Database,
        receipts: Receipts,
        binding: Callable[[str], Awaitable[BoundScenario]],
        head: Callable[[str], Head | None],
        pending: PendingReports,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """binding: the scenario and its family, by id. head: its newest version, as far as it is known. on_batch:
        called in the event loop after a batch is durable."""
        self._database = database
        self._receipts = receipts
        self._binding = binding
        self._head = head
        self._pending = pending
        self._on_batch = on_batch

    async def create(self, report: NewReport) -> ReportAnswer:
        """Records a report. Nothing is stored on a refusal.

        Raises InvalidInput(INVALID_FIELD, REPORT_REFUSED), NotFound(SCENARIO_NOT_FOUND, RECEIPT_NOT_FOUND),
        Conflict(RECEIPT_NOT_RECORDED, ALREADY_CONSUMED, SAMPLE_NOT_EXACT, REQUEST_ID_REUSED),
        AtollError(STORAGE_FULL), Unavailable.
        """
        bound = await self._binding(report.scenario)
        # Checked in the thread too: megabytes of metadata are no matter for the event loop.
        answer, formed = await asyncio.to_thread(lambda: self._record(bound, checked_report(report)))
        reached("gateway.batch_formed" if formed else "gateway.report_recorded")
        log.info(
            "report",
            scenario=report.scenario,
            report=answer.report.report_id,
            receipts=len(answer.report.receipts),
            job=answer.job_id,
        )
        if formed:
            self._on_batch()
        return answer

    def _record(self, bound: BoundScenario, report: NewReport) -> tuple[ReportAnswer, bool]:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                with self._database.writing() as connection:
                    return self._record_in(connection, bound, report)
            except IntegrityError:
                if attempt == MAX_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _record_in(self, connection: Connection, bound: BoundScenario, report: NewReport) -> tuple[ReportAnswer, bool]:
        """The answer, and whether a batch was formed."""
        now = datetime.now(UTC)
        key = RequestKey(
            scenario=report.scenario,
            method=METHOD,
            request_id=report.request_id,
            body=body_digest(
                {
                    "receipts": list(report.receipts),
                    "score": report.score,
                    "feedback": report.feedback,
                    "metadata": dict(report.metadata),
                }
            ),
        )
        lock_scenario(connection, report.scenario)
        known = first_answer(connection, key, now)
        if known is not None:
            return ReportAnswer(_read_report(connection, known.report_id), known.job_id, known.settled), False
        members = reportable(connection, self._receipts, report)
        recorded = Report(
            scenario=report.scenario,
            report_id=new_id(),
            receipts=report.receipts,
            score=report.score,
            feedback=report.feedback,
            metadata=report.metadata,
            # As it is stored, so that the answer and a later reading agree.
            created_at=moment_of(microseconds(now)),
        )
        view = _view(recorded, members)
        bound.family.batching.validate(view)
        head = self._head(report.scenario)
        waiting = self._pending.read(connection, report.scenario)
        # Before the new one is among them: what is left over must not take it along.
        left_over = settle_outdated(connection, bound, waiting, head)
        _store_report(connection, recorded, members)
        usable = {known: pending for known, pending in waiting.items() if known not in left_over}
        usable[recorded.report_id] = PendingReport(view, epoch=0)
        formed = form_batches(connection, bound, usable, head, now)
        job_id = next((b.job_id for b in formed.batches if any(r.report_id == recorded.report_id for r in b.rows)), "")
        settled = formed.settled.get(recorded.report_id)
        keep_answer(connection, key, FirstAnswer(recorded.report_id, job_id, settled), now)
        return ReportAnswer(recorded, job_id, settled), bool(formed.batches)


def _view(report: Report, members: Sequence[Reportable]) -> ReportView:
    return ReportView(
        report_id=report.report_id,
        receipts=report.receipts,
        score=report.score,
        created_at=report.created_at,
        feedback=report.feedback,
        metadata=report.metadata,
        weight_versions=tuple(member.weight_version for member in members),
    )


def _store_report(connection: Connection, report: Report, members: Sequence[Reportable]) -> None:
    connection.execute(
        insert(reports).values(
            {
                reports.c.report_id: report.report_id,
                reports.c.scenario: report.scenario,
                reports.c.score: report.score,
                reports.c.feedback: report.feedback,
                reports.c.metadata: dict(report.metadata),
                reports.c.created_us: microseconds(report.created_at),
                reports.c.epoch: 0,
            }
        )
    )
    connection.execute(
        insert(report_receipts),
        [
            {
                "receipt": member.receipt,
                "report_id": report.report_id,
                "ordinal": ordinal,
                "weight_version": member.weight_version,
                "trajectory": member.trajectory,
            }
            for ordinal, member in enumerate(members)
        ],
    )


def _read_report(connection: Connection, report_id: str) -> Report:
    row = connection.execute(select(reports).where(reports.c.report_id == report_id)).one()
    return Report(
        scenario=row.scenario,
        report_id=row.report_id,
        receipts=receipts_of(connection, [report_id])[report_id],
        score=row.score,
        feedback=row.feedback,
        metadata=row._mapping[reports.c.metadata],
        created_at=moment_of(row.created_us),
    )
