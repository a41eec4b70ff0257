"""Entropic advantages: the temperature by its definition, hand-computed groups, and rewards of any scale."""

import math
import random
from fractions import Fraction

import pytest
from atoll.families.tttd.entropic import entropic_advantages, entropic_beta


def kl(rewards: list[float], beta: float) -> float:
    """KL(softmax(beta r) || uniform) in plain floats."""
    top = max(rewards)
    weights = [math.exp(beta * (r - top)) for r in rewards]
    total = math.fsum(weights)
    return math.fsum(w / total * math.log(w / total * len(rewards)) for w in weights if w > 0)


def plain(rewards: list[float], mutant: str = "") -> list[float]:
    """A_j from a beta found by another search: a fine descent through powers of ten."""
    goal = math.log(2) if mutant == "goal not bounded by ln K" else min(math.log(2), math.log(len(rewards)) - 1e-6)
    beta = 0.0
    for digit in range(6, -13, -1):
        for _ in range(10):
            if kl(rewards, beta + 10.0**digit) < goal and beta < 1e6:
                beta += 10.0**digit
    weights = [math.exp(beta * (r - max(rewards))) for r in rewards]
    if mutant == "mean of all":
        return [w / (math.fsum(weights) / len(weights) + 1e-12) - 1 for w in weights]
    others = [math.fsum(weights[:j] + weights[j + 1 :]) / (len(weights) - 1) for j in range(len(weights))]
    return [w / (o + 1e-12) - (0 if mutant == "without the one" else 1) for w, o in zip(weights, others, strict=True)]


GROUPS = [
    [0.0, 1.0, 0.5],
    [1.0, 2.0, 3.0, 4.0],
    [-5.0, 0.1, 0.2, 0.3, 0.25],
    [1e-3, 2e-3, 1.5e-3, 0.0],
    [100.0, 300.0, 250.0],
    [0.0, 0.0, 0.0, 1.0],
    [1.0, 1.0, 0.0],
]


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_advantages_equal_the_oracle(rewards: list[float]) -> None:
    assert entropic_advantages(rewards).tolist() == pytest.approx(plain(rewards), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mutant", ["mean of all", "without the one"])
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    assert entropic_advantages(GROUPS[1]).tolist() != pytest.approx(plain(GROUPS[1], mutant), rel=1e-6, abs=1e-9)


def test_a_group_whose_best_are_several_never_reaches_the_goal_and_takes_the_largest_beta() -> None:
    # Two of three share the best reward: KL tends to ln 1.5 < ln 2.
    beta = entropic_beta([1.0, 1.0, 0.0])
    assert beta == 2.0**20
    assert entropic_advantages([1.0, 1.0, 0.0]).tolist() == pytest.approx([1.0, 1.0, -1.0])


@pytest.mark.parametrize("rewards", GROUPS[:6], ids=str)
def test_beta_is_where_the_divergence_reaches_its_goal(rewards: list[float]) -> None:
    beta = entropic_beta(rewards)
    goal = min(math.log(2), math.log(len(rewards)) - 1e-6)
    assert kl(rewards, beta) == pytest.approx(goal, abs=1e-9)
    assert kl(rewards, beta * (1 + 1e-6)) >= goal


def test_a_group_by_hand() -> None:
    # One of three is best and the other two are alike: with x = e^-beta, KL = ln 2 is solved by x.
    beta = entropic_beta([1.0, 0.0, 0.0])
    x = math.exp(-beta)
    first, second, third = entropic_advantages([1.0, 0.0, 0.0]).tolist()
    assert first == pytest.approx(1 / x - 1, rel=1e-9)
    assert second == third == pytest.approx(x / ((1 + x) / 2) - 1, rel=1e-9)


@pytest.mark.parametrize("rewards", [[], [0.5], [0.5, 0.5, 0.5], [0.0, -0.0]], ids=str)
def test_one_rollout_or_equal_rewards_have_advantages_of_exactly_zero(rewards: list[float]) -> None:
    assert entropic_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_scale_and_offset_of_the_rewards_do_not_matter() -> None:
    rewards = [0.25, 1.0, 0.5, 0.0]
    base = entropic_advantages(rewards).tolist()
    assert entropic_advantages([8 * r + 3 for r in rewards]).tolist() == pytest.approx(base, rel=1e-6)


def test_two_rollouts_reach_ten_million_and_a_clip_bounds_them() -> None:
    best, worst = entropic_advantages([1.0, 0.0]).tolist()
    assert best > 1e6
    assert worst == pytest.approx(-1)
    assert entropic_advantages([1.0, 0.0], clip=5.0).tolist() == pytest.approx([5.0, worst])


def test_the_others_are_summed_and_not_subtracted_from_the_whole() -> None:
    rewards = [1.0, 0.0]
    weight = math.exp(-entropic_beta(rewards))
    exact = Fraction(1) / (Fraction(weight) + Fraction(1e-12)) - 1
    assert entropic_advantages(rewards)[0] == pytest.approx(float(exact), rel=1e-12)
    by_difference = 1 / ((1 + weight) - 1 + 1e-12) - 1
    assert by_difference != pytest.approx(float(exact), rel=1e-12)


def test_extreme_rewards_stay_finite() -> None:
    rng = random.Random(3)
    for scale in (1e-12, 1e-3, 1.0, 1e6, 1e150):
        values = entropic_advantages([scale * rng.uniform(-1, 1) for _ in range(6)]).tolist()
        assert all(math.isfinite(value) for value in values)
