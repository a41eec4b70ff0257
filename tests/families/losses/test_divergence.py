"""Divergences to a teacher against plain floats and dense float64 autograd, on every number of shards."""

import math

import pytest
import torch
from atoll.families.divergence_spec import DivergenceKind, DivergenceSpec, Estimator
from atoll.families.losses.divergence import full_divergence, restricted_divergence, sampled_reverse_kl
from atoll.families.losses.vocab import VocabShard
from torch import Tensor

from tests.families.cases import SHARDS, VOCAB, make_case, padded_columns
from tests.families.losses.conftest import AnswersOf
from tests.families.losses.dense import Mutant, dense_divergence, over_ids, plain_divergence
from tests.families.losses.kernel_cases import (
    BETA,
    DTYPES,
    KINDS,
    assert_gradient,
    incoming,
    joined_gradient,
    log_policy,
    make_inputs,
    top_ids,
)

by_layout = pytest.mark.parametrize("shards", SHARDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
ESTIMATORS = (Estimator.FULL, Estimator.RENORMALIZED, Estimator.TAIL)


def dense(
    kind: DivergenceKind, estimator: Estimator, dtype: torch.dtype, mutant: Mutant | None = None
) -> tuple[Tensor, Tensor]:
    """Values [T] and the gradient [S, V] of their weighted sum."""
    case = make_case(dtype=dtype)
    inputs = make_inputs(case)
    logits, student = log_policy(case, requires_grad=True)
    if estimator is Estimator.FULL:
        # Parity is against the teacher's rows as they are kept, in float16, renormalised.
        teacher = torch.log_softmax(inputs.teacher_rows.double(), -1)
    else:
        ids = top_ids(inputs.teacher)
        student, teacher = (over_ids(rows, ids, estimator.value, mutant) for rows in (student, inputs.teacher))
    swap = {"forward": "reverse", "reverse": "forward", "jsd": "jsd"}
    name = swap[kind.value] if mutant is Mutant.DIRECTION_SWAPPED else kind.value
    values = dense_divergence(student, teacher, name, 1 - BETA if mutant is Mutant.BETA_SWAPPED else BETA)
    torch.autograd.backward((values * incoming(len(values)).double()).sum())
    assert logits.grad is not None
    return values.detach(), logits.grad


@by_layout
@by_dtype
@by_kind
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_values_and_gradients_equal_the_dense_ones(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype, kind: DivergenceKind, estimator: Estimator
) -> None:
    ranks, name = answers_of(shards), f"{estimator} {kind} {dtype}"
    values, gradient = dense(kind, estimator, dtype)
    for rank in ranks:
        assert rank[name].values.tolist() == pytest.approx(values.tolist(), rel=1e-5)
    assert_gradient(joined_gradient(ranks, name), gradient, dtype)


@by_kind
def test_the_dense_oracle_equals_plain_floats(kind: DivergenceKind) -> None:
    case = make_case(dtype=torch.float32)
    values, _ = dense(kind, Estimator.FULL, torch.float32)
    _, student = log_policy(case)
    rows = make_inputs(case).teacher_rows.double().tolist()
    for t in (0, 9, 17):
        total = math.log(math.fsum(math.exp(x) for x in rows[t]))
        teacher = [x - total for x in rows[t]]
        assert plain_divergence(student[t].tolist(), teacher, kind.value, BETA) == pytest.approx(values[t].item())


@pytest.mark.parametrize(
    ("mutant", "kind", "estimator"),
    [
        (Mutant.DIRECTION_SWAPPED, DivergenceKind.FORWARD, Estimator.FULL),
        (Mutant.DIRECTION_SWAPPED, DivergenceKind.REVERSE, Estimator.TAIL),
        (Mutant.BETA_SWAPPED, DivergenceKind.JSD, Estimator.FULL),
        (Mutant.BETA_SWAPPED, DivergenceKind.JSD, Estimator.TAIL),
        (Mutant.TAIL_LEFT_OUT, DivergenceKind.JSD, Estimator.TAIL),
        (Mutant.NOT_RENORMALIZED, DivergenceKind.FORWARD, Estimator.RENORMALIZED),
    ],
)
def test_the_comparison_finds_every_mutant(
    answers_of: AnswersOf, mutant: Mutant, kind: DivergenceKind, estimator: Estimator
) -> None:
    (rank,) = answers_of(1)
    values, _ = dense(kind, estimator, torch.float32, mutant)
    got = rank[f"{estimator} {kind} torch.float32"].values.tolist()
    assert not any(a == pytest.approx(b, rel=1e-3) for a, b in zip(got, values.tolist(), strict=True))


@by_kind
def test_the_gradient_without_the_coupling_through_the_global_sum_is_found(
    answers_of: AnswersOf, kind: DivergenceKind
) -> None:
    """Autograd over each shard's own terms, with the other shard's part of the log-sum-exp held fixed."""
    case = make_case(dtype=torch.float32)
    logits = case.logits.double().requires_grad_()
    z = logits[case.logit_rows] / case.batch(VocabShard(VOCAB)).temperatures[:, None].double()
    halves = z[:, : VOCAB // 2], z[:, VOCAB // 2 :]
    sums = [half.logsumexp(-1) for half in halves]
    student = torch.cat(
        [
            half - torch.logaddexp(own, other.detach())[:, None]
            for half, own, other in zip(halves, sums, reversed(sums), strict=True)
        ],
        -1,
    )
    teacher = torch.log_softmax(make_inputs(case).teacher_rows.double(), -1)
    values = dense_divergence(student, teacher, kind.value, BETA)
    torch.autograd.backward((values * incoming(len(values)).double()).sum())
    assert logits.grad is not None
    got = joined_gradient(answers_of(2), f"full {kind} torch.float32")
    assert_gradient(got, dense(kind, Estimator.FULL, torch.float32)[1], torch.float32)
    with pytest.raises(AssertionError):
        assert_gradient(got, logits.grad, torch.float32, relative=1e-3)


@by_layout
@by_dtype
def test_kept_rows_are_the_log_probs_in_float16_floored(answers_of: AnswersOf, shards: int, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    rows = torch.cat([rank[f"rows {dtype}"].values for rank in answers_of(shards)], 1)
    assert rows.dtype is torch.float16
    assert rows.shape == (len(case.logit_rows), padded_columns(shards))
    assert bool((rows[:, VOCAB:] == -1e4).all())
    torch.testing.assert_close(rows[:, :VOCAB].double(), log_policy(case)[1], rtol=2.0**-10, atol=1e-6)


def test_rows_below_the_floor_are_kept_at_the_floor_and_contribute_nothing() -> None:
    from atoll.families.losses.divergence import teacher_log_prob_rows

    shard, one = VocabShard(3), torch.ones(1)
    rows = teacher_log_prob_rows(torch.tensor([[0.0, -1e6, -math.inf]]), one, shard)
    assert rows.tolist() == [[0.0, -10000.0, -10000.0]]
    student = torch.tensor([[0.3, -0.2, -math.inf]], requires_grad=True)
    value = full_divergence(student, rows, one, shard, DivergenceSpec(DivergenceKind.FORWARD))
    assert value.item() == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-6)
    torch.autograd.backward(value.sum())
    assert student.grad is not None
    assert student.grad[0, 0].item() == pytest.approx(1 / (1 + math.exp(-0.5)) - 1, rel=1e-5)
    assert student.grad[0, 2].item() == 0


@by_kind
def test_a_student_equal_to_its_teacher_has_divergence_and_gradient_zero(kind: DivergenceKind) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(9))
    teacher = torch.log_softmax(logits.double(), -1)
    logits.requires_grad_()
    values = full_divergence(logits, teacher, torch.ones(4), VocabShard(50), DivergenceSpec(kind))
    torch.autograd.backward(values.sum())
    assert logits.grad is not None
    assert float(values.detach().abs().max()) < 1e-6
    assert float(logits.grad.abs().max()) < 1e-7


@by_kind
def test_float64_gradients_pass_gradcheck_with_positions_used_twice(kind: DivergenceKind) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(3, 9, dtype=torch.float64, generator=generator)
    temperatures, rows = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64), torch.tensor([3, 0, 0])
    spec, shard = DivergenceSpec(kind, BETA), VocabShard(7)
    assert torch.autograd.gradcheck(
        lambda x: full_divergence(x, teacher, temperatures, shard, spec, logit_rows=rows, chunk_rows=2), (logits,)
    )


