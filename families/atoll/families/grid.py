"""The batching rule of families that train on a planned grid of rollouts and wait until all of it was reported.

```
metadata.step, .group, .rollout  --one cell of-->  step s: groups_per_step x rollouts_per_group  --all there-->  batch
```
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.refusals import report_refused
from atoll.families.report_checks import age, metadata_int, require_receipts, require_score


@dataclass(frozen=True, slots=True)
class Grid(BatchingRule):
    """A report is one rollout: the cell (`metadata.group`, `metadata.rollout`) of the grid of `metadata.step`.

    A batch is a whole grid, ordered by group and rollout. It forms when its last cell arrives and never before. A
    second report of a cell that is taken waits for another grid of the same step. When a cell can no longer be trained,
    its whole grid is dropped. Example: `Grid(1, 2)` with the reports (step 0, group 0, rollout 1) and (step 0, group 0,
    rollout 0) forms one batch.
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
        size = self.groups_per_step * self.rollouts_per_group
        return [tuple(report.report_id for report in grid) for grid in self._grids(pending) if len(grid) == size]

    def dropped_with(self, outdated: AbstractSet[str], pending: Sequence[ReportView]) -> Mapping[str, str]:
        """The other cells of a grid that lost one: a grid is planned, and its cells are reported once."""
        dropped: dict[str, str] = {}
        for grid in self._grids(pending):
            culprit = next((report.report_id for report in grid if report.report_id in outdated), None)
            if culprit is not None:
                dropped |= {r.report_id: culprit for r in grid if r.report_id not in outdated}
        return dropped

    def _grids(self, pending: Sequence[ReportView]) -> list[list[ReportView]]:
        """Grids of each step, complete or not, each ordered by group and rollout: the first report of every cell is in
        the first one."""
        steps: dict[tuple[int, tuple[str, ...]], dict[tuple[int, int], list[ReportView]]] = {}
        for report in sorted(pending, key=age):
            cells = steps.setdefault(self._grid_of(report), {})
            cells.setdefault((metadata_int(report, "group"), metadata_int(report, "rollout")), []).append(report)
        return [
            [reports[turn] for _, reports in sorted(cells.items()) if len(reports) > turn]
            for _, cells in sorted(steps.items())
            for turn in range(max(map(len, cells.values())))
        ]

    def _grid_of(self, report: ReportView) -> tuple[int, tuple[str, ...]]:
        versions = tuple(sorted(set(report.weight_versions))) if self.one_version else ()
        return metadata_int(report, "step"), versions
