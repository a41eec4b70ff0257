"""The critic's optimizer steps and the share of the returns' variance that its values explain."""

import statistics

import numpy as np
import pytest
from atoll.families.critic import critic_steps, explained_variance
from atoll.families.steps import RowWeights, TrainRow, TrainStep

from tests.families.rows import make_row


def item(name: str, values: list[float], returns: list[float], mask: list[int], actions: list[int]) -> TrainRow:
    return TrainRow(
        make_row(name, length=len(values)),
        np.asarray(mask, dtype=np.uint8),
        RowWeights(9.0, 9.0, 9.0),
        values=np.asarray(values, dtype=np.float32),
        returns=np.asarray(returns, dtype=np.float32),
        columns={"action_mask": np.asarray(actions, dtype=np.uint8)},
    )


STEPS = (
    TrainStep((item("a", [0.5, 9.0, 0.25], [1.0, 0.0, 2.0], [1, 1, 1], [1, 0, 1]),)),
    TrainStep((item("b", [0.0, 8.0], [-1.0, 7.0], [1, 0], [1, 1]),)),
)


def test_the_critic_trains_where_both_masks_say_so_and_by_the_mean_of_each_rollout() -> None:
    first, second = critic_steps(STEPS, "action_mask")
    assert first.rows[0].mask.tolist() == [1, 0, 1]
    assert first.rows[0].weights == RowWeights(0.5, 0.5, 0.5)
    assert second.rows[0].mask.tolist() == [1, 0]
    assert second.rows[0].weights.policy == 1.0
    assert critic_steps(STEPS, None)[0].rows[0].mask.tolist() == [1, 1, 1]


def test_explained_variance_is_of_all_trained_tokens_together() -> None:
    residuals, returns = [0.5, 1.75, -1.0], [1.0, 2.0, -1.0]
    expected = 1 - statistics.pvariance(residuals) / statistics.pvariance(returns)
    assert explained_variance(critic_steps(STEPS, "action_mask")) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("returns", "is_there"), [([1.0, 1.0], False), ([1.0, 1.0001], False), ([1.0, 1.001], True), ([5.0, 5.0], False)]
)
def test_it_is_absent_where_the_returns_hardly_vary(returns: list[float], is_there: bool) -> None:
    found = explained_variance([TrainStep((item("a", [0.0, 0.1], returns, [1, 1], [1, 1]),))])
    assert (found is not None) is is_there


def test_nothing_trained_explains_nothing() -> None:
    assert explained_variance([TrainStep((item("a", [0.0], [1.0], [0], [1]),))]) is None
    assert explained_variance([]) is None


def test_rows_without_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="sample a has no values and returns"):
        explained_variance([TrainStep((TrainRow(make_row("a"), np.ones(3, np.uint8), RowWeights(1, 1, 1)),))])
