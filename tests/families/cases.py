"""Rows and logits that the loss tests share, and the same as the oracle's tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Row
from atoll.families.steps import RowWeights, TrainRow
from torch import Tensor

from tests.families import oracle

VOCAB = 1100
SHARDS = (1, 2, 4)
PADDING_UNIT = 128
LOG_RATIOS = (-0.9, 0.5, 0.03, -0.4, 0.8)
"""Of consecutive tokens, whose advantages alternate in sign."""


def padded_columns(shards: int) -> int:
    """Columns of all shards together, as Megatron pads them: a multiple of 128 for every shard."""
    unit = PADDING_UNIT * shards
    return -(-VOCAB // unit) * unit


@dataclass(frozen=True)
class Case:
    """A step of rows of unequal lengths, and everything the loss reads. All logits are exact in `dtype`."""

    rows: tuple[TrainRow, ...]
    logits: Tensor
    """[S, V] in `dtype`, prompt positions between the rows included"""
    logit_rows: Tensor
    """[T]"""
    old: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]

    def columns(self, shards: int, rank: int, padding: float) -> Tensor:
        """This rank's columns of the logits, a leaf; padded columns hold `padding`."""
        width = padded_columns(shards)
        full = torch.full((len(self.logits), width), padding, dtype=self.logits.dtype)
        full[:, :VOCAB] = self.logits
        return full.chunk(shards, 1)[rank].clone().requires_grad_()

    def batch(self, shard: VocabShard, rows: Sequence[int] | None = None) -> LossBatch:
        """The loss batch of some rows; None: all."""
        chosen = range(len(self.rows)) if rows is None else rows
        bounds = np.concatenate([[0], np.cumsum([item.row.response_length for item in self.rows])])
        logit_rows = [self.logit_rows[bounds[i] : bounds[i + 1]] for i in chosen]
        return build_loss_batch(
            [self.rows[i] for i in chosen],
            shard=shard,
            logit_rows=torch.cat(logit_rows),
            old_log_probs=[self.old[i] for i in chosen],
            ref_log_probs=[self.reference[i] for i in chosen],
        )

    def oracle_tokens(self) -> list[oracle.Token]:
        """The same step for the oracle."""
        tokens = []
        place = iter(self.logit_rows.tolist())
        for item, old, reference in zip(self.rows, self.old, self.reference, strict=True):
            assert item.advantages is not None
            for t, target in enumerate(item.row.response_tokens.tolist()):
                tokens.append(
                    oracle.Token(
                        logits=self.logits[next(place)].double().tolist(),
                        target=target,
                        temperature=item.row.temperature,
                        advantage=float(item.advantages[t]),
                        recorded=float(item.row.rollout_log_probs[t]),
                        reference=float(reference[t]),
                        weight=item.weights.policy,
                        regularizer_weight=item.weights.regularizer,
                        mask=int(item.mask[t]),
                        old=float(old[t]),
                    )
                )
        return tokens


def make_case(
    *, lengths: Sequence[int] = (9, 1, 8), temperatures: Sequence[float] = (0.7, 1.0, 1.3), dtype: torch.dtype
) -> Case:
    """A case with ratios below, inside and above the clip range for both signs of the advantage, two tokens masked.

    In bfloat16 the logits take a few values only, so that most rows have ties at the top.
    """
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(11)
    positions = sum(lengths) + 2 * len(lengths)
    logits = torch.randn(positions, VOCAB, generator=generator) * 3
    logits = logits.mul(2).round().div(2) if dtype is torch.bfloat16 else logits
    logits = logits.to(dtype)
    rows, old, reference, start = [], [], [], 0
    logit_rows: list[int] = []
    for index, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True)):
        places = list(range(start + 1, start + 1 + length))
        start += length + 2
        response = [rng.randrange(VOCAB) for _ in range(length)]
        response[0] = VOCAB - 1 - index  # the last columns before the padding
        levels = [
            oracle.log_prob(logits[place].double().tolist(), target, temperature)
            for place, target in zip(places, response, strict=True)
        ]
        numbers = range(len(logit_rows), len(logit_rows) + length)
        rows.append(
            TrainRow(
                row=Row(
                    sample_id=f"sample-{index}",
                    rollout_id=f"rollout-{index}",
                    group_id="group",
                    tokens=np.asarray([1, 2, *response], dtype=np.int32),
                    prompt_length=2,
                    loss_mask=np.ones(length, dtype=np.uint8),
                    rollout_log_probs=np.asarray([v + rng.uniform(-1, 1) for v in levels], dtype=np.float32),
                    temperature=temperature,
                    reward=0.0,
                ),
                mask=np.asarray([0 if t == 4 else 1 for t in range(length)], dtype=np.uint8),
                weights=RowWeights(policy=0.1 + 0.2 * index, regularizer=0.3 - 0.05 * index, metric=0.25),
                advantages=np.asarray([(-1) ** n * rng.uniform(0.5, 2) for n in numbers], dtype=np.float32),
            )
        )
        old.append(torch.tensor([v - LOG_RATIOS[n % 5] for v, n in zip(levels, numbers, strict=True)]))
        reference.append(torch.tensor([v + rng.uniform(-2, 2) for v in levels]))
        logit_rows += places
    return Case(tuple(rows), logits, torch.tensor(logit_rows), tuple(old), tuple(reference))


def case_gradient(case: Case, gradient: list[list[float]]) -> Tensor:
    """The oracle's gradient [T][V] laid out like the logits [S, V] in float64."""
    dense = torch.zeros(len(case.logits), VOCAB, dtype=torch.float64)
    dense[case.logit_rows] = torch.tensor(gradient, dtype=torch.float64)
    return dense
