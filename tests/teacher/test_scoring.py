"""Scoring with a faked engine: what fails alone, what bounds what, and in which order results come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.engine_types import EngineRefused, EngineUnavailable
from atoll.common.errors import InvalidInput
from atoll.teacher.engine import Engine, EngineState
from atoll.teacher.engine_pool import EnginePool
from atoll.teacher.score_service import check_batch
from atoll.teacher.scoring import ERROR_BYTES, MAX_TRIES, Scored, Scorer
from atoll.teacher.sequences import ScoringLimits

from tests.fakes.scoring_engine import FakeScoringEngine
from tests.teacher.teacher_world import request

LIMITS = ScoringLimits(vocabulary_size=100, max_sequence_length=12, max_top_k=4)


async def stream(*requests: teacher_service_pb2.ScoreRequest) -> AsyncIterator[teacher_service_pb2.ScoreRequest]:
    for item in requests:
        yield item


async def outcomes(scorer: Scorer, *requests: teacher_service_pb2.ScoreRequest) -> dict[str, Scored]:
    async with asyncio.timeout(5):
        return {scored.sequence_id: scored async for scored in scorer.score(stream(*requests))}


def scorer_of(engine: FakeScoringEngine, in_flight_tokens: int = 1000, call_bytes: int = 1 << 20) -> Scorer:
    pool = EnginePool([Engine("http://engine", engine, in_flight_tokens)], wait_s=0.05)
    pool.join(pool.engines[0], "0:0")
    return Scorer(pool, LIMITS, call_bytes)


async def answer_doubts(scorer: Scorer, *lives: bool) -> None:
    """Stands for the engine's watch: says at each doubt whether the engine lives; one that died is soon back."""
    (engine,) = scorer.pool.engines
    for each in lives:
        await engine.changed.wait()
        engine.changed.clear()
        if not each:
            scorer.pool.leave(engine, EngineState.AWAY, "died")
            engine.changed.clear()
            await asyncio.sleep(0.01)
            scorer.pool.join(engine, "0:0")
        engine.tell(each)


async def test_bad_sequences_fail_alone_and_never_reach_the_engine() -> None:
    engine = FakeScoringEngine()
    odd = teacher_service_pb2.ScoreRequest(id="odd", prompt_ids=b"123", response_ids=b"1234")
    got = await outcomes(
        scorer_of(engine),
        request("outside", [1], [100]),
        request("negative", [-1], [1]),
        request("no-response", [1], []),
        request("no-prompt", [], [1]),
        request("long", [1] * 6, [1] * 7),
        request("wide", [1], [1], top_k=5),
        odd,
        request("good", [5, 6], [7, 8]),
        request("x" * 65, [1], [2]),
    )
    good = got.pop("good")
    assert good.result is not None
    np.testing.assert_array_equal(good.result.log_probs, np.asarray([-0.007, -0.008], dtype=np.float32))
    reasons = {name: scored.error and scored.error.reason for name, scored in got.items()}
    assert reasons.pop("long") == errors_pb2.REASON_SEQUENCE_TOO_LONG
    assert set(reasons.values()) == {errors_pb2.REASON_INVALID_FIELD}
    assert got["outside"].error is not None and "response_ids[0] is 100" in got["outside"].error.message
    assert engine.started == [5]


async def test_a_second_sequence_of_the_same_id_fails() -> None:
    engine = FakeScoringEngine()
    scorer = scorer_of(engine)
    got = [s async for s in scorer.score(stream(request("a", [1], [2]), request("a", [3], [4])))]
    assert sorted(scored.error is None for scored in got) == [False, True]
    assert engine.started == [1]


async def test_a_refusal_of_the_engine_is_the_sequences_own() -> None:
    engine = FakeScoringEngine()
    engine.failures = {4: [EngineRefused("no")], 6: [RuntimeError("a defect")]}
    scorer = scorer_of(engine)
    got = await outcomes(scorer, request("b", [4], [1]), request("d", [6], [1]), request("c", [5], [1, 2]))
    assert not got["b"].retryable
    assert got["d"].error is not None and "incident" in got["d"].error.message
    assert got["c"].result is not None
    measures = scorer.measures
    assert (measures.sequences, measures.response_tokens, measures.failures) == (1, 2, 2)


