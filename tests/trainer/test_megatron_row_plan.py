"""Rows are dealt to ranks and micro-batches by tokens, each row once."""

from atoll.trainer.megatron.row_plan import plan_rows
from atoll.trainer.megatron.settings import MicroBatchLimit
from hypothesis import given
from hypothesis import strategies as st


def test_the_longest_row_balances_two_shorter_ones() -> None:
    assert plan_rows([9, 4, 5], 2, MicroBatchLimit()) == (((0,),), ((1, 2),))


def test_a_micro_batch_ends_at_its_token_and_row_limits() -> None:
    assert plan_rows([3, 3, 3, 9, 1], 1, MicroBatchLimit(tokens=6)) == (((0, 1), (2,), (3,), (4,)),)
    assert plan_rows([1, 1, 1], 1, MicroBatchLimit(rows=2)) == (((0, 1), (2,)),)


def test_without_rows_every_rank_gets_one_empty_micro_batch() -> None:
    assert plan_rows([], 2, MicroBatchLimit()) == (((),), ((),))


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    assert plan_rows([5], 2, MicroBatchLimit()) == (((0,),), ((),))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 8),
)
def test_every_row_is_trained_once_and_ranks_keep_in_step(
    lengths: list[int], data: int, tokens: int, rows: int
) -> None:
    limit = MicroBatchLimit(tokens, rows)
    plan = plan_rows(lengths, data, limit)
    assert sorted(row for share in plan for micro_batch in share for row in micro_batch) == list(range(len(lengths)))
    assert len({len(share) for share in plan}) == 1
    for share in plan:
        for micro_batch in share:
            assert len(micro_batch) <= rows
            assert len(micro_batch) == 1 or sum(lengths[row] for row in micro_batch) <= tokens
    loads = [sum(lengths[row] for micro_batch in share for row in micro_batch) for share in plan]
    assert max(loads) - min(loads) <= max(lengths)
