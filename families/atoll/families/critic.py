"""What a driver needs to train a critic beside the actor: the critic's optimizer steps and how good its values were."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from atoll.families.aggregation import Aggregation
from atoll.families.rows import UInt8
from atoll.families.steps import TrainRow, TrainStep, aggregate

MIN_RETURN_VARIANCE = 1e-8


def critic_steps(steps: Sequence[TrainStep], mask_column: str | None) -> tuple[TrainStep, ...]:
    """The same rows as the critic trains them: on the tokens that both the effective mask and `mask_column` keep, each
    rollout by its mean (`sample_mean`)."""
    return tuple(_critic_step(step, mask_column) for step in steps)


def explained_variance(steps: Sequence[TrainStep]) -> float | None:
    """1 - Var(return - value) / Var(return) over the trained tokens of critic steps, in float64.

    None where the returns hardly vary: variance below 1e-8. Raises: ValueError for rows without values and returns.
    """
    values, returns = [np.zeros(0)], [np.zeros(0)]
    for item in (item for step in steps for item in step.rows):
        if item.values is None or item.returns is None:
            raise ValueError(f"sample {item.row.sample_id} has no values and returns")
        values.append(item.values[item.mask == 1].astype(np.float64))
        returns.append(item.returns[item.mask == 1].astype(np.float64))
    every_return, every_value = np.concatenate(returns), np.concatenate(values)
    if len(every_return) == 0 or every_return.var() < MIN_RETURN_VARIANCE:
        return None
    return float(1 - (every_return - every_value).var() / every_return.var())


def _critic_step(step: TrainStep, mask_column: str | None) -> TrainStep:
    masks = [_critic_mask(item, mask_column) for item in step.rows]
    weights = aggregate(Aggregation(), [item.row for item in step.rows], [int(mask.sum()) for mask in masks])
    return TrainStep(
        tuple(
            replace(item, mask=mask, weights=weight)
            for item, mask, weight in zip(step.rows, masks, weights, strict=True)
        )
    )


def _critic_mask(item: TrainRow, mask_column: str | None) -> UInt8:
    return item.mask if mask_column is None else item.mask & item.columns[mask_column].astype(np.uint8)
