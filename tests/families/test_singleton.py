"""Reports that are learned from one by one: batches are the oldest of them."""

import math

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.singleton import Singleton

from tests.families.rows import make_report

REPORTS = [make_report(f"r{number}", at=number) for number in (3, 1, 0, 2)]


def test_each_report_is_a_batch_and_a_group_of_its_own() -> None:
    assert Singleton().form(REPORTS) == [("r0",), ("r1",), ("r2",), ("r3",)]
    assert Singleton().group_of(REPORTS[0]) == "r3"
    assert Singleton().form([]) == []


def test_a_batch_waits_until_it_is_full() -> None:
    assert Singleton(batch_size=3).form(REPORTS) == [("r0", "r1", "r2")]
    assert Singleton(batch_size=5).form(REPORTS) == []


def test_good_reports_are_accepted() -> None:
    Singleton().validate(make_report("r"))
    Singleton(score_required=False).validate(make_report("r", score=None))
    Singleton(max_receipts=None).validate(make_report("r", receipts=("a", "b")))


@pytest.mark.parametrize(
    ("score", "receipts", "field"),
    [
        (None, ("a",), "score"),
        (math.nan, ("a",), "score"),
        (math.inf, ("a",), "score"),
        (1.0, (), "receipts"),
        (1.0, ("a", "b"), "receipts"),
    ],
)
def test_bad_reports_are_refused(score: float | None, receipts: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as caught:
        Singleton().validate(make_report("r", score=score, receipts=receipts))
    assert caught.value.field == field
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED


def test_a_score_that_is_not_required_must_still_be_finite() -> None:
    with pytest.raises(InvalidInput, match=r"score: a number within .* expected, got nan"):
        Singleton(score_required=False).validate(make_report("r", score=math.nan))
