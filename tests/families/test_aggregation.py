"""The four aggregations against their formulas, and everything they refuse."""

import math
import random

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.aggregation import Aggregation, AggregationMode, AggregationOptions, row_weights
from pydantic import JsonValue

ROLLOUTS = ["a", "a", "a", "b"]
"""Three rows of one trajectory and one of another."""
VALUES = np.arange(1.0, 13.0).reshape(4, 3)


def total(aggregation: Aggregation, groups: list[str]) -> float:
    weights = row_weights(aggregation, rollout_ids=ROLLOUTS, group_ids=groups, trained_tokens=[3, 3, 3, 3])
    return float((weights * VALUES.sum(-1)).sum())


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation(AggregationMode.SAMPLE_MEAN), 8.0),
        (Aggregation(AggregationMode.TOKEN_MEAN), 6.5),
        (Aggregation(AggregationMode.PROMPT_MEAN, group_size=1), 8.0),
        (Aggregation(AggregationMode.PROMPT_MEAN, group_size=2), 6.5),
        (Aggregation(AggregationMode.CONSTANT, divisor=4.0), 78 / 8),
    ],
)
def test_four_rows_of_two_rollouts_give_the_known_values(aggregation: Aggregation, expected: float) -> None:
    groups = ROLLOUTS if aggregation.group_size == 1 else ["g"] * 4
    assert total(aggregation, groups) == pytest.approx(expected, rel=1e-15)


def by_formula(mode: AggregationMode, steps: list[tuple[str, str, list[float], list[int]]], divisor: float) -> float:
    """The table of the specification, read rollout by rollout: (rollout, group, losses, mask) rows."""

    def ratio(of: list[tuple[str, str, list[float], list[int]]]) -> float:
        tokens = sum(sum(mask) for *_, mask in of)
        value = math.fsum(x * m for *_, losses, mask in of for x, m in zip(losses, mask, strict=True))
        return value / tokens if tokens else 0.0

    rollouts = sorted({row[0] for row in steps})
    groups = sorted({row[1] for row in steps})
    if mode is AggregationMode.SAMPLE_MEAN:
        return math.fsum(ratio([row for row in steps if row[0] == i]) for i in rollouts) / len(rollouts)
    if mode is AggregationMode.TOKEN_MEAN:
        return ratio(steps)
    if mode is AggregationMode.PROMPT_MEAN:
        return math.fsum(ratio([row for row in steps if row[1] == g]) for g in groups) / len(groups)
    value = math.fsum(x * m for *_, losses, mask in steps for x, m in zip(losses, mask, strict=True))
    return value / (divisor * len(rollouts))


@pytest.mark.parametrize("mode", AggregationMode)
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_the_formula_with_unequal_lengths_and_empty_masks(mode: AggregationMode, seed: int) -> None:
    rng = random.Random(seed)
    steps = []
    for rollout in range(6):
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(1, 5)
            mask = [0] * length if rollout == 2 else [rng.randint(0, 1) for _ in range(length)]
            steps.append((f"i{rollout}", f"g{rollout // 2}", [rng.gauss(0, 1) for _ in range(length)], mask))
    rng.shuffle(steps)
    weights = row_weights(
        Aggregation(mode, divisor=7.0, group_size=2),
        rollout_ids=[row[0] for row in steps],
        group_ids=[row[1] for row in steps],
        trained_tokens=[sum(row[3]) for row in steps],
    )
    value = math.fsum(
        w * x * m
        for w, (*_, losses, mask) in zip(weights, steps, strict=True)
        for x, m in zip(losses, mask, strict=True)
    )
    assert value == pytest.approx(by_formula(mode, steps, 7.0), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("mode", AggregationMode)
def test_a_step_without_a_trained_token_has_weights_of_zero(mode: AggregationMode) -> None:
    weights = row_weights(
        Aggregation(mode, divisor=1.0, group_size=2),
        rollout_ids=["a", "b"],
        group_ids=["g", "g"],
        trained_tokens=[0, 0],
    )
    assert weights.tolist() == [0.0, 0.0]


def test_a_rollout_without_trained_tokens_still_counts() -> None:
    weights = row_weights(Aggregation(), rollout_ids=["a", "b"], group_ids=["g", "g"], trained_tokens=[4, 0])
    assert weights.tolist() == [1 / 8, 0.0]


def test_prompt_mean_counts_rollouts_of_every_group_by_id() -> None:
    with pytest.raises(InvalidInput, match=r"needs 4 rollouts in every group of a step, got 3 in group a"):
        row_weights(
            Aggregation(AggregationMode.PROMPT_MEAN, group_size=4),
            rollout_ids=[f"i{n}" for n in range(8)],
            group_ids=["a"] * 3 + ["b"] * 5,
            trained_tokens=[1] * 8,
        )


def test_prompt_mean_refuses_a_rollout_in_two_groups() -> None:
    with pytest.raises(InvalidInput, match="rollout i is in groups a and b"):
        row_weights(
            Aggregation(AggregationMode.PROMPT_MEAN, group_size=1),
            rollout_ids=["i", "i"],
            group_ids=["a", "b"],
            trained_tokens=[1, 1],
        )


def test_regularizers_are_reduced_per_token_only_under_token_mean() -> None:
    modes = {mode: Aggregation(mode, 1.0, 2).of_regularizers.mode for mode in AggregationMode}
    assert modes.pop(AggregationMode.TOKEN_MEAN) is AggregationMode.TOKEN_MEAN
    assert set(modes.values()) == {AggregationMode.SAMPLE_MEAN}


def test_the_legacy_flag_means_token_mean() -> None:
    options = AggregationOptions.from_mapping("demo", {"calculate_per_token_loss": True})
    assert options.aggregation() == Aggregation(AggregationMode.TOKEN_MEAN)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_aggregation": "constant"}, "needs loss_aggregation_divisor"),
        ({"loss_aggregation": "constant", "loss_aggregation_divisor": 0}, "greater than 0"),
        ({"loss_aggregation_divisor": 100}, "only for loss_aggregation constant, got sample_mean"),
        ({"loss_aggregation": "token_mean", "loss_aggregation_divisor": 100}, "only for loss_aggregation constant"),
        ({"calculate_per_token_loss": True, "loss_aggregation": "prompt_mean"}, "contradicts loss_aggregation prompt_"),
        (
            {"calculate_per_token_loss": True, "loss_aggregation": "constant", "loss_aggregation_divisor": 2},
            "contradicts loss_aggregation constant",
        ),
        ({"loss_aggregation": "median"}, "sample_mean"),
    ],
)
def test_settings_that_would_silently_use_another_denominator_are_refused(
    values: dict[str, JsonValue], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        AggregationOptions.from_mapping("demo", values)
