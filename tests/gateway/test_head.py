"""What a head means for engines and samples."""

import pytest
from atoll.gateway.head import Head, LostVersions, serves_now, why_never_admitted

HEAD = Head(7, "2:7", frozenset({"2:7"}), frozenset({"2:6"}))


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
    why = why_never_admitted(version, HEAD, max_staleness)
    assert why is not None and why.reason.startswith(f"stale_sample: produced by {version}")


def test_a_rolled_back_incarnation_is_never_admitted_however_stale_it_may_be() -> None:
    why = why_never_admitted("1:7", HEAD, 100)
    assert why is not None
    assert why.reason == "stale_sample: produced by 1:7, the head is 2:7, of another incarnation"


def test_versions_with_the_weights_of_the_head_are_as_fresh_as_it() -> None:
    head = Head(7, "2:7", frozenset({"2:5", "2:6", "2:7"}))
    assert why_never_admitted("2:5", head, 0) is None
    assert why_never_admitted("2:4", head, 0) is not None


def test_an_engine_that_reports_an_older_name_of_the_heads_weights_serves_the_head() -> None:
    head = Head(7, "2:7", frozenset({"2:5", "2:6", "2:7"}), frozenset({"2:5", "2:6"}))
    assert serves_now("2:5", head) and not serves_now("2:4", head)


def test_samples_of_a_lost_version_say_so_and_those_that_a_recovery_brought_back_are_fresh() -> None:
    head = Head(8, "2:8", frozenset({"2:8", "1:5"}), lost=(LostVersions(1, 6, 7),))
    assert why_never_admitted("1:5", head, 0) is None
    lost = why_never_admitted("1:7", head, 100)
    assert lost is not None and lost.code == "lost_version"
    older = why_never_admitted("1:4", head, 100)
    assert older is not None and older.code == "stale_sample"
