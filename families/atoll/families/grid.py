"""The batching rule of families that train on a planned grid of rollouts and wait until all of it was reported.

```
metadata.step, .group, .rollout  --one cell of-->  step s: groups_per_step x rollouts_per_group  --all there-->  batch
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.refusals import report_refused
from atoll.families.report_checks import age, metadata_int, require_receipts, require_score


@dataclass(frozen=True, slots=True)
class Grid(BatchingRule):
    """A report is one rollout: the cell (`metadata.group`, `metadata.rollout`) of the grid of `metadata.step`.

    A batch is a whole grid, ordered by group and rollout. It forms when its last cell arrives and never before. A
    second report of a cell that is taken waits for another grid of the same step. Example: `Grid(1, 2)` with the
    reports (step 0, group 0, rollout 1) and (step 0, group 0, rollout 0) forms one batch.
    """

    groups_per_step: int
    rollouts_per_group: int
    one_version: bool = False
    """Cells of a grid must come from one weight version: reports of another version are cells of another grid."""
    max_receipts: int | None = None

    def validate(self, report: ReportView) -> None:
        """Wants a finite score, a cell inside the grid, and the grid's size as the family was given it."""
        require_receipts(report, at_most=self.max_receipts)
        require_score(report)
        for name, expected in (
            ("groups_per_step", self.groups_per_step),
            ("rollouts_per_group", self.rollouts_per_group),
        ):
            got = metadata_int(report, name, at_least=1)
            if got != expected:
                raise report_refused(
                    f"metadata.{name}: {expected} expected, the scenario's setting, got {got}; "
                    "report a grid of that size or create the scenario with another",
                    field=f"metadata.{name}",
                )
        metadata_int(report, "step")
        metadata_int(report, "group", below=self.groups_per_step)
        metadata_int(report, "rollout", below=self.rollouts_per_group)

    def group_of(self, report: ReportView) -> str:
        return f"step-{metadata_int(report, 'step')}-group-{metadata_int(report, 'group')}"

    def form(self, pending: Sequence[ReportView]) -> list[tuple[str, ...]]:
        grids: dict[tuple[int, tuple[str, ...]], dict[tuple[int, int], list[ReportView]]] = {}
        for report in sorted(pending, key=age):
            cells = grids.setdefault(self._grid_of(report), {})
            cells.setdefault((metadata_int(report, "group"), metadata_int(report, "rollout")), []).append(report)
        complete: list[list[ReportView]] = []
        for _, cells in sorted(grids.items()):
            if len(cells) == self.groups_per_step * self.rollouts_per_group:
                complete += [
                    [reports[turn] for _, reports in sorted(cells.items())]
                    for turn in range(min(map(len, cells.values())))
                ]
        return [tuple(report.report_id for report in grid) for grid in complete]

    def _grid_of(self, report: ReportView) -> tuple[int, tuple[str, ...]]:
        versions = tuple(sorted(set(report.weight_versions))) if self.one_version else ()
        return metadata_int(report, "step"), versions
