"""The loss batch: rows concatenated, cut to the positions of a context-parallel rank, extra columns beside them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from atoll.common.errors import InvalidInput
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Column, ColumnDtype, ColumnSpec
from atoll.families.steps import RowWeights, TrainRow

from tests.families.rows import make_row

SHARD = VocabShard(10)
COLUMNS = (
    ColumnSpec("action_mask", ColumnDtype.UINT8, response_aligned=True),
    ColumnSpec("teacher_tokens", ColumnDtype.INT32),
    ColumnSpec("hidden", ColumnDtype.FLOAT32, in_loss_batch=False),
)


def train_row(sample_id: str, length: int, mask: list[int], weight: float) -> TrainRow:
    row = make_row(sample_id, length=length)
    columns: dict[str, Column] = {
        "action_mask": np.arange(length, dtype=np.uint8),
        "teacher_tokens": np.full(length + 4, length, dtype=np.int32),
        "hidden": np.zeros(1, dtype=np.float32),
    }
    advantages = np.arange(length, dtype=np.float32) + 10 * length
    weights = RowWeights(weight, 2 * weight, 3 * weight)
    return TrainRow(replace(row, temperature=weight), np.asarray(mask, dtype=np.uint8), weights, advantages, columns)


ROWS = [train_row("a", 4, [1, 0, 1, 1], 0.1), train_row("b", 1, [1], 0.7)]


def test_rows_are_concatenated_with_their_facts_spread_over_their_tokens() -> None:
    batch = build_loss_batch(ROWS, shard=SHARD, columns=COLUMNS)
    assert batch.sample_ids == ("a", "b")
    assert batch.row_lengths == (4, 1)
    assert batch.total_tokens == 5
    assert batch.row_of_token.tolist() == [0, 0, 0, 0, 1]
    assert batch.tokens.tolist() == [3, 4, 5, 6, 3]
    assert batch.mask.tolist() == [True, False, True, True, True]
    assert batch.temperatures.tolist() == pytest.approx([0.1] * 4 + [0.7])
    assert batch.policy_weights.tolist() == [0.1] * 4 + [0.7]
    assert batch.regularizer_weights.tolist() == [0.2] * 4 + [1.4]
    assert batch.metric_weights.tolist() == [3 * 0.1] * 4 + [3 * 0.7]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [40, 41, 42, 43, 10]
    assert batch.old_log_probs is None
    assert batch.columns["action_mask"].tolist() == [0, 1, 2, 3, 0]
    assert [piece.tolist() for piece in batch.row_columns["teacher_tokens"]] == [[4] * 8, [1] * 5]
    assert not {"hidden"} & {*batch.columns, *batch.row_columns}


def test_positions_cut_everything_that_is_aligned_to_the_response() -> None:
    cut = [np.asarray([3, 0]), np.asarray([], dtype=np.int64)]
    old = [torch.tensor([-3.0, -0.5]), torch.zeros(0)]
    batch = build_loss_batch(ROWS, shard=SHARD, positions=cut, old_log_probs=old, columns=COLUMNS)
    assert batch.row_lengths == (2, 0)
    assert batch.tokens.tolist() == [6, 3]
    assert batch.mask.tolist() == [True, True]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [43, 40]
    assert batch.columns["action_mask"].tolist() == [3, 0]
    assert batch.old_log_probs is not None
    assert batch.old_log_probs.tolist() == [-3.0, -0.5]
    assert batch.policy_weights.tolist() == [0.1, 0.1]


def test_no_rows_give_an_empty_batch() -> None:
    batch = build_loss_batch([], shard=SHARD, old_log_probs=[], columns=COLUMNS)
    assert batch.total_tokens == 0
    assert batch.sample_ids == ()
    assert batch.advantages is not None
    assert batch.old_log_probs is not None


def test_log_probs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="sample b: 1 log-probs expected, got 2"):
        build_loss_batch(ROWS, shard=SHARD, old_log_probs=[torch.zeros(4), torch.zeros(2)])


def test_ids_outside_the_vocabulary_are_refused_by_sample() -> None:
    with pytest.raises(InvalidInput, match=r"sample a: token ids must be in \[0, 6\), got 3\.\.6"):
        build_loss_batch(ROWS, shard=VocabShard(6))


def test_placeholders_under_the_mask_are_carried_as_they_are() -> None:
    row = replace(ROWS[0].row, rollout_log_probs=np.asarray([-1, math.nan, -1, -1], dtype=np.float32))
    batch = build_loss_batch([replace(ROWS[0], row=row)], shard=SHARD)
    assert batch.rollout_log_probs.isnan().tolist() == [False, True, False, False]


def test_values_and_returns_are_cut_like_advantages_and_absent_where_a_row_has_none() -> None:
    rows = [
        replace(item, values=np.arange(n, dtype=np.float32), returns=np.arange(n, dtype=np.float32) + 10)
        for item, n in zip(ROWS, (4, 1), strict=True)
    ]
    batch = build_loss_batch(rows, shard=SHARD, positions=[np.asarray([1, 3]), np.asarray([0])])
    assert batch.old_values is not None
    assert batch.returns is not None
    assert batch.old_values.tolist() == [1, 3, 0]
    assert batch.returns.tolist() == [11, 13, 10]
    mixed = build_loss_batch([rows[0], ROWS[1]], shard=SHARD)
    assert (mixed.old_values, mixed.returns) == (None, None)
