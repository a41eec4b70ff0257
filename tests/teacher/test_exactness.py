"""The service's scores against a float32 forward by transformers, over sequences that break assumptions about text."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from atoll.api.teacher.v1 import teacher_service_pb2
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.engines import VOCAB_SIZE, RunningEngine
from tests.forward import all_log_probs
from tests.teacher.teacher_world import Result, World, request, running

TOLERANCE = 1e-4
TIE = 2e-4
"""Log-probs that are closer than this may swap their places."""
SPECIAL = (0, 1, 2)
WIDTHS = (1, 8, 100)


@pytest.fixture
async def world(teacher_engine: RunningEngine) -> AsyncIterator[World]:
    async with running(teacher_engine.base_url, watch_s=30) as world:
        yield world


@dataclass(frozen=True)
class Case:
    name: str
    prompt: list[int]
    response: list[int]
    top_k: int

    def request(self) -> teacher_service_pb2.ScoreRequest:
        return request(self.name, self.prompt, self.response, self.top_k)


def tokenizer_of(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text one byte each: decodes to it, and is not what the tokenizer makes of it."""
    by_text = tokenizer.get_vocab()
    return [by_text[piece] for token in tokenizer.encode(text).tokens for piece in token]


def cases(model: Path, count: int) -> Iterator[Case]:
    """Random ids; every third sequence holds a text in other than its own splits, special tokens, and the last id,
    which SGLang reports as 0."""
    draw = np.random.default_rng(11)
    split = bytewise(tokenizer_of(model), "def indent(text, prefix, predicate=None): return None")
    for number in range(count):
        prompt = draw.integers(0, VOCAB_SIZE, int(draw.integers(1, 901))).tolist()
        response = draw.integers(0, VOCAB_SIZE, int(draw.integers(1, 601))).tolist()
        if number % 3 == 0:
            inserted = [*split, *SPECIAL, VOCAB_SIZE - 1]
            at = int(draw.integers(0, len(response)))
            response = [*response[:at], *inserted, *response[at:]][:600]
            prompt = [*prompt, *draw.permutation(inserted).tolist()][-900:]
        yield Case(f"s{number}", prompt, response, WIDTHS[number % len(WIDTHS)])


def check(model: Path, case: Case, result: Result) -> float:
    """The largest difference of the sequence."""
    assert isinstance(result, dict), result
    table = all_log_probs(model, case.prompt, case.response, 1.0).astype(np.float64)
    wanted = np.take_along_axis(table, np.asarray(case.response)[:, None], axis=1)[:, 0]
    worst = float(np.abs(result["log_probs"] - wanted).max())
    ids, log_probs = result["top_k_ids"], result["top_k_log_probs"]
    assert ids.shape == log_probs.shape == (len(case.response), case.top_k)
    order = np.argsort(-table, axis=1, kind="stable")
    ranked = np.take_along_axis(table, order, axis=1)
    worst = max(worst, float(np.abs(log_probs - ranked[:, : case.top_k]).max()))
    worst = max(worst, float(np.abs(log_probs - np.take_along_axis(table, ids.astype(np.int64), axis=1)).max()))
    swapped = ids != order[:, : case.top_k]
    assert not (swapped & ~tied(ranked, case.top_k)).any(), f"{case.name}: ids differ where nothing is tied"
    return worst


def tied(ranked: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """[R, K] where a neighbour in the order is so close that rounding may put it first."""
    close = np.abs(np.diff(ranked[:, : k + 1], axis=1)) < TIE
    after = close if close.shape[1] == k else np.pad(close, ((0, 0), (0, 1)))
    before = np.pad(close[:, : k - 1], ((0, 0), (1, 0)))
    return np.asarray(after | before)


async def largest_difference(world: World, model: Path, sent: Sequence[Case]) -> float:
    got = await world.scores(case.request() for case in sent)
    assert set(got) == {case.name for case in sent}
    return max(await asyncio.to_thread(lambda: [check(model, case, got[case.name]) for case in sent]))


async def test_a_dozen_random_sequences_are_scored_as_by_a_float32_forward(
    world: World, teacher_engine: RunningEngine
) -> None:
    sent = list(cases(teacher_engine.model_path, 12))
    assert await largest_difference(world, teacher_engine.model_path, sent) < TOLERANCE


@pytest.mark.slow
async def test_two_hundred_random_sequences_are_scored_as_by_a_float32_forward(
    world: World, teacher_engine: RunningEngine
) -> None:
    sent = list(cases(teacher_engine.model_path, 200))
    assert max(len(case.prompt) for case in sent) > 850 and max(len(case.response) for case in sent) > 550
    difference = await largest_difference(world, teacher_engine.model_path, sent)
    print(f"largest difference: {difference:.2g} nats")
    assert difference < TOLERANCE


async def test_a_sample_whose_text_has_other_tokens_is_scored_by_its_ids(
    world: World, teacher_engine: RunningEngine
) -> None:
    tokenizer = tokenizer_of(teacher_engine.model_path)
    text = " return the indentation of the text"
    split, canonical = bytewise(tokenizer, text), tokenizer.encode(text).ids
    assert tokenizer.decode(split) == tokenizer.decode(canonical) and len(split) > len(canonical)
    sent = [Case("split", [5, 6], split, 8), Case("canonical", [5, 6], canonical, 8)]
    assert await largest_difference(world, teacher_engine.model_path, sent) < TOLERANCE


async def test_every_id_of_the_vocabulary_is_scored_and_ranked_under_its_own_number(
    world: World, teacher_engine: RunningEngine
) -> None:
    draw = np.random.default_rng(2)
    sent = [Case("all", [3], draw.permutation(VOCAB_SIZE).tolist(), 100)]
    assert await largest_difference(world, teacher_engine.model_path, sent) < TOLERANCE