async def test_what_a_living_engine_does_not_answer_is_asked_again_and_then_said_to_be_retryable() -> None:
    engine = FakeScoringEngine()
    engine.failures = {3: [EngineUnavailable("busy")] * 2, 4: [EngineUnavailable("busy")] * MAX_TRIES}
    scorer = scorer_of(engine)
    watch = asyncio.create_task(answer_doubts(scorer, *[True] * 6))
    got = await outcomes(scorer, request("a", [3], [1]), request("b", [4], [1]))
    watch.cancel()
    assert got["a"].result is not None
    assert got["b"].retryable
    assert (engine.started.count(3), engine.started.count(4)) == (3, MAX_TRIES)


async def test_a_sequence_that_kills_engines_fails_alone_and_its_neighbours_are_scored() -> None:
    engine = FakeScoringEngine()
    engine.failures = {3: [EngineUnavailable("gone")] * 9, 4: [EngineUnavailable("gone")]}
    scorer = scorer_of(engine)
    watch = asyncio.create_task(answer_doubts(scorer, *[False] * 4))
    got = await outcomes(scorer, request("bad", [3], [1]), request("good", [4], [1]))
    watch.cancel()
    assert got["good"].result is not None
    assert got["bad"].error is not None and not got["bad"].retryable
    assert "the engine died 3 times while it scored this sequence" in got["bad"].error.message
    assert engine.started.count(3) == 3


async def test_weights_that_are_not_the_proven_ones_are_never_a_result() -> None:
    engine = FakeScoringEngine()
    scorer = scorer_of(engine)
    scorer.pool.engines[0].weight_version = "0:1"
    watch = asyncio.create_task(answer_doubts(scorer, *[True] * MAX_TRIES))
    got = await outcomes(scorer, request("a", [3], [1]))
    watch.cancel()
    assert got["a"].error is not None and "it must be frozen" in got["a"].error.message


async def test_results_come_as_they_are_ready() -> None:
    engine = FakeScoringEngine()
    order = []
    async with aclosing(scorer_of(engine).score(stream(request("slow", [9], [1]), request("fast", [1], [1])))) as got:
        async for scored in got:
            order.append(scored.sequence_id)
            engine.go_on.set()
    assert order == ["fast", "slow"]


async def test_calls_together_never_have_more_tokens_in_the_engine_than_allowed() -> None:
    engine = FakeScoringEngine()
    scorer = scorer_of(engine, in_flight_tokens=10)
    calls = [[request(f"{call}-{n}", [1 + n % 3], [1, 2]) for n in range(20)] for call in range(2)]
    got = await asyncio.gather(*(outcomes(scorer, *call) for call in calls))
    assert [len(each) for each in got] == [20, 20]
    assert 6 <= engine.most_in_flight <= 10


async def test_a_call_whose_results_are_not_taken_is_not_read_further() -> None:
    engine = FakeScoringEngine()
    read = 0

    async def endless() -> AsyncIterator[teacher_service_pb2.ScoreRequest]:
        nonlocal read
        while True:
            read += 1
            yield request(f"s{read}", [1], [2])

    one = ERROR_BYTES + 4 * 2 + 4
    async with aclosing(scorer_of(engine, call_bytes=5 * one).score(endless())) as got:
        await anext(got)
        for _ in range(50):
            await asyncio.sleep(0)
        # Five sequences fit, the sixth waits.
        assert read == 6
        await anext(got)


async def test_a_call_that_is_closed_stops_what_still_runs() -> None:
    engine = FakeScoringEngine()
    async with aclosing(scorer_of(engine).score(stream(request("held", [9], [1]), request("done", [1], [1])))) as got:
        assert (await anext(got)).sequence_id == "done"
        assert engine.in_flight_tokens == 2
    assert engine.in_flight_tokens == 0


@pytest.mark.parametrize("names", [[], ["a", "a"], [str(n) for n in range(1025)]], ids=["empty", "twice", "too many"])
def test_a_batch_that_is_no_batch_is_refused_as_a_whole(names: list[str]) -> None:
    batch = teacher_service_pb2.ScoreBatchRequest(sequences=[request(name, [1], [2]) for name in names])
    with pytest.raises(InvalidInput) as refused:
        check_batch(batch)
    assert refused.value.field.startswith("sequences")
