"""Cuts of a batch into optimizer steps hold every row once and never split a rollout."""

import pytest
from atoll.common.errors import InvalidInput
from atoll.families.signal import StepScheduling

from tests.families.rows import make_row

ROWS = [make_row("a", group="g"), make_row("b", group="h"), make_row("c", group="g"), make_row("d", group="i")]


def test_whole_is_one_step() -> None:
    assert StepScheduling.whole(ROWS).steps == ((0, 1, 2, 3),)


def test_groups_stay_together_and_the_last_step_takes_what_is_left() -> None:
    cut = StepScheduling.by_groups(ROWS, 2)
    assert cut.steps == ((0, 1, 2), (3,))
    cut.validate(ROWS)


@pytest.mark.parametrize("steps", [((0, 1, 2),), ((0, 1, 2, 3, 3),), ((0, 1, 2), (2, 3)), ((0, 1, 2, 4),)])
def test_a_lost_repeated_or_unknown_row_is_refused(steps: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidInput, match="each of the 4 rows once"):
        StepScheduling(steps).validate(ROWS)


def test_a_rollout_split_over_two_steps_is_refused() -> None:
    rows = [make_row("a", rollout="r"), make_row("b", rollout="r")]
    StepScheduling(((0, 1),)).validate(rows)
    with pytest.raises(InvalidInput, match="rollout r is split over optimizer steps 0 and 1"):
        StepScheduling(((0,), (1,))).validate(rows)


def test_groups_may_be_dropped_and_their_rows_are_accounted_for() -> None:
    cut = StepScheduling.by_groups(ROWS, 1, without={"g"})
    assert cut == StepScheduling(((1,), (3,)), dropped=(0, 2))
    cut.validate(ROWS)


@pytest.mark.parametrize("dropped", [(0,), (0, 2, 2), (0, 2, 1)])
def test_a_row_is_trained_or_dropped_and_never_both(dropped: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"each of the 4 rows once, got .* and \(0.* dropped"):
        StepScheduling(((1,), (3,)), dropped).validate(ROWS)
