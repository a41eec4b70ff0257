"""Batches of complete groups: formed oldest first, whatever the order of arrival, and reports checked on arrival."""

import math
import random

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.batching import ReportView
from atoll.families.group_ready import GroupReady
from pydantic import JsonValue

from tests.families.rows import make_report

RULE = GroupReady(groups_per_step=2, n_samples_per_prompt=2)


def arrivals(*groups: str) -> list[ReportView]:
    """Reports r0, r1, ... of these groups, a second apart."""
    return [make_report(f"r{number}", at=number, group=group) for number, group in enumerate(groups)]


def test_a_batch_holds_complete_groups_and_leaves_the_rest_pending() -> None:
    assert RULE.form(arrivals("a", "b", "c", "b", "a")) == [("r0", "r4", "r1", "r3")]


def test_nothing_is_formed_before_enough_groups_are_complete() -> None:
    assert RULE.form([]) == []
    assert RULE.form(arrivals("a", "a", "b", "c", "d")) == []


def test_groups_are_taken_oldest_first() -> None:
    assert RULE.form(arrivals("a", "b", "b", "c", "c", "a")) == [("r0", "r5", "r1", "r2")]


def test_several_batches_are_formed_at_once() -> None:
    assert RULE.form(arrivals(*"aabbccdd")) == [("r0", "r1", "r2", "r3"), ("r4", "r5", "r6", "r7")]


def test_the_order_of_arrival_does_not_matter() -> None:
    reports = arrivals(*"abcabcddeaef")
    expected = RULE.form(reports)
    assert len(expected) == 2
    for seed in range(20):
        shuffled = random.Random(seed).sample(reports, len(reports))
        assert RULE.form(shuffled) == expected


def test_reports_of_the_same_instant_are_ordered_by_id() -> None:
    reports = [make_report(f"r{n}", group=group) for n, group in ((3, "a"), (1, "b"), (2, "a"), (0, "b"))]
    assert RULE.form(reports) == [("r0", "r1", "r2", "r3")]


def test_a_second_group_of_the_same_name_goes_into_a_later_batch() -> None:
    assert RULE.form(arrivals(*"aaaa")) == []
    assert RULE.form(arrivals(*"aaaabb")) == [("r0", "r1", "r4", "r5")]
    assert RULE.form(arrivals(*"aaaabbcc")) == [("r0", "r1", "r4", "r5"), ("r2", "r3", "r6", "r7")]


def test_a_good_report_is_accepted_with_metadata_of_its_own() -> None:
    report = make_report("r", group="question 7")
    RULE.validate(report)
    assert RULE.group_of(report) == "question 7"


@pytest.mark.parametrize("group", [None, "", 7, ["a"], {"a": 1}, "x" * 129, True])
def test_a_bad_group_is_refused(group: JsonValue) -> None:
    refuse(make_report("r", group=group), "metadata.group")


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf, 1e16, -1e308])
def test_a_score_that_is_not_finite_is_refused(score: float | None) -> None:
    refuse(make_report("r", score=score), "score")


def test_a_report_about_nothing_is_refused() -> None:
    refuse(make_report("r", receipts=()), "receipts")


def refuse(report: ReportView, field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as caught:
        RULE.validate(report)
    assert caught.value.field == field
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED
