"""Policy losses as a family describes its own: plain facts, so that no loss names a family."""

from dataclasses import dataclass
from enum import StrEnum


class OldPolicy(StrEnum):
    """What the ratio is taken against."""

    RECOMPUTED = "recomputed"
    """The trainer's own log-probs before the job's first optimizer step."""
    ROLLOUT = "rollout"
    """The log-probs that the engine recorded."""


class KlKind(StrEnum):
    """Estimators of KL(p || p_ref) at the sampled token, with d = l - l_ref."""

    K1 = "k1"
    """d"""
    K2 = "k2"
    """d^2 / 2"""
    K3 = "k3"
    """e^-d - 1 + d"""
    LOW_VAR_KL = "low_var_kl"
    """k3 clamped to [-10, 10]"""


@dataclass(frozen=True, slots=True)
class PolicyLossSpec:
    """Knobs of the stock policy loss. Example: `PolicyLossSpec(eps_clip=0.2, eps_clip_high=0.28)`."""

    eps_clip: float = 0.2
    """The ratio's lower bound is 1 - eps_clip."""
    eps_clip_high: float = 0.2
    """The ratio's upper bound is 1 + eps_clip_high."""
    eps_clip_c: float | None = None
    """Dual clip: for a negative advantage the loss is at most -c A."""
    old_policy: OldPolicy = OldPolicy.RECOMPUTED
    tis_cap: float | None = None
    """Truncated importance sampling: the policy term is multiplied by min(exp(l_old - lq), cap)."""
    kl_coef: float = 0.0
    kl_kind: KlKind = KlKind.LOW_VAR_KL
    entropy_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's log-probs must be there."""
        return self.kl_coef != 0

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the loss reads the recorded log-probs (the mismatch metrics read them where they are there)."""
        return self.old_policy is OldPolicy.ROLLOUT or self.tis_cap is not None


class WeightForm(StrEnum):
    """f in a loss of the form -A sg[f(p/q)] log p."""

    NONE = "none"
    """1"""
    TRUNCATED = "truncated"
    """min(r, upper)"""
    MASKED = "masked"
    """r strictly inside (lower, upper), else 0"""


@dataclass(frozen=True, slots=True)
class PolicyGradientWeight:
    """The weight a loss puts on the sampled token's score; score centering needs it.

    Example: `PolicyGradientWeight.masked(0.7, 6.0)`.
    """

    form: WeightForm
    lower: float | None = None
    upper: float | None = None

    @classmethod
    def none(cls) -> "PolicyGradientWeight":
        return cls(WeightForm.NONE)

    @classmethod
    def truncated(cls, upper: float) -> "PolicyGradientWeight":
        return cls(WeightForm.TRUNCATED, upper=upper)

    @classmethod
    def masked(cls, lower: float, upper: float) -> "PolicyGradientWeight":
        return cls(WeightForm.MASKED, lower, upper)


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """How a family's critic is trained. Example: `CriticSpec(learning_rate=1e-5, value_clip=0.2)`."""

    learning_rate: float
    value_clip: float
    """The new value may leave the old one by at most this much before its loss stops falling."""
    value_head_zero_init: bool = True
    """The value head starts at 0, so that the first baseline is 0 everywhere."""
