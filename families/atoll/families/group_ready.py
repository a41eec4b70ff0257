"""The batching rule of families that compare rollouts of one prompt: a batch is a number of complete groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.report_checks import age, metadata_text, require_receipts, require_score

MAX_GROUP_LENGTH = 128


@dataclass(frozen=True, slots=True)
class GroupReady(BatchingRule):
    """Reports name their `metadata.group`. A group is complete with `n_samples_per_prompt` reports; a batch is
    `groups_per_step` complete groups, those whose first report is oldest first.

    A report is one rollout, of one or more receipts. Reports beyond a complete group start another group of the same
    name, which goes into a later batch. Example: `GroupReady(groups_per_step=2, n_samples_per_prompt=2)` with reports
    of groups a, b, a, c, b forms one batch (a, a, b, b) and leaves c pending.
    """

    groups_per_step: int
    n_samples_per_prompt: int

    def validate(self, report: ReportView) -> None:
        """Wants a receipt, a finite score and `metadata.group`, a text of 1 to 128 characters."""
        require_receipts(report)
        require_score(report)
        metadata_text(report, "group", at_most=MAX_GROUP_LENGTH)

    def group_of(self, report: ReportView) -> str:
        return str(report.metadata["group"])

    def form(self, pending: Sequence[ReportView]) -> list[tuple[str, ...]]:
        batches: list[tuple[str, ...]] = []
        waiting = self._complete_groups(pending)
        while True:
            # The first of each name: two groups of one name in a batch would be taken for one.
            chosen = list({self.group_of(group[0]): group for group in reversed(waiting)}.values())
            chosen = sorted(chosen, key=lambda group: age(group[0]))[: self.groups_per_step]
            if len(chosen) < self.groups_per_step:
                return batches
            batches.append(tuple(report.report_id for group in chosen for report in group))
            waiting = [group for group in waiting if group not in chosen]

    def _complete_groups(self, pending: Sequence[ReportView]) -> list[list[ReportView]]:
        """Complete groups, oldest first report first."""
        by_name: dict[str, list[ReportView]] = {}
        for report in sorted(pending, key=age):
            by_name.setdefault(self.group_of(report), []).append(report)
        size = self.n_samples_per_prompt
        groups = [
            reports[start : start + size]
            for reports in by_name.values()
            for start in range(0, len(reports) - size + 1, size)
        ]
        return sorted(groups, key=lambda group: age(group[0]))
