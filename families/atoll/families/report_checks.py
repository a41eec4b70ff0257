"""Checks of a report's parts that several batching rules share. Each raises InvalidInput (REPORT_REFUSED)."""

from atoll.families.batching import ReportView
from atoll.families.refusals import report_refused

SCORE_LIMIT = 1e15
"""Above it the moments of a group overflow float32, and its advantages would silently become 0."""


def require_receipts(report: ReportView, *, at_most: int | None = None) -> None:
    """Wants at least one receipt, and no more than `at_most`."""
    if not report.receipts:
        raise report_refused("receipts: at least one expected, got none", field="receipts")
    if at_most is not None and len(report.receipts) > at_most:
        raise report_refused(
            f"receipts: at most {at_most} expected, got {len(report.receipts)}; report the others apart",
            field="receipts",
        )


def require_score(report: ReportView) -> None:
    """Wants a finite score within SCORE_LIMIT."""
    if report.score is None or not abs(report.score) <= SCORE_LIMIT:
        raise report_refused(
            f"score: a number within +-{SCORE_LIMIT:g} expected, got {report.score}; scale the scores", field="score"
        )


def metadata_int(report: ReportView, name: str, *, at_least: int = 0, below: int | None = None) -> int:
    """A whole number of the metadata in [at_least, below)."""
    value = report.metadata.get(name)
    in_range = isinstance(value, int) and value >= at_least and (below is None or value < below)
    if not isinstance(value, int) or isinstance(value, bool) or not in_range:
        allowed = f"of at least {at_least}" if below is None else f"from {at_least} to {below - 1}"
        raise report_refused(
            f"metadata.{name}: a whole number {allowed} expected, got {value!r}", field=f"metadata.{name}"
        )
    return value


def metadata_text(report: ReportView, name: str, *, at_most: int) -> str:
    """A text of the metadata of 1 to `at_most` characters."""
    value = report.metadata.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= at_most:
        got = f"{len(value)} characters" if isinstance(value, str) and len(value) > at_most else repr(value)
        raise report_refused(
            f"metadata.{name}: a text of 1 to {at_most} characters expected, got {got}", field=f"metadata.{name}"
        )
    return value


def age(report: ReportView) -> tuple[float, str]:
    """Sorts reports oldest first; those of the same instant by their id."""
    return report.created_at.timestamp(), report.report_id
