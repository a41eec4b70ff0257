"""Reports of openclawrl: a judgement of one sample, and hinted prompts; every bad one is refused with the reason."""

import math
from dataclasses import replace

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.batching import ReportView
from atoll.families.openclawrl.report import MAX_CANDIDATES, JudgedTurns, hinted_prompts
from pydantic import JsonValue

from tests.families.rows import make_report

RULE = JudgedTurns()


def hinted(candidates: JsonValue) -> ReportView:
    return replace(make_report("r"), metadata={"hint_candidates": candidates})


@pytest.mark.parametrize("score", [1.0, 0.0, -1.0])
def test_a_judgement_with_or_without_candidates_is_taken(score: float) -> None:
    for report in (
        make_report("r", score=score),
        replace(hinted([[5, 6], [7]]), score=score),
        hinted([]),
        hinted(None),
    ):
        RULE.validate(report)


def test_candidates_become_prompts_in_their_order() -> None:
    assert [prompt.tolist() for prompt in hinted_prompts(hinted([[5, 6], [7]]))] == [[5, 6], [7]]
    assert hinted_prompts(make_report("r")) == []


@pytest.mark.parametrize("score", [0.5, 2.0, -0.1, None, math.nan])
def test_another_score_is_refused(score: float | None) -> None:
    with pytest.raises(InvalidInput, match="score: ") as caught:
        RULE.validate(make_report("r", score=score))
    assert caught.value.field == "score"


@pytest.mark.parametrize(
    ("candidates", "field", "says"),
    [
        ("try again", "metadata.hint_candidates", "a list of at most 64 prompts expected, got 'try again'"),
        ({"0": [5]}, "metadata.hint_candidates", "a list of at most 64 prompts expected"),
        ([[5]] * (MAX_CANDIDATES + 1), "metadata.hint_candidates", "got 65 of them"),
        ([[5], []], "metadata.hint_candidates[1]", "at least one token id expected, got []"),
        ([5, 6], "metadata.hint_candidates[0]", "at least one token id expected, got 5"),
        ([["5"]], "metadata.hint_candidates[0]", "token ids from 0 up expected, got '5'"),
        ([[5, -1]], "metadata.hint_candidates[0]", "token ids from 0 up expected, got -1"),
        ([[5, 1.5]], "metadata.hint_candidates[0]", "got 1.5"),
        ([[True]], "metadata.hint_candidates[0]", "got True"),
        ([[2**31]], "metadata.hint_candidates[0]", "got 2147483648"),
    ],
)
def test_bad_candidates_are_refused_by_their_place(candidates: JsonValue, field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        RULE.validate(hinted(candidates))
    assert says in caught.value.message
    assert caught.value.field == field
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED


def test_a_report_of_two_samples_is_refused() -> None:
    with pytest.raises(InvalidInput, match="receipts: at most 1 expected, got 2"):
        RULE.validate(make_report("r", receipts=("a", "b")))
