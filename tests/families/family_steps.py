"""A small optimizer step for any family: rows of unequal lengths, their logits, and an oracle's gradient for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from atoll.families.catalog import AnyFamily
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Column, Row, VersionSpan
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainRow
from torch import Tensor

from tests.families import oracle

V = 11
PADDED = 16
RUN = RunSettings(vocab_size=V, seq_length=32, has_reference=True)
LENGTHS = (4, 1, 3)
PROMPTS = (2, 1, 1)
"""A response of one token and prompts of one token are among them."""
TEMPERATURES = (0.7, 1.0, 1.3)
MASKS = ((1, 0, 1, 1), (1,), (1, 1, 1))
TOKENS = sum(LENGTHS)


@dataclass(frozen=True)
class Answer:
    """What the workers would get: loss, gradient of the logits [S, V], metrics, bad rows."""

    loss: float
    gradient: Tensor
    metrics: Mapping[str, float]
    bad_rows: list[bool]


@dataclass(frozen=True)
class FamilyStep:
    """Rows of one optimizer step and the logits [S, V] at all of their positions."""

    family: AnyFamily
    rows: tuple[TrainRow, ...]
    logits: Tensor
    logit_rows: Tensor
    """[T]"""
    reference: tuple[Tensor, ...]
    """Per row [R]."""

    def batch(self, rows: Sequence[int] | None = None, shard: VocabShard | None = None, **changes: Any) -> LossBatch:
        """The loss batch of some rows; None: all. `changes` replace its fields."""
        chosen = range(len(self.rows)) if rows is None else rows
        bounds = np.concatenate([[0], np.cumsum([item.row.response_length for item in self.rows])])
        places = [self.logit_rows[bounds[i] : bounds[i + 1]] for i in chosen]
        batch = build_loss_batch(
            [self.rows[i] for i in chosen],
            shard=shard or VocabShard(V),
            logit_rows=torch.cat([torch.zeros(0, dtype=torch.int64), *places]),
            ref_log_probs=[self.reference[i] for i in chosen],
            columns=self.family.run_columns(RUN),
        )
        return replace(batch, **changes)

    def columns(self, shard: VocabShard | None = None) -> Tensor:
        """This rank's columns of the logits, a leaf; padded ones hold NaN."""
        full = torch.full((len(self.logits), PADDED), math.nan)
        full[:, :V] = self.logits
        part = full if shard is None else full.chunk(shard.size, 1)[shard.rank]
        return part.clone().requires_grad_()

    def answer(self, rows: Sequence[int] | None = None, shard: VocabShard | None = None, /, **changes: Any) -> Answer:
        """Loss and gradient of some rows. The gradient is of this rank's columns, without padding on one rank."""
        return answer(self.family, self.batch(rows, shard, **changes), self.columns(shard))

    def levels(self) -> list[float]:
        """log p(y_t) of all tokens in plain floats."""
        return [oracle.log_prob(*each) for each in self.places()]

    def places(self) -> list[tuple[list[float], int, float]]:
        """(logits, target, temperature) of all tokens."""
        targets = [token for item in self.rows for token in item.row.response_tokens.tolist()]
        temperatures = [item.row.temperature for item in self.rows for _ in range(item.row.response_length)]
        rows = [self.logits[place].double().tolist() for place in self.logit_rows.tolist()]
        return list(zip(rows, targets, temperatures, strict=True))

    def gradient(self, slopes: Sequence[Mapping[int, float]]) -> Tensor:
        """float64 [S, V] from d loss / d log p(v) of every token, by id."""
        dense = torch.zeros(len(self.logits), V, dtype=torch.float64)
        for place, (logits, _, temperature), of_token in zip(
            self.logit_rows.tolist(), self.places(), slopes, strict=True
        ):
            p = oracle.softmax(logits, temperature)[1]
            total = math.fsum(of_token.values())
            dense[place] = torch.tensor(
                [(of_token.get(u, 0.0) - total * p[u]) / temperature for u in range(V)], dtype=torch.float64
            )
        return dense


def answer(family: AnyFamily, batch: LossBatch, logits: Tensor) -> Answer:
    """Runs the family's loss and backward."""
    result = LossFunction(family, RUN)(batch, logits)
    torch.autograd.backward(result.loss)
    assert logits.grad is not None
    width = V if logits.shape[1] == PADDED else logits.shape[1]
    return Answer(
        result.loss.item(),
        logits.grad[:, :width],
        {name: value.item() for name, value in result.metrics.items()},
        result.bad_rows.tolist(),
    )


def equal(got: Answer, loss: float, gradient: Tensor) -> bool:
    """1e-5 relative: of the loss, and of the largest entry of the gradient."""
    near = float((got.gradient.double() - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max())
    return near and math.isclose(got.loss, loss, rel_tol=1e-5)


def make_step(
    family: AnyFamily,
    *,
    ratios: Sequence[float] = (1.0,) * TOKENS,
    advantages: Sequence[float] | None = None,
    columns: Callable[[int, Row], Mapping[str, Column]] = lambda _number, _row: {},
) -> FamilyStep:
    """A step whose tokens have the ratios exp(l - lq), row after row; `columns(number, row)` adds to each row."""
    generator = torch.Generator().manual_seed(4)
    starts = np.concatenate([[0], np.cumsum([p + r for p, r in zip(PROMPTS, LENGTHS, strict=True)])])
    logits = torch.randn(int(starts[-1]), V, generator=generator) * 2
    ids = torch.randint(0, V, (int(starts[-1]),), generator=generator).numpy().astype(np.int32)
    rows, reference = [], []
    logit_rows: list[int] = []
    for number, (prompt, length, temperature) in enumerate(zip(PROMPTS, LENGTHS, TEMPERATURES, strict=True)):
        places = list(range(starts[number] + prompt - 1, starts[number] + prompt - 1 + length))
        tokens = ids[starts[number] : starts[number + 1]]
        levels = [
            oracle.log_prob(logits[place].double().tolist(), target, temperature)
            for place, target in zip(places, tokens[prompt:].tolist(), strict=True)
        ]
        done = len(logit_rows)
        of_row = ratios[done : done + length]
        rows.append(
            Row(
                sample_id=f"sample-{number}",
                rollout_id=f"rollout-{number}",
                group_id=f"group-{number}",
                tokens=tokens,
                prompt_length=prompt,
                loss_mask=np.asarray(MASKS[number], dtype=np.uint8),
                rollout_log_probs=np.asarray(
                    [level - math.log(ratio) for level, ratio in zip(levels, of_row, strict=True)], dtype=np.float32
                ),
                temperature=temperature,
                reward=1.0,
                versions=(VersionSpan(0, length, "1:3"),),
            )
        )
        logit_rows += places
        reference.append(torch.tensor(levels) + 0.3)
    weights = family.row_weights(rows, [int(row.loss_mask.sum()) for row in rows])
    bounds = np.cumsum(LENGTHS)[:-1]
    given = [None] * len(rows) if advantages is None else np.split(np.asarray(advantages, dtype=np.float32), bounds)
    items = tuple(
        TrainRow(row, row.loss_mask, weight, values, columns(number, row))
        for number, (row, weight, values) in enumerate(zip(rows, weights, given, strict=True))
    )
    return FamilyStep(family, items, logits, torch.tensor(logit_rows), tuple(reference))
