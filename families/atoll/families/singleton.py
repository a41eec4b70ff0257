"""The batching rule of families that learn from each report by itself: a batch is the oldest reports there are."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.report_checks import age, require_receipts, require_score


@dataclass(frozen=True, slots=True)
class Singleton(BatchingRule):
    """Every report is a group of its own; a batch is `batch_size` reports, oldest first.

    A subclass checks its metadata in `validate`, after `super().validate(report)`.
    Example: `Singleton(batch_size=2)` with reports a, b, c forms (a, b) and leaves c pending.
    """

    batch_size: int = 1
    score_required: bool = True
    max_receipts: int | None = 1
    """1: one report is one sample. None: a report may be a rollout of several."""

    def validate(self, report: ReportView) -> None:
        """Wants receipts, and a finite score where one is required; a score that is there must be finite."""
        require_receipts(report, at_most=self.max_receipts)
        if self.score_required or report.score is not None:
            require_score(report)

    def group_of(self, report: ReportView) -> str:
        return report.report_id

    def form(self, pending: Sequence[ReportView]) -> list[tuple[str, ...]]:
        ids = [report.report_id for report in sorted(pending, key=age)]
        size = self.batch_size
        return [tuple(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