@by_kind
def test_a_token_without_gradient_gets_none_whatever_its_inputs_hold(kind: DivergenceKind) -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    teacher = torch.tensor([[-1.0, -2, -3, -4, -5], [math.nan, math.inf, -math.inf, 0, 0]])
    values = full_divergence(logits, teacher, torch.ones(2), VocabShard(5), DivergenceSpec(kind))
    assert not values[1].isfinite()
    torch.autograd.backward(values.masked_fill(torch.tensor([False, True]), 0).sum())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[1].tolist() == [0] * 5


def test_teacher_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"teacher rows \[2, 8\] expected, as wide as this shard"):
        full_divergence(
            torch.zeros(2, 8), torch.zeros(2, 7), torch.ones(2), VocabShard(5), DivergenceSpec(DivergenceKind.JSD)
        )


@pytest.mark.parametrize("tail", [0.5, 0.1, 1e-2])
def test_a_tail_above_one_hundredth_is_held_to_1e_5(tail: float) -> None:
    head = torch.tensor([[0.75 * (1 - tail), 0.25 * (1 - tail)]], dtype=torch.float64)
    other = torch.tensor([[0.3, 0.4]], dtype=torch.float64)
    spec = DivergenceSpec(DivergenceKind.REVERSE)
    got = restricted_divergence(head.log().float(), other.log().float(), spec, Estimator.TAIL).item()
    whole = [[*row, 1 - sum(row)] for row in (head[0].tolist(), other[0].tolist())]
    student, teacher = ([math.log(p) for p in row] for row in whole)
    assert got == pytest.approx(plain_divergence(student, teacher, "reverse"), rel=1e-5)


def test_a_head_without_tail_keeps_a_finite_value_and_gradient() -> None:
    head = torch.tensor([[0.0, -40.0]], requires_grad=True)
    value = restricted_divergence(
        head, torch.tensor([[-0.1, -3.0]]), DivergenceSpec(DivergenceKind.JSD), Estimator.TAIL
    )
    torch.autograd.backward(value.sum())
    assert head.grad is not None
    assert bool(value.isfinite().all() and head.grad.isfinite().all())


def test_the_sampled_reverse_kl_has_value_gap_and_gradient_gap() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    values = sampled_reverse_kl(log_probs, torch.tensor([-1.5, -0.5]))
    torch.autograd.backward(values.sum())
    assert values.tolist() == [0.5, -1.5]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.5, -1.5]
