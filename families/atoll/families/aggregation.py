"""Aggregation of the policy loss: the weight of every row, a whole-step fact in float64.

Every mode is `loss = sum over rows of w_row * sum over tokens of loss_t * m_t`, so micro-batches and ranks only add
up partial sums and any cut of a step gives the same value and the same gradient. With N rollouts, M_i trained tokens
of rollout i (all of its rows), P prompt groups, M_g trained tokens of group g, divisor L:

| mode | w_row |
|---|---|
| sample_mean | 1 / (N M_i) |
| token_mean | 1 / sum_i M_i |
| prompt_mean | 1 / (P M_g) |
| constant | 1 / (L N) |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt
from atoll.families.options import FamilyOptions
from atoll.families.refusals import batch_refused
from pydantic import Field, model_validator

Float64 = npt.NDArray[np.float64]


class AggregationMode(StrEnum):
    """How token losses become the loss of a step."""

    SAMPLE_MEAN = "sample_mean"
    """The mean over rollouts of each rollout's mean."""
    TOKEN_MEAN = "token_mean"
    """The mean over all trained tokens."""
    PROMPT_MEAN = "prompt_mean"
    """The mean over prompt groups of each group's token mean."""
    CONSTANT = "constant"
    """The sum over tokens, divided by a constant and the number of rollouts."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A mode with what it needs. Example: `Aggregation(AggregationMode.PROMPT_MEAN, group_size=8)`."""

    mode: AggregationMode = AggregationMode.SAMPLE_MEAN
    divisor: float | None = None
    """L of `constant`."""
    group_size: int | None = None
    """G of `prompt_mean`: rollouts per prompt group."""

    @property
    def of_regularizers(self) -> "Aggregation":
        """How entropy and KL terms are reduced: per token under `token_mean`, else `sample_mean`."""
        mode = AggregationMode.TOKEN_MEAN if self.mode is AggregationMode.TOKEN_MEAN else AggregationMode.SAMPLE_MEAN
        return Aggregation(mode)


class AggregationOptions(FamilyOptions):
    """The options of a family that lets its user choose the aggregation."""

    loss_aggregation: AggregationMode = AggregationMode.SAMPLE_MEAN
    loss_aggregation_divisor: float | None = Field(default=None, gt=0)
    calculate_per_token_loss: bool = False
    """Legacy spelling of `loss_aggregation: token_mean`."""

    @model_validator(mode="after")
    def _consistent_aggregation(self) -> Self:
        mode = self.loss_aggregation
        if mode is AggregationMode.CONSTANT and self.loss_aggregation_divisor is None:
            raise ValueError("loss_aggregation constant needs loss_aggregation_divisor, a number above 0")
        if mode is not AggregationMode.CONSTANT and self.loss_aggregation_divisor is not None:
            raise ValueError(
                f"loss_aggregation_divisor {self.loss_aggregation_divisor:g} is only for loss_aggregation constant, "
                f"got {mode.value}; leave it out"
            )
        if self.calculate_per_token_loss and mode in (AggregationMode.PROMPT_MEAN, AggregationMode.CONSTANT):
            raise ValueError(
                f"calculate_per_token_loss means token_mean and contradicts loss_aggregation {mode.value}; leave it out"
            )
        return self

    def aggregation(self, *, group_size: int | None = None) -> Aggregation:
        """The aggregation these options ask for; `group_size` is G of `prompt_mean`."""
        mode = AggregationMode.TOKEN_MEAN if self.calculate_per_token_loss else self.loss_aggregation
        return Aggregation(mode, self.loss_aggregation_divisor, group_size)


def row_weights(
    aggregation: Aggregation,
    *,
    rollout_ids: Sequence[str],
    group_ids: Sequence[str],
    trained_tokens: Sequence[int],
) -> Float64:
    """Returns w [rows] for the rows of one optimizer step.

    `trained_tokens` holds the sum of each row's effective mask. A rollout without a trained token weighs 0 and still
    counts in N. Raises: InvalidInput for `prompt_mean` when a group has not exactly G rollouts.
    """
    counts = np.asarray(trained_tokens, dtype=np.float64)
    rollout_index, rollouts = _index(rollout_ids)
    match aggregation.mode:
        case AggregationMode.SAMPLE_MEAN:
            denominators = rollouts * np.bincount(rollout_index, counts, rollouts)[rollout_index]
        case AggregationMode.TOKEN_MEAN:
            denominators = np.full(len(counts), counts.sum())
        case AggregationMode.PROMPT_MEAN:
            _check_groups(aggregation, rollout_ids, group_ids)
            group_index, groups = _index(group_ids)
            denominators = groups * np.bincount(group_index, counts, groups)[group_index]
        case AggregationMode.CONSTANT:
            if aggregation.divisor is None:
                raise ValueError("aggregation constant needs a divisor")
            denominators = np.full(len(counts), aggregation.divisor * rollouts)
    return np.divide(1.0, denominators, out=np.zeros_like(counts), where=(denominators > 0) & (counts > 0))


def _index(names: Sequence[str]) -> tuple[npt.NDArray[np.int64], int]:
    position = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return np.asarray([position[name] for name in names], dtype=np.int64), len(position)


def _check_groups(aggregation: Aggregation, rollout_ids: Sequence[str], group_ids: Sequence[str]) -> None:
    if aggregation.group_size is None:
        raise ValueError("aggregation prompt_mean needs the group size")
    members: dict[str, set[str]] = {}
    group_of: dict[str, str] = {}
    for rollout, group in zip(rollout_ids, group_ids, strict=True):
        members.setdefault(group, set()).add(rollout)
        if group_of.setdefault(rollout, group) != group:
            raise batch_refused(f"rollout {rollout} is in groups {group_of[rollout]} and {group}", field="group_id")
    for group, rollouts in members.items():
        if len(rollouts) != aggregation.group_size:
            raise batch_refused(
                f"prompt_mean needs {aggregation.group_size} rollouts in every group of a step, "
                f"got {len(rollouts)} in group {group}",
                field="group_id",
            )
