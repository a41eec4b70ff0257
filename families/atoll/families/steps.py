"""What the driver ships to the workers: the rows of each optimizer step with every whole-step fact filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from atoll.families.aggregation import Aggregation, row_weights
from atoll.families.refusals import batch_refused, sample_refused
from atoll.families.rows import Batch, Column, ColumnOrigin, Float32, Row, UInt8, check_column
from atoll.families.signal import StepSignal

if TYPE_CHECKING:
    from atoll.families.family import LossFamily
    from atoll.families.options import FamilyOptions


@dataclass(frozen=True, slots=True)
class RowWeights:
    """Weights of one row's tokens, each the same for all of them (float64)."""

    policy: float
    """Of the policy-gradient, divergence or cross-entropy term."""
    regularizer: float
    """Of entropy and KL terms."""
    metric: float
    """Of metrics: always sample_mean."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """A row with the whole-step facts its loss needs."""

    row: Row
    mask: UInt8
    """[R] the effective mask."""
    weights: RowWeights
    advantages: Float32 | None = None
    """[R]"""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Extra columns of both origins, by name."""
    values: Float32 | None = None
    """[R] the critic's values when the job started: of the state before each response token."""
    returns: Float32 | None = None
    """[R] what the critic should have said."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainStep:
    """One optimizer step. Ranks and micro-batches split its rows any way they like: the weights stay as they are."""

    rows: tuple[TrainRow, ...]


def build_train_steps(family: "LossFamily[FamilyOptions]", batch: Batch, signal: StepSignal) -> tuple[TrainStep, ...]:
    """Cuts a prepared batch into optimizer steps and computes every row's weights.

    Raises: InvalidInput when the family's cut, masks, advantages or columns do not fit the batch.
    """
    rows = batch.rows
    scheduling = family.schedule_steps(batch)
    scheduling.validate(rows)
    masks = [_checked_mask(row, family.effective_mask(row)) for row in rows]
    advantages = _checked_advantages(family, rows, masks, signal)
    driver_columns = _checked_driver_columns(family, batch, signal)
    steps = []
    for indices in scheduling.steps:
        weights = family.row_weights([rows[i] for i in indices], [int(masks[i].sum()) for i in indices])
        steps.append(
            TrainStep(
                tuple(
                    TrainRow(rows[i], masks[i], weight, advantages[i], {**rows[i].columns, **driver_columns[i]})
                    for i, weight in zip(indices, weights, strict=True)
                )
            )
        )
    return tuple(steps)


def aggregate(aggregation: Aggregation, rows: Sequence[Row], trained_tokens: Sequence[int]) -> list[RowWeights]:
    """The weights of a step's rows under one of the four aggregations.

    Raises: InvalidInput for `prompt_mean` with incomplete groups.
    """
    rollout_ids = [row.rollout_id for row in rows]
    group_ids = [row.group_id for row in rows]

    def weights(of: Aggregation) -> list[float]:
        result: list[float] = row_weights(
            of, rollout_ids=rollout_ids, group_ids=group_ids, trained_tokens=trained_tokens
        ).tolist()
        return result

    columns = (weights(aggregation), weights(aggregation.of_regularizers), weights(Aggregation()))
    return [RowWeights(*row) for row in zip(*columns, strict=True)]


def _checked_advantages(
    family: "LossFamily[FamilyOptions]", rows: Sequence[Row], masks: Sequence[UInt8], signal: StepSignal
) -> Sequence[Float32 | None]:
    if (signal.advantages is not None) != family.provides_advantages():
        raise batch_refused(
            f"{family.name}: advantages are {family.advantages.value}, and prepare returned "
            f"{'none' if signal.advantages is None else 'some'}",
            field="advantages",
        )
    if signal.advantages is None:
        return [None] * len(rows)
    if len(signal.advantages) != len(rows):
        raise batch_refused(
            f"advantages for {len(rows)} rows expected, got {len(signal.advantages)}", field="advantages"
        )
    for row, mask, values in zip(rows, masks, signal.advantages, strict=True):
        if values.dtype != np.float32 or values.shape != (row.response_length,):
            raise sample_refused(
                row.sample_id,
                f"advantages must be float32 [{row.response_length}], got {values.dtype} {values.shape}",
                field="advantages",
            )
        _refuse_non_finite(row, mask, "advantages", values)
    return signal.advantages


def check_computed(steps: Sequence[TrainStep]) -> None:
    """Refuses what the workers computed where a trained token's advantage, value or return is missing or not finite.

    Raises: InvalidInput naming the sample.
    """
    for item in (item for step in steps for item in step.rows):
        if item.advantages is None:
            raise sample_refused(item.row.sample_id, "no advantages were computed", field="advantages")
        for name, values in (("advantages", item.advantages), ("values", item.values), ("returns", item.returns)):
            if values is not None:
                _refuse_non_finite(item.row, item.mask, name, values)


def _refuse_non_finite(row: Row, mask: UInt8, name: str, values: Float32) -> None:
    if not np.isfinite(values[mask == 1]).all():
        raise sample_refused(row.sample_id, f"{name} must be finite on every trained token", field=name)


def _checked_mask(row: Row, mask: UInt8) -> UInt8:
    if mask.dtype != np.uint8 or mask.shape != row.loss_mask.shape or bool((mask > row.loss_mask).any()):
        raise sample_refused(row.sample_id, "the effective mask may only clear bits of loss_mask", field="loss_mask")
    return mask


def _checked_driver_columns(
    family: "LossFamily[FamilyOptions]", batch: Batch, signal: StepSignal
) -> Sequence[Mapping[str, Column]]:
    columns = family.build_rollout_data(batch, signal)
    expected = {spec.name: spec for spec in family.columns if spec.origin is ColumnOrigin.DRIVER}
    for row, values in zip(batch.rows, columns, strict=True):
        if set(values) != set(expected):
            raise sample_refused(
                row.sample_id,
                f"build_rollout_data must fill {sorted(expected)}, got {sorted(values)}",
                field="columns",
            )
        for name, spec in expected.items():
            check_column(row, spec, values[name])
    return columns
