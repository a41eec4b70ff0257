"""Which reports form a batch: rules without I/O, without clocks and without torch.

```
report arrives --validate--> stored, pending --form--> groups of report ids --> one batch (one job) each
                   |refused: the field and the reason
```
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class ReportView:
    """What a batching rule sees of a report.

    Example: `ReportView("rep-1", ("4f0c…",), 0.5, created_at=t, metadata={"group": "q17"}, weight_versions=("1:3",))`.
    """

    report_id: str
    receipts: tuple[str, ...]
    """The samples it is about, in the order of the trajectory."""
    score: float | None
    created_at: datetime
    """When the report became durable; timezone-aware."""
    feedback: JsonValue = None
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    weight_versions: tuple[str, ...] = ()
    """The version that produced each receipt, in the order of `receipts`: the oldest of its spans."""


class BatchingRule(ABC):
    """Turns reports into batches. Frozen: the same pending reports always give the same batches."""

    @abstractmethod
    def validate(self, report: ReportView) -> None:
        """Checks a report when it arrives.

        Raises: InvalidInput (REPORT_REFUSED) naming the field, the value seen and what is allowed.
        """

    @abstractmethod
    def form(self, pending: Sequence[ReportView]) -> list[tuple[str, ...]]:
        """Returns the batches that are complete, oldest first, each as the ids of its reports in training order.

        `pending` holds every validated report that is in no batch, in any order. Reports that complete nothing are
        left out: they stay pending.
        """

    def dropped_with(self, outdated: AbstractSet[str], pending: Sequence[ReportView]) -> Mapping[str, str]:
        """Reports that could only be trained together with one that will never be, by id: the id of that one.

        `outdated`: ids of pending reports with a sample that no job will admit any more. Whoever planned a batch does
        not report again what it has reported, so the rest of it would wait for ever. Default: none; a report of
        another time may take the place.
        """
        return {}

    @abstractmethod
    def group_of(self, report: ReportView) -> str:
        """The group that a report's rollout belongs to; the report's own id where the family has no groups."""
