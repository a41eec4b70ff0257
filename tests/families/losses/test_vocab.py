"""Statistics over vocabulary shards against plain floats and dense float64 autograd."""

import math

import pytest
import torch
from atoll.families.losses.vocab import (
    TokenStatistics,
    VocabShard,
    entropy,
    log_probs_at_ids,
    log_sum_exp,
    token_statistics,
)
from torch import Tensor

from tests.families import oracle
from tests.families.cases import SHARDS, VOCAB, Case, make_case, padded_columns
from tests.families.ranks import on_shards

DTYPES = (torch.float32, torch.bfloat16)
MIXTURE = (0.7, -1.3, 0.4)
"""Incoming gradients of log-sum-exp, log-prob and entropy, each times 1 + token index."""


def statistics_of(case: Case, logits: Tensor, shard: VocabShard) -> TokenStatistics:
    batch = case.batch(shard)
    return token_statistics(logits, batch.tokens, batch.temperatures, shard, logit_rows=case.logit_rows, chunk_rows=3)


def mix(values: TokenStatistics) -> Tensor:
    index = torch.arange(1, len(values.log_probs) + 1, dtype=values.log_probs.dtype)
    return sum((c * (v * index).sum() for c, v in zip(MIXTURE, values, strict=True)), start=torch.zeros(()))


def all_cases(shard: VocabShard) -> list[tuple[list[list[float]], Tensor]]:
    """For every dtype: the three statistics and this shard's gradient; runs on each rank."""
    answers = []
    for dtype in DTYPES:
        case = make_case(dtype=dtype)
        logits = case.columns(shard.size, shard.rank, padding=math.nan)
        values = statistics_of(case, logits, shard)
        torch.autograd.backward(mix(values))
        assert logits.grad is not None
        answers.append(([value.tolist() for value in values], logits.grad))
    return answers


def dense_gradient(case: Case) -> Tensor:
    """The gradient of `mix`, by autograd over the whole vocabulary in float64."""
    logits = case.logits.double().requires_grad_()
    batch = case.batch(VocabShard(VOCAB))
    z = logits[case.logit_rows] / torch.tensor(
        [item.row.temperature for item in case.rows for _ in range(item.row.response_length)], dtype=torch.float64
    ).unsqueeze(1)
    log_p = torch.log_softmax(z, -1)
    values = TokenStatistics(
        torch.logsumexp(z, -1), log_p.gather(1, batch.tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    )
    torch.autograd.backward(mix(values))
    assert logits.grad is not None
    return logits.grad


@pytest.fixture(scope="module", params=SHARDS, ids="{} shards".format)
def answers(request: pytest.FixtureRequest) -> list[list[tuple[list[list[float]], Tensor]]]:
    """[rank][dtype] -> statistics, gradient."""
    return on_shards(request.param, VOCAB, all_cases)


@pytest.mark.parametrize("dtype", range(len(DTYPES)), ids=map(str, DTYPES))
def test_statistics_equal_plain_floats_on_every_rank(
    answers: list[list[tuple[list[list[float]], Tensor]]], dtype: int
) -> None:
    tokens = make_case(dtype=DTYPES[dtype]).oracle_tokens()
    expected = [
        [oracle.softmax(token.logits, token.temperature)[0] for token in tokens],
        [oracle.log_prob(token.logits, token.target, token.temperature) for token in tokens],
        [oracle.entropy(token.logits, token.temperature) for token in tokens],
    ]
    for rank in answers:
        for got, want in zip(rank[dtype][0], expected, strict=True):
            assert got == pytest.approx(want, rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("dtype", range(len(DTYPES)), ids=map(str, DTYPES))
def test_gradients_equal_dense_autograd_and_padding_gets_none(
    answers: list[list[tuple[list[list[float]], Tensor]]], dtype: int
) -> None:
    case = make_case(dtype=DTYPES[dtype])
    got = torch.cat([rank[dtype][1] for rank in answers], dim=1)
    assert got.shape[1] == padded_columns(len(answers)) > VOCAB
    assert bool((got[:, VOCAB:] == 0).all())
    want = dense_gradient(case)
    # A bfloat16 gradient is rounded to 8 bits; float32 is held to 1e-5 of the row's largest entry.
    tolerance = 2.0**-8 if DTYPES[dtype] is torch.bfloat16 else 1e-5
    scale = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert float(((got[:, :VOCAB].double() - want) / scale).abs().max()) <= tolerance
    untouched = torch.ones(len(case.logits), dtype=torch.bool)
    untouched[case.logit_rows] = False
    assert bool((got[untouched] == 0).all())


def test_the_bfloat16_case_has_ties_at_the_top() -> None:
    rows = make_case(dtype=torch.bfloat16).logits
    assert int((rows == rows.amax(-1, keepdim=True)).sum(-1).max()) > 1


def test_the_gradient_without_the_coupling_through_the_global_sum_is_found() -> None:
    case = make_case(dtype=torch.float32)
    want = dense_gradient(case)
    logits = case.logits.double().requires_grad_()
    z = logits[case.logit_rows] / case.batch(VocabShard(VOCAB)).temperatures[:, None].double()
    half = VOCAB // 2
    local = torch.logsumexp(z[:, :half], -1).exp() + torch.logsumexp(z[:, half:], -1).exp().detach()
    target = z.gather(1, case.batch(VocabShard(VOCAB)).tokens[:, None])[:, 0]
    torch.autograd.backward(mix(TokenStatistics(local.log(), target - local.log(), torch.zeros_like(target))))
    assert logits.grad is not None
    assert not torch.allclose(logits.grad, want, rtol=1e-3)


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 100])
def test_the_chunk_size_changes_nothing(chunk_rows: int) -> None:
    case = make_case(dtype=torch.float32)
    shard = VocabShard(VOCAB)
    results = []
    for rows in (chunk_rows, 1000):
        logits = case.columns(1, 0, padding=0.0)
        batch = case.batch(shard)
        values = token_statistics(
            logits, batch.tokens, batch.temperatures, shard, logit_rows=case.logit_rows, chunk_rows=rows
        )
        torch.autograd.backward(mix(values))
        results.append((*values, logits.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True) if a is not None and b is not None)


