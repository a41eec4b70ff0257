"""Advantages over action tokens: the known values, observations that might as well not be there, and NaN in them."""

import math

import numpy as np
import pytest
from atoll.families.sao.gae import length_adaptive_lambda, skip_observation_gae


def plain_gae(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    """A_t as the sum of its definition, not as the recursion: sum_k (gamma lambda)^k delta_{t+k}."""
    after = [*values[1:], 0.0]
    deltas = [gamma * n - v for v, n in zip(values, after, strict=True)]
    deltas[-1] += reward
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def test_the_known_values() -> None:
    first = skip_observation_gae([0.1, 0.2, 0.3], [1, 1, 1], 1.0, gamma=0.9, lam=0.8)
    assert first.advantages.tolist() == pytest.approx([0.49328, 0.574, 0.7], abs=1e-12)
    second = skip_observation_gae([0.4, 0.5], [1, 1], -1.0, gamma=0.9, lam=0.8)
    assert second.advantages.tolist() == pytest.approx([-1.03, -1.5], abs=1e-12)
    assert second.returns.tolist() == pytest.approx([-0.63, -1.0], abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_observations_are_skipped_as_if_they_were_not_there(gamma: float, lam: float) -> None:
    mask = [0, 1, 1, 0, 0, 1, 0]
    values = [9.0, 0.3, -0.2, 7.0, -8.0, 0.6, 5.0]
    actions = [value for value, action in zip(values, mask, strict=True) if action]
    expected = plain_gae(actions, 2.0, gamma, lam)
    got = skip_observation_gae(values, mask, 2.0, gamma=gamma, lam=lam)
    assert got.advantages[np.asarray(mask) == 1].tolist() == pytest.approx(expected, rel=1e-12)
    assert got.returns[np.asarray(mask) == 1].tolist() == pytest.approx(
        [a + v for a, v in zip(expected, actions, strict=True)], rel=1e-12
    )
    assert got.advantages[np.asarray(mask) == 0].tolist() == [0.0] * 4
    assert got.returns[np.asarray(mask) == 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_the_value_of_an_observation_is_never_read(poison: float) -> None:
    clean = skip_observation_gae([0.1, 0.0, 0.3], [1, 0, 1], 1.0, gamma=0.9, lam=0.8)
    got = skip_observation_gae([0.1, poison, 0.3], [1, 0, 1], 1.0, gamma=0.9, lam=0.8)
    assert got.advantages.tolist() == clean.advantages.tolist()
    assert got.returns.tolist() == clean.returns.tolist()


def test_one_token_and_no_action_at_all() -> None:
    assert skip_observation_gae([0.25], [1], 1.0, gamma=0.9, lam=0.8).advantages.tolist() == [0.75]
    assert skip_observation_gae([0.25, 0.5], [0, 0], 1.0, gamma=1, lam=1).advantages.tolist() == [0.0, 0.0]


def test_with_lambda_one_and_gamma_one_every_return_is_the_reward() -> None:
    got = skip_observation_gae([0.4, -3.0, 8.0], [1, 1, 1], 0.5, gamma=1, lam=1)
    assert got.returns.tolist() == pytest.approx([0.5] * 3, abs=1e-12)


def test_values_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a value for each"):
        skip_observation_gae([0.1], [1, 1], 1.0, gamma=1, lam=1)


@pytest.mark.parametrize(
    ("length", "alpha", "expected"),
    [(1, 1.5, 1 / 3), (10, 1.5, 14 / 15), (1, 1.0, 0.0), (1, 0.5, 0.0), (100, 2.0, 0.995)],
)
def test_the_length_adaptive_lambda_is_clamped(length: int, alpha: float, expected: float) -> None:
    assert length_adaptive_lambda(length, alpha) == pytest.approx(expected, abs=1e-15)
