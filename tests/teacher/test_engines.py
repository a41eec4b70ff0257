"""A teacher in front of engines that die, come back, differ and are busy: every sequence is answered once."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.errors import BadConfiguration
from atoll.teacher.engine import EngineState
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.scoring_server import VOCABULARY, ScoringServer, expected, write_model
from tests.teacher.teacher_world import Result, World, request, running

SERVING = teacher_service_pb2.ENGINE_STATE_SERVING
AWAY = teacher_service_pb2.ENGINE_STATE_AWAY
REFUSED = teacher_service_pb2.ENGINE_STATE_REFUSED


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[ScoringServer]:
    async with ScoringServer(model) as server:
        yield server


def many(count: int) -> dict[str, teacher_service_pb2.ScoreRequest]:
    draw = np.random.default_rng(3)
    made = {}
    for number in range(count):
        prompt, response = (draw.integers(1, VOCABULARY, int(draw.integers(1, 30))).tolist() for _ in range(2))
        made[f"s{number}"] = request(f"s{number}", prompt, response, top_k=number % 3)
    return made


def check(sent: Mapping[str, teacher_service_pb2.ScoreRequest], got: Mapping[str, Result]) -> None:
    """Every sequence has its own log-probs."""
    assert set(got) == set(sent)
    for name, result in got.items():
        assert isinstance(result, dict), result
        prompt, response = (np.frombuffer(data, "<i4").tolist() for data in ids_of(sent[name]))
        np.testing.assert_allclose(result["log_probs"], expected(prompt, response), atol=1e-5)


def ids_of(sent: teacher_service_pb2.ScoreRequest) -> tuple[bytes, bytes]:
    return sent.prompt_ids, sent.response_ids


async def until_states(world: World, *states: int) -> teacher_service_pb2.GetTeacherResponse:
    async with asyncio.timeout(10):
        while True:
            told = await world.told()
            if [engine.state for engine in told.engines] == list(states):
                return told
            await asyncio.sleep(0.02)


async def test_an_engine_that_dies_under_way_and_comes_back_answers_every_sequence_once(server: ScoringServer) -> None:
    sent = many(60)
    async with running(server.url, in_flight_tokens=300) as world:
        server.gate.clear()
        scoring = asyncio.create_task(world.scores(sent.values()))
        while server.in_flight_tokens < 200:
            await asyncio.sleep(0.01)
        await server.stop()
        told = await until_states(world, AWAY)
        assert server.url in told.engines[0].detail
        server.gate.set()
        await server.start()
        check(sent, await asyncio.wait_for(scoring, 20))
        assert (await world.told()).sequences_scored == 60


async def test_health_and_the_teachers_state_tell_of_an_engine_that_is_away(server: ScoringServer) -> None:
    async with running(server.url, engine_wait_s=0.1) as world:
        address = f"127.0.0.1:{world.teacher.server.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            await server.stop()
            await until_states(world, AWAY)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 2
            await asyncio.sleep(0.2)
            error = (await world.scores([request("a", [1], [2])]))["a"]
            assert isinstance(error, teacher_service_pb2.ScoreError)
            assert error.retryable and "no engine has served for 0.1 s" in error.message
            await server.start()
            await until_states(world, SERVING)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            check(one := {"a": request("a", [1], [2])}, await world.scores(one.values()))


async def test_one_sequence_that_kills_the_engine_fails_and_all_others_are_scored(server: ScoringServer) -> None:
    sent = many(30)
    server.poison = 9

    async def revive() -> None:
        while True:
            if not server.listens:
                await asyncio.sleep(0.5)
                await server.start()
            await asyncio.sleep(0.01)

    async with running(server.url, in_flight_tokens=400) as world:
        reviving = asyncio.create_task(revive())
        got = await asyncio.wait_for(world.scores([request("bad", [9, 9], [2]), *sent.values()]), 60)
        reviving.cancel()
    error = got.pop("bad")
    assert isinstance(error, teacher_service_pb2.ScoreError)
    assert (error.reason, error.retryable) == (errors_pb2.REASON_ENGINE_REFUSED, False)
    check(sent, got)


async def test_an_engine_that_is_busy_is_asked_again(server: ScoringServer) -> None:
    sent = many(8)
    async with running(server.url) as world:
        server.busy = 5
        check(sent, await world.scores(sent.values()))


async def test_two_engines_share_the_work_and_one_that_is_away_leaves_it_to_the_other(
    server: ScoringServer, model: Path
) -> None:
    async with ScoringServer(model) as second, running(server.url, second.url, in_flight_tokens=200) as world:
        sent = many(60)
        for each in (server, second):
            each.delay_s = 0.01
        check(sent, await world.scores(sent.values()))
        done = [engine.sequences_scored for engine in (await world.told()).engines]
        assert sum(done) == 60 and min(done) >= 15

        await second.stop()
        check(sent, await world.scores(sent.values()))
        told = await until_states(world, SERVING, AWAY)
        assert told.engines[1].sequences_scored == done[1]

        await second.start()
        await until_states(world, SERVING, SERVING)


async def test_the_sequences_of_an_engine_that_dies_are_scored_by_the_other(server: ScoringServer, model: Path) -> None:
    async with ScoringServer(model) as second, running(server.url, second.url, in_flight_tokens=300) as world:
        sent = many(40)
        second.gate.clear()
        scoring = asyncio.create_task(world.scores(sent.values()))
        while second.in_flight_tokens < 200:
            await asyncio.sleep(0.01)
        await second.stop()
        check(sent, await asyncio.wait_for(scoring, 20))


async def test_engines_of_two_models_are_refused_at_start(server: ScoringServer, model: Path) -> None:
    async with ScoringServer(model, seed=1) as other:
        with pytest.raises(BadConfiguration, match=r"nats from what .* does .*its weights are others"):
            async with running(server.url, other.url):
                raise AssertionError("two models were taken for one")


async def test_an_engine_that_comes_back_with_other_weights_gets_no_sequences(server: ScoringServer) -> None:
    async with running(server.url, engine_wait_s=0.2) as world:
        await server.stop()
        await until_states(world, AWAY)
        server.seed = 1
        await server.start()
        told = await until_states(world, REFUSED)
        assert "nats from what it did before" in told.engines[0].detail
        server.seed = 0
        await until_states(world, SERVING)


async def test_a_proof_on_demand_finds_weights_that_were_changed_in_place(server: ScoringServer) -> None:
    async with running(server.url, watch_s=60) as world:
        assert (await world.told(verify=True)).engines[0].state == SERVING
        server.seed = 1
        assert (await world.told()).engines[0].state == SERVING
        assert (await world.told(verify=True)).engines[0].state == REFUSED
        assert world.teacher.pool.engines[0].state is EngineState.REFUSED


async def test_weights_that_changed_their_name_are_proven_again_before_a_result_counts(server: ScoringServer) -> None:
    async with running(server.url, watch_s=60, engine_wait_s=0.2) as world:
        sent = many(5)
        server.weight_version = "0:1"
        check(sent, await world.scores(sent.values()))
        server.weight_version, server.seed = "0:2", 1
        got = await world.scores(sent.values())
        assert all(isinstance(error, teacher_service_pb2.ScoreError) and error.retryable for error in got.values())


async def test_a_cancelled_call_aborts_its_requests_at_the_engine(server: ScoringServer) -> None:
    async with running(server.url) as world:
        server.gate.clear()
        call = world.stub.Score(iter(list(many(10).values())))
        while server.in_flight < 10:
            await asyncio.sleep(0.01)
        call.cancel()
        await until_idle(server)
        assert server.hung_up == 10
        server.gate.set()
        check(sent := many(3), await world.scores(sent.values()))
        assert (await world.told()).engines[0].tokens_in_flight == 0


async def test_a_calls_deadline_ends_its_requests_at_the_engine(server: ScoringServer) -> None:
    async with running(server.url) as world:
        server.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in world.stub.Score(iter(list(many(10).values())), timeout=1.0):
                raise AssertionError("the gate is closed")
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_idle(server)
        assert server.hung_up == 10


async def until_idle(server: ScoringServer) -> None:
    async with asyncio.timeout(5):
        while server.in_flight_tokens:
            await asyncio.sleep(0.01)


async def test_a_null_log_prob_is_an_error_of_its_sequence_and_never_a_number(server: ScoringServer) -> None:
    async with running(server.url) as world:
        server.null_id = 7
        got = await world.scores(
            [request("null", [1], [2, 7]), request("good", [1], [2, 3]), request("fine", [7], [2])]
        )
    error = got.pop("null")
    assert isinstance(error, teacher_service_pb2.ScoreError)
    assert (error.reason, error.retryable) == (errors_pb2.REASON_ENGINE_PROTOCOL, False)
    assert all(isinstance(result, dict) for result in got.values())


async def test_calls_beyond_the_limit_are_told_to_come_again(server: ScoringServer) -> None:
    async with running(server.url, max_calls=1) as world:
        server.gate.clear()
        first = asyncio.create_task(world.scores([request("a", [1], [2])]))
        while server.in_flight_tokens == 0:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.scores([request("b", [1], [2])])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        server.gate.set()
        await first
        await world.scores([request("b", [1], [2])])


async def test_a_message_that_cannot_be_read_ends_the_call_after_what_came_before_is_answered(
    server: ScoringServer,
) -> None:
    async with running(server.url) as world:
        server.delay_s = 0.1
        async with grpc.aio.insecure_channel(f"127.0.0.1:{world.teacher.server.port}") as channel:
            call: Any = channel.stream_stream("/atoll.api.teacher.v1.TeacherService/Score")
            answered = 0
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call(iter([request("a", [1], [2]).SerializeToString(), b"\xff\xff\xff"])):
                    answered += 1
    assert answered == 2  # a header and its bytes
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_tells_what_it_measured(server: ScoringServer) -> None:
    async with running(server.url) as world:
        server.delay_s = 0.05
        await world.scores([request("a", [1, 2], [3]), request("x", [1], [VOCABULARY])])
        told = await world.told()
    assert (told.sequences_scored, told.tokens_scored, told.sequences_failed) == (1, 1, 1)
    assert 0.05 <= told.mean_engine_time.ToNanoseconds() / 1e9 < 1
    assert told.tokens_per_second == pytest.approx(3, rel=0.7)
