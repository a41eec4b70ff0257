"""Facts of a training run that a family may check, and what a family asks of the backend."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import CriticSpec

OptionsT_co = TypeVar("OptionsT_co", bound=FamilyOptions, covariant=True)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of the run that are not a family's own. Example: `RunSettings(vocab_size=49152, seq_length=4096)`."""

    vocab_size: int
    """V of the model's configuration, without padding."""
    seq_length: int
    """Longest row, P + R, that the workers take."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    max_staleness: int = 0
    learning_rate: float = 1e-6
    dropout: float = 0.0
    """The larger of attention and hidden dropout."""
    has_reference: bool = False
    """Whether the workers hold a frozen reference model."""
    score_centering: bool = False
    """Whether the correction of that name is on; a family that declares no policy-gradient weight refuses it."""
    score_centering_top_k: int = 128
    """Ids of the sampler's head; at most what the gateway captures."""
    score_centering_min_tail_mass: float = 1e-6
    """Tails below it are taken for it."""


@dataclass(frozen=True, slots=True)
class BackendNeeds:
    """What the backend sets up for a family, decided once at start."""

    old_log_probs: bool = False
    """Recompute l_old before the job's first optimizer step. A job of a single optimizer step may skip the pass:
    then `LossBatch.old_log_probs` is None and the loss takes sg[l], the same number."""
    reference_log_probs: bool = False
    """Compute l_ref with the frozen reference model."""
    critic: CriticSpec | None = None
    """Boot a critic worker group and train it like this; None: there is no critic."""
    frozen_base: bool = False
    """Keep a copy of the base weights for forward-only passes."""
    zero_dropout: bool = False
    """A forward-only pass must repeat the training pass exactly."""


@dataclass(frozen=True, slots=True)
class HookArgs(Generic[OptionsT_co]):
    """The `args` of every objective hook: the family's options and the run they run in."""

    options: OptionsT_co
    run: RunSettings
