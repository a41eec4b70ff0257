import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Unavailable
from atoll.registry.app import Registry
from atoll.registry.chain import Chain
from atoll.registry.database import Database
from atoll.registry.settings import RegistrySettings
from atoll.registry.watch import POLL_SECONDS, CommitSignal, Event, watch

from tests.registry.material import SCENARIO, content, seal


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await asyncio.wait_for(anext(events), 10) for _ in range(count)]


async def test_a_watch_sends_the_chain_from_its_revision_and_then_each_commit(registry: Registry) -> None:
    model = seal(registry, b"model").digest
    registry.chain.commit(content(0, model))
    signal = CommitSignal()
    async with aclosing(watch(registry.chain, signal, SCENARIO, 1)) as events:
        assert [event.revision for event in await take(events, 1)] == [2]
        waiting = asyncio.create_task(take(events, 1))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(registry.chain.commit, content(1, model))
        signal.notify()
        (event,) = await waiting
    assert event.version == registry.chain.get(SCENARIO)


async def test_a_commit_of_this_process_arrives_before_the_next_poll(registry: Registry) -> None:
    model = seal(registry, b"model").digest
    signal = CommitSignal()
    async with aclosing(watch(registry.chain, signal, SCENARIO, 1)) as events:
        delays = []
        for parent in range(3):
            waiting = asyncio.create_task(take(events, 1))
            await asyncio.sleep(0.01)
            await asyncio.to_thread(registry.chain.commit, content(parent, model))
            committed = time.monotonic()
            signal.notify()
            await waiting
            delays.append(time.monotonic() - committed)
    assert min(delays) < POLL_SECONDS / 4


async def test_a_commit_of_another_process_arrives_with_the_poll(
    registry: Registry, settings: RegistrySettings
) -> None:
    model = seal(registry, b"model").digest
    other = Chain(Database(settings.database))
    async with aclosing(watch(registry.chain, CommitSignal(), SCENARIO, 1)) as events:
        waiting = asyncio.create_task(take(events, 1))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(other.commit, content(0, model))
        assert [event.revision for event in await waiting] == [2]


async def test_no_watch_skips_or_repeats_a_version_while_commits_go_on(registry: Registry) -> None:
    model = seal(registry, b"model").digest
    signal = CommitSignal()

    async def follow(start: int) -> list[int]:
        async with aclosing(watch(registry.chain, signal, SCENARIO, start)) as events:
            return [event.revision for event in await take(events, 13 - start)]

    async def commit_all() -> None:
        for parent in range(12):
            await asyncio.to_thread(registry.chain.commit, content(parent, model))
            signal.notify()

    *followed, _ = await asyncio.gather(*(follow(start) for start in (0, 1)), commit_all())
    assert followed == [list(range(1, 14)), list(range(2, 14))]


async def test_heartbeats_come_when_nothing_happens(registry: Registry) -> None:
    async with aclosing(watch(registry.chain, CommitSignal(), SCENARIO, 1, heartbeat_s=0.05)) as events:
        assert await take(events, 2) == [Event(1, None), Event(1, None)]


@pytest.mark.parametrize(
    ("scenario", "revision", "reason"),
    [
        ("other", 0, errors_pb2.REASON_SCENARIO_NOT_FOUND),
        (SCENARIO, -1, errors_pb2.REASON_INVALID_FIELD),
        (SCENARIO, 2, errors_pb2.REASON_REVISION_COMPACTED),
    ],
)
async def test_a_watch_that_cannot_begin_is_refused(
    registry: Registry, scenario: str, revision: int, reason: errors_pb2.Reason.ValueType
) -> None:
    async with aclosing(watch(registry.chain, CommitSignal(), scenario, revision)) as events:
        with pytest.raises(AtollError) as refused:
            await anext(events)
    assert refused.value.reason == reason


async def test_a_shutdown_ends_the_watch_at_once_with_a_retry(registry: Registry) -> None:
    signal = CommitSignal()
    async with aclosing(watch(registry.chain, signal, SCENARIO, 1)) as events:
        waiting = asyncio.create_task(take(events, 1))
        await asyncio.sleep(0.05)
        signal.close()
        with pytest.raises(Unavailable) as ended:
            await asyncio.wait_for(waiting, POLL_SECONDS / 2)
    assert ended.value.reason == errors_pb2.REASON_NOT_READY
