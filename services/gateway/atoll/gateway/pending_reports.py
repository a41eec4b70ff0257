"""The reports of a scenario that are in no batch, as its family's batching rule sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.families.batching import ReportView
from atoll.gateway.database import moment_of
from atoll.gateway.tables import report_receipts, reports
from sqlalchemy import Connection, select

_IDS_PER_QUERY = 500


@dataclass(frozen=True, slots=True)
class PendingReport:
    """Example: PendingReport(ReportView("9b2d...", ("4f0c...",), 1.0, created_at), epoch=0)"""

    view: ReportView
    epoch: int
    """How often its batches were cancelled."""


class PendingReports:
    """Reads them inside a transaction, under the scenario's lock.

    A report never changes once it is stored, so only what came since the last look is fetched; which ones are pending
    is asked every time, because another gateway may have taken some.
    """

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, ReportView]] = {}

    def read(self, connection: Connection, scenario: str) -> Mapping[str, PendingReport]:
        """By report id, oldest first."""
        waiting = (reports.c.scenario == scenario) & reports.c.job_id.is_(None)
        query = select(reports.c.report_id, reports.c.epoch).where(waiting).order_by(reports.c.position)
        epochs = {row.report_id: row.epoch for row in connection.execute(query)}
        known = self._known.get(scenario, {})
        views = {report_id: known[report_id] for report_id in epochs if report_id in known}
        views |= _fetch(connection, [report_id for report_id in epochs if report_id not in known])
        self._known[scenario] = views
        return {report_id: PendingReport(views[report_id], epoch) for report_id, epoch in epochs.items()}


def _fetch(connection: Connection, report_ids: Sequence[str]) -> dict[str, ReportView]:
    views: dict[str, ReportView] = {}
    for start in range(0, len(report_ids), _IDS_PER_QUERY):
        ids = report_ids[start : start + _IDS_PER_QUERY]
        members: dict[str, list[tuple[str, str]]] = {}
        of_these = select(report_receipts).where(report_receipts.c.report_id.in_(ids))
        for row in connection.execute(of_these.order_by(report_receipts.c.report_id, report_receipts.c.ordinal)):
            members.setdefault(row.report_id, []).append((row.receipt, row.weight_version))
        for row in connection.execute(select(reports).where(reports.c.report_id.in_(ids))):
            views[row.report_id] = ReportView(
                report_id=row.report_id,
                receipts=tuple(receipt for receipt, _ in members[row.report_id]),
                score=row.score,
                created_at=moment_of(row.created_us),
                feedback=row.feedback,
                metadata=row._mapping[reports.c.metadata],
                weight_versions=tuple(version for _, version in members[row.report_id]),
            )
    return views