def test_each_statistic_alone_has_its_own_gradient_in_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    ids, temperatures = torch.tensor([0, 9, 3]), torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64)
    rows, shard = torch.tensor([4, 0, 2]), VocabShard(10)
    for function in (
        lambda x: log_sum_exp(x, temperatures, shard, logit_rows=rows),
        lambda x: log_probs_at_ids(x, ids, temperatures, shard, logit_rows=rows),
        lambda x: entropy(x, temperatures, shard, logit_rows=rows),
    ):
        assert torch.autograd.gradcheck(function, (logits,))


def test_a_position_used_twice_gets_both_gradients() -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    values = log_probs_at_ids(
        logits, torch.tensor([2, 5]), torch.ones(2), VocabShard(8), logit_rows=torch.tensor([0, 0])
    )
    torch.autograd.backward(values.sum())
    p = torch.softmax(logits.detach(), -1)
    hot = torch.zeros(1, 8).index_fill_(1, torch.tensor([2, 5]), 1.0)
    torch.testing.assert_close(logits.grad, hot - 2 * p)


def test_a_column_of_minus_infinity_has_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[0.5, -math.inf, 1.0]], requires_grad=True)
    values = token_statistics(logits, torch.tensor([2]), torch.ones(1), VocabShard(3))
    assert values.entropy.item() == pytest.approx(oracle.entropy([0.5, 1.0], 1.0), abs=1e-6)
    torch.autograd.backward(values.entropy.sum() + values.log_probs.sum())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert float(logits.grad[0, 1]) == 0


def test_no_tokens_give_a_loss_of_zero_that_still_reaches_the_logits() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    values = token_statistics(
        logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0), VocabShard(8), logit_rows=torch.zeros(0).long()
    )
    torch.autograd.backward(values.log_probs.sum())
    assert logits.grad is not None
    assert bool((logits.grad == 0).all())


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    logits = torch.zeros(1, padded_columns(1))
    with pytest.raises(ValueError, match=rf"\[0, {VOCAB}\), got {bad}"):
        log_probs_at_ids(logits, torch.tensor([bad]), torch.ones(1), VocabShard(VOCAB))


def test_shards_too_small_for_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold the vocabulary"):
        log_probs_at_ids(torch.zeros(1, 500), torch.tensor([0]), torch.ones(1), VocabShard(VOCAB))
