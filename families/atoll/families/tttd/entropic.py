"""Entropic advantages of one group of rewards (TTT-Discover, arXiv 2601.16175). Free of torch; float64 throughout.

beta is where softmax(beta r) has left the uniform distribution by a fixed KL, so that the weight of the best rollout
does not depend on the scale of the rewards:

    goal = min(ln 2, ln K - 1e-6)        KL(softmax(beta r) || uniform) = goal
    e_j = exp(beta (r_j - max r))        A_j = e_j / (mean of the others' e + 1e-12) - 1
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

MAX_BETA = 1e6
BISECTIONS = 60
GOAL_MARGIN = 1e-6
"""ln K is reached by no finite beta."""
MEAN_EPSILON = 1e-12


def entropic_advantages(rewards: Sequence[float], *, clip: float = 0.0) -> Float64:
    """Advantages [K]; exactly 0 for a single rollout or equal rewards. `clip` above 0 is their upper bound."""
    values = np.asarray(rewards, dtype=np.float64)
    if is_constant(rewards):
        return np.zeros_like(values)
    below_best = values - values.max()
    weights = np.exp(entropic_beta(rewards) * below_best)
    # The others are summed: their sum as a difference from the whole would cancel where one weight is nearly all.
    others = np.where(np.eye(len(values), dtype=bool), 0.0, weights).sum(axis=1) / (len(values) - 1)
    advantages: Float64 = weights / (others + MEAN_EPSILON) - 1
    return np.minimum(advantages, clip) if clip > 0 else advantages


def entropic_beta(rewards: Sequence[float]) -> float:
    """beta for rewards that are not all equal: doubled from 1, then bisected, the upper end."""
    values = np.asarray(rewards, dtype=np.float64)
    below_best = values - values.max()
    goal = min(math.log(2), math.log(len(values)) - GOAL_MARGIN)
    upper = 1.0
    while kl_to_uniform(upper * below_best) < goal and upper < MAX_BETA:
        upper *= 2
    if kl_to_uniform(upper * below_best) < goal:
        return upper
    lower = 0.0
    for _ in range(BISECTIONS):
        middle = (lower + upper) / 2
        if kl_to_uniform(middle * below_best) < goal:
            lower = middle
        else:
            upper = middle
    return upper


def kl_to_uniform(logits: Float64) -> float:
    """KL(softmax(logits) || uniform) in nats, for logits [K] of which the largest is 0."""
    weights = np.exp(logits)
    p = weights / weights.sum()
    log_p = np.where(p > 0, logits, 0.0) - math.log(weights.sum())
    return float((p * log_p).sum()) + math.log(len(logits))


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing: one rollout, or equal rewards."""
    return len(set(rewards)) < 2
