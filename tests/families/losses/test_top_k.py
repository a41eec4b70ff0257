"""The K most likely ids on every layout, ties included, and log-probs at K ids with their coupling."""

import math

import pytest
import torch
from atoll.families.losses.top_k import log_probs_at_top_ids, top_k_ids
from atoll.families.losses.vocab import VocabShard

from tests.families.cases import SHARDS, VOCAB, make_case, padded_columns
from tests.families.losses.conftest import AnswersOf
from tests.families.losses.kernel_cases import (
    DTYPES,
    K,
    assert_gradient,
    incoming,
    joined_gradient,
    log_policy,
    make_inputs,
    top_ids,
)
from tests.families.ranks import on_shards

by_layout = pytest.mark.parametrize("shards", SHARDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_layout
@by_dtype
def test_top_ids_are_ordered_by_logit_then_id_on_every_layout(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype
) -> None:
    case = make_case(dtype=dtype)
    expected = top_ids(case.logits[case.logit_rows].double())
    for rank in answers_of(shards):
        assert torch.equal(rank[f"top_k {dtype}"].values, expected)


def test_the_bfloat16_case_ties_across_the_boundary_of_k() -> None:
    case = make_case(dtype=torch.bfloat16)
    rows = case.logits[case.logit_rows].sort(-1, descending=True).values
    assert int((rows[:, K - 1] == rows[:, K]).sum()) > len(rows) // 2


@by_layout
@by_dtype
def test_log_probs_at_ids_of_any_shard_equal_plain_floats_and_dense_gradients(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype
) -> None:
    case = make_case(dtype=dtype)
    logits, log_p = log_policy(case, requires_grad=True)
    want = (log_p.gather(1, top_ids(make_inputs(case).teacher)) * incoming(K).double()).sum(-1)
    torch.autograd.backward((want * incoming(len(want)).double()).sum())
    assert logits.grad is not None
    ranks, name = answers_of(shards), f"log_probs {dtype}"
    for rank in ranks:
        assert rank[name].values.tolist() == pytest.approx(want.tolist(), rel=1e-5)
    assert_gradient(joined_gradient(ranks, name), logits.grad, dtype)


def test_k_may_be_the_whole_vocabulary_and_more_than_a_shard_holds() -> None:
    case = make_case(dtype=torch.bfloat16, lengths=(2,), temperatures=(0.7,))
    expected = top_ids(case.logits[case.logit_rows].double(), VOCAB)
    for answer in on_shards(2, VOCAB, whole_vocabulary):
        assert torch.equal(answer, expected)


def whole_vocabulary(shard: VocabShard) -> torch.Tensor:
    """Runs on each rank: all ids in order, of which the second shard holds fewer than the first."""
    case = make_case(dtype=torch.bfloat16, lengths=(2,), temperatures=(0.7,))
    logits = case.columns(shard.size, shard.rank, padding=math.inf)
    return top_k_ids(logits, VOCAB, shard, logit_rows=case.logit_rows)


@pytest.mark.parametrize("k", [0, VOCAB + 1])
def test_k_outside_the_vocabulary_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"top-k must be in \[1, {VOCAB}\]"):
        top_k_ids(torch.zeros(1, padded_columns(1)), k, VocabShard(VOCAB))


def test_logits_of_minus_infinity_come_last_and_nan_is_no_id_of_its_own() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0], [math.nan, 0.0, 2.0, math.nan]])
    assert top_k_ids(logits, 3, VocabShard(4)).tolist() == [[1, 3, 0], [2, 1, 0]]


def test_a_repeated_id_gets_both_gradients_and_a_token_without_gradient_none() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    logits[1] = math.nan
    logits.requires_grad_()
    ids = torch.tensor([[2, 2, 5], [0, 1, 2]])
    values = log_probs_at_top_ids(logits, ids, torch.ones(2, dtype=torch.float64), VocabShard(6))
    torch.autograd.backward(values[0].sum())
    assert logits.grad is not None
    p = torch.softmax(logits.detach()[0], -1)
    torch.testing.assert_close(logits.grad[0], torch.tensor([0, 0, 2, 0, 0, 1.0]) - 3 * p)
    assert logits.grad[1].tolist() == [0] * 6


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"ids must be in \[0, {VOCAB}\)"):
        log_probs_at_top_ids(
            torch.zeros(1, padded_columns(1)), torch.tensor([[3, bad]]), torch.ones(1), VocabShard(VOCAB)
        )


def test_no_tokens_give_no_ids_and_no_gradient() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    assert top_k_ids(logits, 2, VocabShard(8), logit_rows=none).shape == (0, 2)
    values = log_probs_at_top_ids(logits, none.reshape(0, 2), torch.zeros(0), VocabShard(8), logit_rows=none)
    torch.autograd.backward(values.sum())
    assert logits.grad is not None
    assert bool((logits.grad == 0).all())
