"""Generalised advantage estimation (arXiv 1506.02438) over the tokens that a policy generated. Free of torch; float64.

Tokens that the environment inserted are skipped as if they were not there: the value after the last token of one turn
is that of the first token of the next.

    delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lambda A_next        return_t = A_t + V_t
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


class Advantages(NamedTuple):
    """Both float64 [R], exactly 0 on observations."""

    advantages: Float64
    returns: Float64


def skip_observation_gae(
    values: npt.ArrayLike, action_mask: npt.ArrayLike, reward: float, *, gamma: float, lam: float
) -> Advantages:
    """Advantages and returns of one response. `values` [R] of the state before each token, `action_mask` [R] 1 on
    generated tokens. The reward falls on the last action token; the value after it is 0.

    Values of observations are not read. Raises: ValueError when the two differ in length.
    """
    every = np.asarray(values, dtype=np.float64)
    actions = np.flatnonzero(np.asarray(action_mask))
    if every.shape != np.shape(action_mask):
        raise ValueError(f"expected a value for each of {np.shape(action_mask)} tokens, got {every.shape}")
    result = Advantages(np.zeros_like(every), np.zeros_like(every))
    advantage, next_value, earned = 0.0, 0.0, reward
    for t in actions[::-1].tolist():
        delta = earned + gamma * next_value - every[t]
        advantage = delta + gamma * lam * advantage
        result.advantages[t] = advantage
        result.returns[t] = advantage + every[t]
        next_value, earned = every[t], 0.0
    return result


def length_adaptive_lambda(response_length: int, alpha: float) -> float:
    """1 - 1 / (alpha n), clamped to [0, 1]; n counts observations too."""
    return min(1.0, max(0.0, 1 - 1 / (alpha * response_length)))
