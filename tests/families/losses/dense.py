"""The oracles of divergences, score centering and distillation: plain floats for values, and dense float64 autograd
over the whole vocabulary for gradients. They share nothing with the kernels.

A *mutant* is a plausible mistake; the tests show that comparing with the oracle tells each of them from the truth.
"""

import math
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor


class Mutant(Enum):
    """Mistakes that the comparison must find."""

    MEAN_IN_PLACE_OF_SUM = auto()
    TEMPERATURE_LEFT_OUT = auto()
    DIRECTION_SWAPPED = auto()
    BETA_SWAPPED = auto()
    TAIL_LEFT_OUT = auto()
    NOT_RENORMALIZED = auto()
    RESTRICTED_IN_PLACE_OF_SAMPLED = auto()
    SAMPLED_WITHOUT_SCORE = auto()
    CAP_LEFT_OUT = auto()
    CAP_OFF = auto()
    WEIGHT_NOT_DETACHED = auto()
    TOKEN_IN_PLACE_OF_SEQUENCE = auto()
    SAMPLE_WEIGHT_LEFT_OUT = auto()
    LOSS_MASK_IGNORED = auto()
    UPPER_BOUND_LEFT_OUT = auto()
    CLAMP_IN_PLACE_OF_MASK = auto()
    TAIL_RATIO_LEFT_OUT = auto()
    COEFFICIENT_NOT_DETACHED = auto()


def plain_divergence(student: Sequence[float], teacher: Sequence[float], kind: str, beta: float = 0.5) -> float:
    """From two lists of log-probs, in plain floats."""

    def kl(of: Sequence[float], against: Sequence[float]) -> float:
        return math.fsum(math.exp(a) * (a - b) for a, b in zip(of, against, strict=True) if math.exp(a) > 0)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    mixture = [math.log(beta * math.exp(t) + (1 - beta) * math.exp(s)) for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def dense_divergence(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """[T] from log-probs float64 [T, n]; a probability of 0 contributes 0."""

    def kl(of: Tensor, against: Tensor) -> Tensor:
        return torch.where(of.exp() > 0, of.exp() * (of - against), 0).sum(-1)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def over_ids(log_probs: Tensor, ids: Tensor, estimator: str, mutant: Mutant | None = None) -> Tensor:
    """Log-probs [T, V] at ids [T, K]: renormalised [T, K], or with a tail [T, K + 1]."""
    head = log_probs.gather(1, ids)
    if mutant is Mutant.NOT_RENORMALIZED:
        return head
    if estimator == "renormalized" or mutant is Mutant.TAIL_LEFT_OUT:
        return head - head.logsumexp(-1, keepdim=True)
    rest = log_probs.exp().scatter(1, ids, 0).sum(-1, keepdim=True)
    return torch.cat([head, rest.log()], -1)


def weight_of(ratio: Tensor, form: str, lower: float, upper: float, mutant: Mutant | None = None) -> Tensor:
    """f(p/q)."""
    if form == "none":
        return torch.ones_like(ratio)
    if mutant is Mutant.UPPER_BOUND_LEFT_OUT:
        upper = math.inf
    if form == "truncated":
        return ratio.clamp(max=upper)
    if mutant is Mutant.CLAMP_IN_PLACE_OF_MASK:
        return ratio.clamp(lower, upper)
    inside = (ratio > lower) & (ratio < upper)
    return torch.where(inside, ratio, 0)


def centering_term(
    log_p: Tensor,
    head_ids: Tensor,
    head_log_q: Tensor,
    advantages: Tensor,
    form: str,
    *,
    lower: float = 0.5,
    upper: float = 2.0,
    floor: float = 1e-6,
    mutant: Mutant | None = None,
) -> Tensor:
    """[T]: A sum_H sg[q f(p/q) - alpha p] log p from log-probs [T, V] and the sampler's head [T, K]."""
    head = log_p.gather(1, head_ids)
    q, p = head_log_q.exp(), head if mutant is Mutant.COEFFICIENT_NOT_DETACHED else head.detach()
    p = p.exp()
    rho = (1 - q.sum(-1)).clamp(min=floor) / (1 - p.sum(-1)).clamp(min=floor)
    if mutant is Mutant.TAIL_RATIO_LEFT_OUT:
        rho = torch.ones_like(rho)
    alpha = rho * weight_of(1 / rho, form, lower, upper, mutant)
    coefficients = q * weight_of(p / q, form, lower, upper, mutant) - alpha[:, None] * p
    return advantages * (coefficients * head).sum(-1)
