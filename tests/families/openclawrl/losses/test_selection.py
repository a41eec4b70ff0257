"""Which candidate teaches and which ids, on overlaps small enough to count by hand."""

import pytest
import torch
from atoll.families.openclawrl.losses.selection import CandidateScores, Lesson, choose_lesson
from atoll.families.openclawrl.spec import HintScope, HintSelection, Subset

SAMPLER = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 5, -1], [-1, -1, -1]])
TRAINED = torch.tensor([True, True, True, False])


def candidate(length: int, native: list[list[int]], offset: float) -> CandidateScores:
    """Log-probs that tell where they come from: offset + token / 10 + place / 100; 50 more for native ones."""
    tokens, places = torch.meshgrid(torch.arange(4.0), torch.arange(3.0), indexing="ij")
    scores = offset + tokens / 10 + places / 100
    return CandidateScores(length, torch.tensor(native), scores + 50, scores)


CANDIDATES = [
    candidate(9, [[3, 8, 9], [1, 2, 3], [9, 8, 4], [7, 8, 9]], 100.0),  # overlaps 1, 3, 0
    candidate(7, [[2, 3, 9], [8, 9, 7], [5, 4, 1], [7, 8, 9]], 200.0),  # overlaps 2, 0, 2
    candidate(7, [[9, 3, 2], [3, 2, 9], [4, 9, 8], [7, 8, 9]], 300.0),  # overlaps 2, 2, 1
]


def lesson(selection: HintSelection, subset: Subset = Subset.STUDENT, which: slice = slice(None)) -> Lesson:
    return choose_lesson(CANDIDATES[which], SAMPLER, TRAINED, selection, subset)


def chosen(found: Lesson) -> list[int]:
    """The candidate of each token that has ids, by its offset."""
    return [int(value // 100) - 1 for value in found.log_probs[:3, 0].tolist()]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (HintSelection.SHORTEST, [1, 1, 1]),  # the first of two of 7 tokens
        (HintSelection.TOKEN_OPTIMAL, [1, 0, 1]),  # token 0: candidates 1 and 2 tie
        (HintSelection.SEQUENCE_OPTIMAL, [2, 2, 2]),  # 4, 4 and 5 shared ids
    ],
)
def test_the_selection_counts_shared_ids(selection: HintSelection, expected: list[int]) -> None:
    assert chosen(lesson(selection)) == expected


def test_a_tie_over_the_sequence_goes_to_the_first() -> None:
    assert chosen(lesson(HintSelection.SEQUENCE_OPTIMAL, which=slice(0, 2))) == [0, 0, 0]


def test_tokens_that_are_not_trained_do_not_vote() -> None:
    found = choose_lesson(
        CANDIDATES[:2],
        SAMPLER,
        torch.tensor([True, False, True, False]),
        HintSelection.SEQUENCE_OPTIMAL,
        Subset.STUDENT,
    )
    assert chosen(found) == [1, 1, 1]


@pytest.mark.parametrize(
    ("scope", "trained", "expected"),
    [
        (HintScope.SPAN, [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]),
        (HintScope.SPAN, [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]),
        (HintScope.SPAN, [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]),  # one span is the sample
        (HintScope.SPAN, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        (HintScope.SAMPLE, [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]),
        (HintScope.SAMPLE, [0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]),
    ],
)
def test_every_span_of_trained_tokens_may_choose_for_itself(
    scope: HintScope, trained: list[int], expected: list[int]
) -> None:
    first = CandidateScores(3, torch.tensor([[9], [1], [1], [9], [9], [9]]), torch.zeros(6, 1), torch.full((6, 1), 0.0))
    second = CandidateScores(3, torch.tensor([[9], [9], [9], [9], [1], [1]]), torch.zeros(6, 1), torch.ones(6, 1))
    mask = torch.tensor(trained, dtype=torch.bool)
    sampler = torch.ones(6, 1, dtype=torch.int64)
    found = choose_lesson([first, second], sampler, mask, HintSelection.SEQUENCE_OPTIMAL, Subset.STUDENT, scope)
    assert found.log_probs[:, 0].tolist() == expected


def test_the_teachers_ids_count_as_far_as_the_engine_named_any() -> None:
    # Token 2: the engine named 2, and the third of candidate 0 is one of them: it does not count.
    found = lesson(HintSelection.SHORTEST, Subset.TEACHER, slice(0, 1))
    assert found.ids.tolist() == [[3, 8, 9], [1, 2, 3], [9, 8, -1], [-1, -1, -1]]
    assert found.overlap.tolist() == pytest.approx([1 / 3, 1.0, 0.0, 0.0])


def test_the_students_subset_is_what_the_engine_named() -> None:
    found = lesson(HintSelection.SHORTEST)
    assert found.ids.tolist() == SAMPLER.tolist()
    assert found.ids.dtype == torch.int32
    assert found.log_probs[1].tolist() == pytest.approx([200.1, 200.11, 200.12])
    assert found.log_probs[2].tolist() == pytest.approx([200.2, 200.21, 0.0])


def test_the_overlap_keeps_shared_ids_in_the_engines_places() -> None:
    found = lesson(HintSelection.SHORTEST, Subset.OVERLAP)
    assert found.ids.tolist() == [[-1, 2, 3], [-1, -1, -1], [4, 5, -1], [-1, -1, -1]]
    assert found.log_probs[0].tolist() == pytest.approx([0.0, 200.01, 200.02])


def test_the_teachers_subset_comes_with_its_own_log_probs() -> None:
    found = lesson(HintSelection.TOKEN_OPTIMAL, Subset.TEACHER)
    assert found.ids.tolist() == [[2, 3, 9], [1, 2, 3], [5, 4, -1], [-1, -1, -1]]
    assert found.log_probs[0].tolist() == pytest.approx([250.0, 250.01, 250.02])
    assert found.log_probs[1].tolist() == pytest.approx([150.1, 150.11, 150.12])
