"""How the Megatron backend is laid out and steps; fixed for the life of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParallelLayout:
    """How many ranks share a model (``tensor`` x ``pipeline``) and a row (``context``), and how many copies split the
    rows (``data``).

    Ranks are numbered as megatron-core does: tensor neighbours first, then context, data, pipeline. There is no
    sequence parallelism: tensor neighbours each hold the activations of all tokens.
    Example: ``ParallelLayout(tensor=2, data=1)``
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "pipeline", "context"):
            value = int(vars(self)[name])
            if value < 1:
                raise ValueError(f"parallel layout: {name}: expected 1 or more, got {value}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    def data_rank(self, rank: int) -> int:
        """Which share of the rows a rank trains."""
        return rank // (self.tensor * self.context) % self.data

    def speaks(self, rank: int) -> bool:
        """Whether a rank answers for its copy of the model: one rank of each copy, where the losses are."""
        first = rank % (self.tensor * self.context) == 0
        return first and rank // (self.tensor * self.context * self.data) == self.pipeline - 1


@dataclass(frozen=True)
class MicroBatchLimit:
    """How many rows go through the model at once: memory against speed, never the result.

    Example: ``MicroBatchLimit(tokens=8192, rows=64)``
    """

    tokens: int = 8192
    """Packed tokens; a longer row gets a micro-batch of its own."""
    rows: int = 256


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) and gradient clipping. Norms and biases never decay.

    Example: ``AdamW(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip_grad=1.0)``
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class MegatronSettings:
    """Everything a worker needs to know before it sees a model.

    Example: ``MegatronSettings(ParallelLayout(data=2), MicroBatchLimit(), AdamW())``
    """

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    micro_batch: MicroBatchLimit = field(default_factory=MicroBatchLimit)
    optimizer: AdamW = field(default_factory=AdamW)
    seed: int = 0
    vocabulary_multiple: int = 64
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
