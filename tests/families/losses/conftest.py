"""One start of the ranks answers all kernel tests."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.families.cases import VOCAB
from tests.families.losses.kernel_cases import Answer, all_answers
from tests.families.ranks import on_shards

AnswersOf = Callable[[int], list[dict[str, Answer]]]


@pytest.fixture(scope="session")
def answers_of() -> AnswersOf:
    """shards -> [rank] -> answers by name."""
    return cache(lambda shards: on_shards(shards, VOCAB, all_answers))
