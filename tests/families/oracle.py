"""The stock policy loss and its gradient, from the equations, in plain Python floats: shares nothing with the code.

A *mutant* is a plausible mistake; the tests show that comparing with the oracle tells each of them from the truth.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto


class Mutant(Enum):
    """Mistakes that the comparison must find."""

    UPPER_BOUND_LEFT_OUT = auto()
    LOWER_BOUND_LEFT_OUT = auto()
    UPPER_BOUND_OFF = auto()
    MASK_IN_PLACE_OF_CLIP = auto()
    MIN_IN_PLACE_OF_MAX = auto()
    MEAN_IN_PLACE_OF_SUM = auto()
    DUAL_CLIP_FOR_EVERY_SIGN = auto()
    TEMPERATURE_LEFT_OUT = auto()
    TEMPERATURE_NOT_IN_GRADIENT = auto()
    CAP_LEFT_OUT = auto()
    KL_REVERSED = auto()
    ENTROPY_SIGN = auto()
    LOSS_MASK_IGNORED = auto()


@dataclass(frozen=True)
class Knobs:
    """Example: Knobs(eps=0.2, eps_high=0.3, dual=1.5, cap=2.0, kl="k3", kl_coef=0.1, entropy_coef=0.01)"""

    eps: float = 0.2
    eps_high: float = 0.2
    dual: float | None = None
    cap: float | None = None
    rollout_is_old: bool = False
    kl: str = "k1"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class Token:
    """One response token. `old` None means the current log-prob, without gradient."""

    logits: list[float]
    target: int
    temperature: float
    advantage: float
    recorded: float
    reference: float
    weight: float
    regularizer_weight: float
    mask: int = 1
    old: float | None = None


@dataclass
class Outcome:
    """loss and gradient [tokens][V]"""

    loss: float = 0.0
    gradient: list[list[float]] = field(default_factory=list)


def softmax(logits: list[float], temperature: float) -> tuple[float, list[float]]:
    """log-sum-exp of logits / T, and the probabilities."""
    z = [x / temperature for x in logits]
    top = max(z)
    total = math.fsum(math.exp(v - top) for v in z)
    lse = top + math.log(total)
    return lse, [math.exp(v - lse) for v in z]


def log_prob(logits: list[float], target: int, temperature: float) -> float:
    return logits[target] / temperature - softmax(logits, temperature)[0]


def entropy(logits: list[float], temperature: float) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits, temperature)[1] if p > 0)


def policy_step(tokens: list[Token], knobs: Knobs, mutant: Mutant | None = None) -> Outcome:
    """Loss and gradient of a whole step."""
    outcome = Outcome()
    for token in tokens:
        temperature = 1.0 if mutant is Mutant.TEMPERATURE_LEFT_OUT else token.temperature
        _, p = softmax(token.logits, temperature)
        level = log_prob(token.logits, token.target, temperature)
        value, slope = _policy_term(token, level, knobs, mutant)
        value, slope = token.weight * value, token.weight * slope
        kl, kl_slope = _kl(level - token.reference, knobs.kl, mutant)
        value += token.regularizer_weight * knobs.kl_coef * kl
        slope += token.regularizer_weight * knobs.kl_coef * kl_slope
        spread = entropy(token.logits, temperature)
        of_entropy = -token.regularizer_weight * knobs.entropy_coef * (-1 if mutant is Mutant.ENTROPY_SIGN else 1)
        value += of_entropy * spread
        scale = 1.0 if mutant is Mutant.TEMPERATURE_NOT_IN_GRADIENT else temperature
        kept = 1 if mutant is Mutant.LOSS_MASK_IGNORED else token.mask
        outcome.loss += kept * value
        outcome.gradient.append(
            [
                kept
                * (slope * ((u == token.target) - q) - of_entropy * (q * (math.log(q) + spread) if q > 0 else 0.0))
                / scale
                for u, q in enumerate(p)
            ]
        )
    if mutant is Mutant.MEAN_IN_PLACE_OF_SUM:
        outcome.loss /= len(tokens)
        outcome.gradient = [[g / len(tokens) for g in row] for row in outcome.gradient]
    return outcome


def _policy_term(token: Token, level: float, knobs: Knobs, mutant: Mutant | None) -> tuple[float, float]:
    """max(-A r, -A clip(r)), dual clip, truncated importance weight; and d/dl of it."""
    old = token.recorded if knobs.rollout_is_old else (level if token.old is None else token.old)
    ratio, advantage = math.exp(level - old), token.advantage
    low, high = 1 - knobs.eps, 1 + knobs.eps_high
    if mutant is Mutant.UPPER_BOUND_LEFT_OUT:
        high = math.inf
    if mutant is Mutant.UPPER_BOUND_OFF:
        high = 1 + 1.05 * knobs.eps_high
    if mutant is Mutant.LOWER_BOUND_LEFT_OUT:
        low = 0.0
    unclipped, clipped = -advantage * ratio, -advantage * min(max(ratio, low), high)
    worse = clipped < unclipped if mutant is Mutant.MIN_IN_PLACE_OF_MAX else clipped > unclipped
    value, slope = (clipped, 0.0) if worse else (unclipped, -advantage * ratio)
    if mutant is Mutant.MASK_IN_PLACE_OF_CLIP and worse:
        value = 0.0
    if knobs.dual is not None and (advantage < 0 or mutant is Mutant.DUAL_CLIP_FOR_EVERY_SIGN):
        ceiling = -knobs.dual * advantage
        if ceiling < value:
            value, slope = ceiling, 0.0
    if knobs.cap is not None:
        weight = math.exp(old - token.recorded)
        weight = weight if mutant is Mutant.CAP_LEFT_OUT else min(weight, knobs.cap)
        value, slope = value * weight, slope * weight
    return value, slope


def _kl(d: float, kind: str, mutant: Mutant | None) -> tuple[float, float]:
    """An estimator of KL(p || p_ref) at d = l - l_ref, and d/dl of it."""
    sign = 1.0
    if mutant is Mutant.KL_REVERSED:
        d, sign = -d, -1.0
    if kind == "k1":
        return d, sign
    if kind == "k2":
        return d * d / 2, sign * d
    k3, slope = math.exp(-d) - 1 + d, 1 - math.exp(-d)
    if kind == "low_var_kl" and k3 > 10:
        return 10.0, 0.0
    return k3, sign * slope
