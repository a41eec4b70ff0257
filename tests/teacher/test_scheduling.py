"""Which sequence is next, and how much of everything is held at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from atoll.api.teacher.v1 import teacher_service_pb2

from tests.fakes.scoring_server import VOCABULARY, ScoringServer, expected, write_model
from tests.teacher.teacher_world import World, request, running

LONG = 2_000


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScoringServer]:
    async with ScoringServer(write_model(tmp_path / "model")) as server:
        yield server


async def order_of(world: World, requests: list[teacher_service_pb2.ScoreRequest]) -> list[str]:
    return [piece.header.id async for piece in world.stub.Score(iter(requests)) if piece.HasField("header")]


async def test_short_sequences_are_answered_while_long_ones_that_came_before_wait(server: ScoringServer) -> None:
    server.delay_per_token_s = 2e-5
    longs = [request(f"long-{n}", [1] * LONG, [2]) for n in range(12)]
    shorts = [request(f"short-{n}", [3], [4]) for n in range(12)]
    async with running(server.url, in_flight_tokens=2 * LONG) as world:
        order = await order_of(world, [*longs, *shorts])
    last_short = max(order.index(f"short-{n}") for n in range(12))
    # Two long ones fill the engine before a short one is read, and two more may leave with them.
    assert sum(name.startswith("long") for name in order[:last_short]) <= 4
    assert len(order) == 24


async def test_a_callers_single_sequence_does_not_wait_for_all_of_another_callers(server: ScoringServer) -> None:
    server.delay_s = 0.005
    async with running(server.url, in_flight_tokens=20) as world:
        crowd = asyncio.create_task(order_of(world, [request(f"c{n}", [1], [2]) for n in range(400)]))
        while len(server.scored) < 30:
            await asyncio.sleep(0.005)
        before = len(server.scored)
        await order_of(world, [request("one", [3], [4])])
        assert len(server.scored) - before < 60
        await crowd


async def test_tokens_in_flight_are_bounded_over_all_calls(server: ScoringServer) -> None:
    server.delay_s = 0.01
    draw = np.random.default_rng(0)
    async with running(server.url, in_flight_tokens=300) as world:
        calls = [[request(f"{n}", [1] * int(draw.integers(1, 150)), [2] * 5) for n in range(30)] for _ in range(4)]
        answers = await asyncio.gather(*(order_of(world, call) for call in calls))
    assert [len(set(answer)) for answer in answers] == [30] * 4
    assert 200 <= server.most_in_flight <= 300


async def test_fifty_calls_in_one_second_with_long_prefixes_are_all_answered_in_bounded_memory(
    server: ScoringServer,
) -> None:
    """Each has 40 sequences of one long prefix and asks for the likeliest tokens: 8 MB of results in all, of JSON
    about 80 MB."""
    prefix = np.random.default_rng(1).integers(0, VOCABULARY, LONG).tolist()
    server.delay_per_token_s = 1e-7
    async with running(server.url, in_flight_tokens=8 * LONG, call_bytes=1 << 20) as world:
        own = psutil.Process()
        before = own.memory_info().rss

        async def one(number: int) -> int:
            await asyncio.sleep(number / 50)
            sent = [request(f"{number}-{n}", prefix, [n, number % VOCABULARY], top_k=8) for n in range(40)]
            got = await world.scores(sent)
            for n in range(40):
                result = got[f"{number}-{n}"]
                assert isinstance(result, dict)
                wanted = expected(prefix[-1:], [n, number % VOCABULARY])
                np.testing.assert_allclose(result["log_probs"], wanted, atol=1e-5)
            return len(got)

        answered = await asyncio.gather(*map(one, range(50)))
        grown = own.memory_info().rss - before
    assert answered == [40] * 50
    assert server.most_in_flight <= 8 * LONG
    assert grown < 200 << 20, f"{grown >> 20} MiB"


async def test_a_client_that_does_not_read_holds_its_own_calls_memory_and_nobody_elses(server: ScoringServer) -> None:
    async with running(server.url, call_bytes=1 << 20) as world:
        sent = [request(f"{n}", [1], [2] * 500, top_k=64) for n in range(200)]
        lazy = world.stub.Score(iter(sent))
        await asyncio.sleep(0.5)
        # 260 KB each: what the call's memory and the connection's buffers hold, and not all 200.
        started = len(server.scored)
        assert started < 60
        assert len(await order_of(world, sent[:20])) == 20
        lazy.cancel()
