"""What `prepare` makes of a batch, and how the batch is cut into optimizer steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.families.refusals import batch_refused
from atoll.families.rows import Float32, Row
from pydantic import JsonValue

FamilyState = Mapping[str, JsonValue]
"""What a family remembers between jobs; stored with each version and brought back by a rollback."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSignal:
    """The outcome of `LossFamily.prepare`.

    Example, two rows of 3 and 2 response tokens: `StepSignal((zeros(3), ones(2)), {"reward_mean": 0.5})`.
    """

    advantages: tuple[Float32, ...] | None
    """Per row, float32 [R]; None where the family forbids advantages or computes them in the workers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    new_state: FamilyState = field(default_factory=dict)
    """Becomes the family's state when, and only when, the job commits."""


@dataclass(frozen=True, slots=True)
class StepScheduling:
    """How a batch is cut into optimizer steps. Example, one step of three rows: `StepScheduling(((0, 1, 2),))`."""

    steps: tuple[tuple[int, ...], ...]
    """Indices into the batch's rows, a tuple for each optimizer step, in the order of training."""
    dropped: tuple[int, ...] = ()
    """Rows that the family consumes and does not train."""

    @classmethod
    def whole(cls, rows: Sequence[Row]) -> "StepScheduling":
        """One optimizer step of all rows."""
        return cls((tuple(range(len(rows))),))

    @classmethod
    def by_groups(cls, rows: Sequence[Row], groups_per_step: int, *, without: Collection[str] = ()) -> "StepScheduling":
        """Consecutive groups, `groups_per_step` to an optimizer step; the last step takes what is left.

        The rows of the groups `without` are dropped.
        """
        names = [name for name in dict.fromkeys(row.group_id for row in rows) if name not in without]
        step_of = {name: number // groups_per_step for number, name in enumerate(names)}
        steps: list[list[int]] = [[] for _ in range(max(step_of.values(), default=-1) + 1)]
        for index, row in enumerate(rows):
            if row.group_id in step_of:
                steps[step_of[row.group_id]].append(index)
        dropped = tuple(index for index, row in enumerate(rows) if row.group_id in without)
        return cls(tuple(tuple(step) for step in steps), dropped)

    def validate(self, rows: Sequence[Row]) -> None:
        """Refuses a cut that loses or repeats a row, or that splits a rollout over two steps.

        Raises: InvalidInput.
        """
        if sorted([*self.dropped, *(index for step in self.steps for index in step)]) != list(range(len(rows))):
            raise batch_refused(
                f"the cut into optimizer steps must hold each of the {len(rows)} rows once, got {self.steps}"
                + (f" and {self.dropped} dropped" if self.dropped else ""),
                field="steps",
            )
        step_of: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            for index in step:
                rollout = rows[index].rollout_id
                if step_of.setdefault(rollout, number) != number:
                    raise batch_refused(
                        f"rollout {rollout} is split over optimizer steps {step_of[rollout]} and {number}; "
                        "keep its rows in one step",
                        field="steps",
                    )
