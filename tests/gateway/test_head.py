"""What a head means for engines and samples."""

import pytest
from atoll.gateway.head import Head, serves_now, why_never_admitted

HEAD = Head(7, "2:7", "2:6", 7)


@pytest.mark.parametrize("version", ["2:7", "2:6", "2:8", "3:8"])
def test_the_head_its_parent_and_what_is_newer_may_answer(version: str) -> None:
    assert serves_now(version, HEAD)


@pytest.mark.parametrize("version", ["2:5", "1:7", "1:9", "default", "0:0", ""])
def test_nothing_else_may_answer(version: str) -> None:
    assert not serves_now(version, HEAD)


@pytest.mark.parametrize(("version", "max_staleness"), [("2:7", 0), ("2:6", 1), ("2:5", 2), ("2:8", 0), ("3:8", 0)])
def test_a_sample_that_may_be_admitted_now_or_later_is_left_to_the_trainer(version: str, max_staleness: int) -> None:
    assert why_never_admitted(version, HEAD, max_staleness) is None


@pytest.mark.parametrize(("version", "max_staleness"), [("2:6", 0), ("2:4", 2)])
def test_a_sample_that_fell_behind_is_never_admitted(version: str, max_staleness: int) -> None:
    reason = why_never_admitted(version, HEAD, max_staleness)
    assert reason is not None and reason.startswith(f"stale_sample: produced by {version}")


def test_a_rolled_back_incarnation_is_never_admitted_however_stale_it_may_be() -> None:
    reason = why_never_admitted("1:7", HEAD, 100)
    assert reason == "stale_sample: produced by 1:7, the head is 2:7, of another incarnation"


def test_versions_with_the_weights_of_the_head_are_as_fresh_as_it() -> None:
    head = Head(7, "2:7", "2:6", same_weights_since=5)
    assert why_never_admitted("2:5", head, 0) is None
    assert why_never_admitted("2:4", head, 0) is not None
