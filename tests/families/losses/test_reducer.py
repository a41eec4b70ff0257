"""The reducer: weighted partial sums over trained tokens, and the rows whose numbers are not finite."""

import math

import pytest
import torch
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.vocab import VocabShard

from tests.families.losses.test_batch import ROWS

VALUES = torch.tensor([1.0, math.nan, 3.0, 4.0, 5.0])


def reducer() -> Reducer:
    return Reducer(build_loss_batch(ROWS, shard=VocabShard(10)))


def test_each_term_is_summed_with_its_own_weights() -> None:
    reduce = reducer()
    assert reduce(VALUES).item() == pytest.approx(0.1 * 8 + 0.7 * 5, rel=1e-12)
    assert reduce.regularizer(VALUES).item() == pytest.approx(2 * (0.1 * 8 + 0.7 * 5), rel=1e-12)
    assert reduce.metric(VALUES).item() == pytest.approx(3 * (0.1 * 8 + 0.7 * 5), rel=1e-12)
    assert reduce.bad_rows.tolist() == [False, False]


def test_the_gradient_of_a_masked_token_is_zero() -> None:
    values = VALUES.clone().requires_grad_()
    torch.autograd.backward(reducer()(values))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.1, 0, 0.1, 0.1, 0.7])


def test_inputs_are_neutral_under_the_mask_before_arithmetic() -> None:
    values = VALUES.clone().requires_grad_()
    reduce = reducer()
    torch.autograd.backward(reduce(reduce.neutral(values, 1.0).log().exp()))
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_trained_token_that_is_not_finite_marks_its_row(bad: float) -> None:
    for call in (Reducer.__call__, Reducer.regularizer, Reducer.neutral, Reducer.require_finite):
        reduce = reducer()
        call(reduce, torch.tensor([1.0, 2.0, 3.0, 4.0, bad]))
        assert reduce.bad_rows.tolist() == [False, True]


def test_a_token_sum_ignores_mask_and_weights_and_marks_what_it_takes() -> None:
    where = torch.tensor([True, True, False, False, True])
    reduce = reducer()
    values = torch.tensor([1.0, 2.0, math.nan, 4.0, 5.0], requires_grad=True)
    total = reduce.token_sum(values, where)
    torch.autograd.backward(total)
    assert total.item() == 8.0
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0, 0, 1]
    assert reduce.bad_rows.tolist() == [False, False]
    reduce.token_sum(VALUES, where)
    assert reduce.bad_rows.tolist() == [True, False]
