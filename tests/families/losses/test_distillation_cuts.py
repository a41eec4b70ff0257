"""The distillation loss is the same whatever the cut into micro-batches and context-parallel shares."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from atoll.families.divergence_spec import TeacherColumn
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.distillation import distillation_loss
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Column, ColumnDtype, ColumnSpec
from atoll.families.sampler_heads import HEAD_COLUMNS
from atoll.families.steps import TrainRow
from torch import Tensor

from tests.families.cases import VOCAB, Case, make_case
from tests.families.losses.kernel_cases import CENTERED, DISTILLATIONS, SAMPLE_WEIGHTS, WEIGHTS, K, batch_of_case
from tests.families.ranks import on_shards

LENGTHS = (9, 1, 8)
SPECS = (
    ColumnSpec(TeacherColumn.ROWS, ColumnDtype.FLOAT16, response_aligned=True),
    ColumnSpec(TeacherColumn.TOP_K_IDS, ColumnDtype.INT32, response_aligned=True),
    ColumnSpec(TeacherColumn.TOP_K_LOG_PROBS, ColumnDtype.FLOAT32, response_aligned=True),
    ColumnSpec(TeacherColumn.SAMPLED, ColumnDtype.FLOAT32, response_aligned=True),
    *HEAD_COLUMNS,
)
LOSSES = (*DISTILLATIONS, *(f"centered {name}" for name in CENTERED))


def train_rows(case: Case) -> list[TrainRow]:
    """The case's rows with the teacher's columns cut to them."""
    batch = batch_of_case()
    rows = []
    for index, item in enumerate(case.rows):
        own = batch.row_of_token == index
        columns: dict[str, Column] = {spec.name: batch.columns[spec.name][own].numpy() for spec in SPECS}
        rows.append(replace(item, columns=columns))
    return rows


def part(
    name: str, positions: Mapping[int, npt.NDArray[np.int64]], shard: VocabShard | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient [S, V] of some positions of some rows; `shard.group` is the context-parallel group."""
    case = make_case(dtype=torch.float32)
    rows = train_rows(case)
    logits = case.columns(1, 0, padding=0.0)
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    batch = build_loss_batch(
        [rows[row] for row in positions],
        shard=VocabShard(VOCAB),
        positions=list(positions.values()),
        logit_rows=torch.cat([case.logit_rows[bounds[row] + cut] for row, cut in positions.items()]),
        columns=SPECS,
        context_group=None if shard is None else shard.group,
    )
    weights = torch.tensor(SAMPLE_WEIGHTS)[list(positions)]
    plain = name.removeprefix("centered ")
    centering = ScoreCentering(WEIGHTS[CENTERED[plain]], K) if name != plain else None
    loss, _ = distillation_loss(DISTILLATIONS[plain], batch, logits, Reducer(batch), weights, centering)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    return loss.item(), logits.grad[:, :VOCAB]


def whole(*rows: int) -> dict[int, npt.NDArray[np.int64]]:
    return {row: np.arange(LENGTHS[row]) for row in rows}


@pytest.mark.parametrize("cut", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]]], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_step(name: str, cut: list[list[int]]) -> None:
    loss, gradient = part(name, whole(0, 1, 2))
    parts = [part(name, whole(*rows)) for rows in cut]
    assert sum(value for value, _ in parts) == pytest.approx(loss, rel=1e-9)
    torch.testing.assert_close(sum(piece for _, piece in parts), gradient, rtol=1e-5, atol=1e-9)


def zigzag(half: int) -> dict[int, npt.NDArray[np.int64]]:
    """A context-parallel rank of two holds quarters 0 and 3, or 1 and 2; of the one-token row one rank has nothing."""
    quarters = {row: np.arange(n, dtype=np.int64) * 4 // n for row, n in enumerate(LENGTHS)}
    return {row: np.flatnonzero((quarter % 3 == 0) == (half == 0)) for row, quarter in quarters.items()}


def context_parts(shard: VocabShard) -> list[tuple[float, Tensor]]:
    """Runs on each of two context-parallel ranks."""
    return [part(name, zigzag(shard.rank), shard) for name in LOSSES]


def test_context_parallel_ranks_add_up_to_the_step_and_share_the_weights_of_a_sequence() -> None:
    ranks = on_shards(2, VOCAB, context_parts)
    for name, *parts in zip(LOSSES, *ranks, strict=True):
        loss, gradient = part(name, whole(0, 1, 2))
        assert sum(value for value, _ in parts) == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(sum(piece for _, piece in parts), gradient, rtol=1e-5, atol=1e-8)
