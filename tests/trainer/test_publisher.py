"""Several engines over real HTTP and a chain from memory: who is updated, what counts as served, when it goes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from atoll.common.engine_client import EngineClient
from atoll.trainer.chain import ChainVersion
from atoll.trainer.publishing import Publisher
from atoll.trainer.refused_head import automatic_rollback_id
from atoll.trainer.retries import Patience

from tests.fakes.publish_engine import PublishEngine
from tests.fakes.versions import FakeVersions

POLL_S = 0.02


@dataclass
class Group:
    """A publisher over two engines, and what it called."""

    engines: list[PublishEngine]
    chain: FakeVersions
    stack: AsyncExitStack
    served: list[int] = field(default_factory=list)
    refused: list[ChainVersion] = field(default_factory=list)
    held: bool = True
    publisher: Publisher | None = None

    async def start(self, *, min_engines: int = 1, publish_timeout_s: float = 0.0) -> None:
        clients = [await self.stack.enter_async_context(EngineClient(e.base_url, 1000)) for e in self.engines]

        async def note_served(number: int) -> None:
            self.served.append(number)

        async def note_refused(head: ChainVersion) -> None:
            self.refused.append(head)

        self.publisher = Publisher(
            clients,
            self.chain,
            Patience(0.01, 0.02),
            min_engines=min_engines,
            poll_s=POLL_S,
            on_served=note_served,
            held=lambda: self.held,
            publish_timeout_s=publish_timeout_s,
            on_refused_head=note_refused,
        )
        task = asyncio.create_task(self.publisher.run_forever())
        self.stack.push_async_callback(cancel, task)

    def commit(self, digest: str, *, incarnation: int | None = None, job_id: str = "") -> ChainVersion:
        head = self.chain.append(digest, incarnation=incarnation, job_id=job_id)
        assert self.publisher is not None
        self.publisher.wake()
        return head

    def updates(self) -> list[list[str]]:
        return [[version for _, version in engine.updates] for engine in self.engines]


async def cancel(task: "asyncio.Task[None]") -> None:
    assert not task.done(), "the publisher ended by itself"
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    async with AsyncExitStack() as stack:
        engines = [PublishEngine(), PublishEngine()]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield Group(engines, FakeVersions(), stack)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


async def several_looks() -> None:
    await asyncio.sleep(10 * POLL_S)


async def test_a_version_is_served_once_the_least_number_of_engines_has_it(group: Group) -> None:
    await group.start(min_engines=2)
    group.engines[1].refuse_updates = 5
    group.commit("one")
    await eventually(lambda: group.engines[0].served == "1:1")
    assert max(group.served, default=0) == 0
    await eventually(lambda: group.served[-1:] == [1])
    assert group.updates() == [["1:1"], ["1:1"]]
    assert group.engines[1].refused == ["1:1"] * 5


async def test_a_dead_engine_keeps_no_version_from_being_served_and_is_updated_when_it_is_back(group: Group) -> None:
    await group.start(min_engines=1)
    port = int(group.engines[1].base_url.rpartition(":")[2])
    await group.engines[1].stop()
    group.commit("one")
    await eventually(lambda: group.served[-1:] == [1])
    await group.engines[1].start(port)
    await eventually(lambda: group.engines[1].served == "1:1")


async def test_a_head_with_the_weights_that_engines_have_is_published_nowhere_and_served_at_once(group: Group) -> None:
    await group.start(min_engines=2)
    group.commit("base")
    await eventually(lambda: group.served[-1:] == [1])
    group.commit("base")
    await eventually(lambda: group.served[-1:] == [2])
    assert group.updates() == [[], []]
    group.commit("new")
    await eventually(lambda: group.served[-1:] == [3])
    assert group.updates() == [["1:3"], ["1:3"]]
    group.commit("base")
    await eventually(lambda: group.served[-1:] == [4])
    assert group.updates() == [["1:3", "1:4"], ["1:3", "1:4"]]


async def test_the_same_weights_under_a_name_of_another_incarnation_are_published(group: Group) -> None:
    await group.start(min_engines=2)
    group.commit("base", incarnation=2)
    await eventually(lambda: [engine.served for engine in group.engines] == ["2:1", "2:1"])
    await eventually(lambda: group.served[-1:] == [1])


@pytest.mark.parametrize("name", ["default", "1:7", "3:0", "1:-1"])
async def test_an_engine_with_a_name_that_the_chain_does_not_have_is_updated(group: Group, name: str) -> None:
    group.engines[0].served = group.engines[0].reported = name
    await group.start()
    await eventually(lambda: group.engines[0].served == "1:0")
    assert group.updates() == [["1:0"], []]


async def test_an_engine_is_asked_for_its_weights_once_and_then_only_for_its_name(group: Group) -> None:
    await group.start(min_engines=2)
    await eventually(lambda: group.served[-1:] == [0])
    await several_looks()
    assert [engine.probes for engine in group.engines] == [1, 1]
    group.commit("base")
    await eventually(lambda: group.served[-1:] == [1])
    assert [engine.probes for engine in group.engines] == [1, 1]


async def test_an_engine_that_refused_and_says_it_serves_the_head_is_published_again(group: Group) -> None:
    await group.start(min_engines=2)
    await eventually(lambda: group.served[-1:] == [0])
    mixed = group.engines[0]
    mixed.refuse_updates, mixed.takes_what_it_refuses = 1, True
    group.commit("one")
    await eventually(lambda: group.served[-1:] == [1])
    assert mixed.refused == ["1:1"]
    assert group.updates() == [["1:1"], ["1:1"]]


async def test_a_head_that_every_engine_refuses_is_given_back_once(group: Group) -> None:
    await group.start(publish_timeout_s=0.1)
    for engine in group.engines:
        engine.refuse_paths.add(Path("/store/bad"))
    head = group.commit("bad")
    await eventually(lambda: bool(group.refused))
    await several_looks()
    assert group.refused == [head]
    assert 1 not in group.served
    assert all(len(engine.refused) > 1 for engine in group.engines)
    # What the rollback brings back is loaded, and that is all.
    group.commit("base", incarnation=2, job_id=automatic_rollback_id("chat", 1))
    await eventually(lambda: [engine.served for engine in group.engines] == ["2:2", "2:2"])
    assert group.refused == [head]


async def test_a_head_is_not_given_back_before_its_time(group: Group) -> None:
    await group.start(publish_timeout_s=60)
    group.engines[0].refuse_paths.add(Path("/store/bad"))
    await group.engines[1].stop()
    group.commit("bad")
    await eventually(lambda: len(group.engines[0].refused) > 2)
    assert group.refused == []


async def test_one_engine_that_loads_the_head_keeps_it(group: Group) -> None:
    await group.start(publish_timeout_s=0.05)
    group.engines[0].refuse_paths.add(Path("/store/odd"))
    group.commit("odd")
    await eventually(lambda: group.served[-1:] == [1])
    await several_looks()
    assert len(group.engines[0].refused) > 1
    assert group.refused == []


async def test_engines_that_are_away_never_give_a_head_back(group: Group) -> None:
    await group.start(publish_timeout_s=0.05)
    for engine in group.engines:
        await engine.stop()
    group.commit("one")
    await several_looks()
    assert group.refused == []


async def test_a_head_that_was_refused_before_the_engine_went_away_is_given_back(group: Group) -> None:
    await group.start(publish_timeout_s=0.3)
    group.engines[0].refuse_paths.add(Path("/store/bad"))
    await group.engines[1].stop()
    head = group.commit("bad")
    # The second update says that the first one's refusal has arrived.
    await eventually(lambda: len(group.engines[0].refused) > 1)
    await group.engines[0].stop()
    await eventually(lambda: group.refused == [head])


async def test_what_an_automatic_rollback_brought_back_is_never_given_back_itself(group: Group) -> None:
    await group.start(publish_timeout_s=0.05)
    for engine in group.engines:
        engine.refuse_paths |= {Path("/store/bad"), Path("/store/base")}
    bad = group.commit("bad")
    await eventually(lambda: group.refused == [bad])
    group.commit("base", incarnation=2, job_id=automatic_rollback_id("chat", bad.number))
    await eventually(lambda: all("2:2" in engine.refused for engine in group.engines))
    await several_looks()
    assert group.refused == [bad]


async def test_an_automatic_rollback_is_known_as_one_when_a_job_committed_before_it(group: Group) -> None:
    await group.start(publish_timeout_s=0.05)
    for engine in group.engines:
        engine.refuse_paths |= {Path("/store/bad"), Path("/store/base")}
    bad = group.commit("bad")
    await eventually(lambda: group.refused == [bad])
    # Both were queued meanwhile, the job first; nobody looked at its version.
    group.chain.append("bad")
    group.commit("base", incarnation=2, job_id=automatic_rollback_id("chat", bad.number))
    await eventually(lambda: all("2:3" in engine.refused for engine in group.engines))
    await several_looks()
    assert group.refused == [bad]


async def test_no_engine_is_touched_without_the_lease(group: Group) -> None:
    group.held = False
    await group.start(min_engines=2)
    group.engines[0].paused = True
    group.commit("one")
    await several_looks()
    assert group.updates() == [[], []]
    assert (group.served, group.engines[0].paused) == ([], True)
    group.held = True
    await eventually(lambda: group.served[-1:] == [1])
    assert group.updates() == [["1:1"], ["1:1"]]


async def test_a_lease_that_is_lost_on_the_way_to_an_engine_stops_the_update(group: Group) -> None:
    await group.start(min_engines=2)
    await eventually(lambda: group.served[-1:] == [0])
    located = group.chain.location

    async def lose_it(digest: str) -> Path:
        group.held = False
        return await located(digest)

    group.chain.location = lose_it  # type: ignore[method-assign]
    group.commit("one")
    await several_looks()
    assert group.updates() == [[], []]
