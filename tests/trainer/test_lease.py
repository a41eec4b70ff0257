"""The lease as its keeper sees it, against the real registry; both clocks are the test's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, Unavailable
from atoll.common.server import GrpcServer
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.predecessor import holder_ids

from tests.fakes.backend import write_model
from tests.fakes.registry import RegistryUnderTest

TTL = 1.0


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[RegistryUnderTest]:
    write_model(tmp_path / "base", [1.0])
    made = RegistryUnderTest(tmp_path, tmp_path / "base", "chat", "grpo", {})
    yield made
    made.close()


@pytest.fixture
async def channel(registry: RegistryUnderTest) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1", 0, None)
    registry.serve_on(server)
    await server.start([])
    async with open_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened
    await server.stop()


class Trainer:
    """A keeper that runs, with a clock of its own."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self.now = 0.0
        self.keeper = LeaseKeeper(channel, "chat", TTL, clock=lambda: self.now)
        self._task = asyncio.create_task(self.keeper.run_forever(f"{name}:1"))

    async def stop(self) -> None:
        """As SIGKILL does: the registry is not told."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def _is_past(keeper: LeaseKeeper, until: float) -> bool:
    return keeper._until > until


async def test_one_of_two_holds_it_and_the_other_knows_where(channel: grpc.aio.Channel) -> None:
    first = Trainer(channel, "first")
    token = await first.keeper.token()
    second = Trainer(channel, "second")
    await soon(lambda: second.keeper.holder_address)
    assert (first.keeper.held(), second.keeper.held(), token) == (True, False, 1)
    assert first.keeper.holder_address == second.keeper.holder_address == "first:1"
    with pytest.raises(Unavailable, match="first:1 does") as refused:
        second.keeper.refuse_unless_held()
    assert refused.value.reason == errors_pb2.REASON_NOT_LEASE_HOLDER
    await first.stop()
    await second.stop()


async def test_it_is_renewed_under_the_same_token(registry: RegistryUnderTest, channel: grpc.aio.Channel) -> None:
    trainer = Trainer(channel, "only")
    token = await trainer.keeper.token()
    for _ in range(4):
        trainer.now += TTL / 2
        registry.pass_time(TTL / 2)
        await soon(partial(_is_past, trainer.keeper, trainer.keeper._until))
    assert await trainer.keeper.token() == token
    await trainer.stop()


async def test_a_holder_that_is_killed_is_followed_within_the_ttl(
    registry: RegistryUnderTest, channel: grpc.aio.Channel
) -> None:
    first = Trainer(channel, "first")
    await first.keeper.token()
    second = Trainer(channel, "second")
    await first.stop()
    registry.pass_time(TTL)
    assert await asyncio.wait_for(second.keeper.token(), 5) == 2
    await second.stop()


async def test_a_lease_that_is_released_is_taken_over_at_once(channel: grpc.aio.Channel) -> None:
    first = Trainer(channel, "first")
    await first.keeper.token()
    second = Trainer(channel, "second")
    await first.stop()
    await first.keeper.release()
    assert not first.keeper.held()
    assert await asyncio.wait_for(second.keeper.token(), 5) == 2
    await second.stop()


async def test_a_process_that_died_is_followed_at_once_by_the_next_one_of_its_run_directory(
    channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    with holder_ids(tmp_path, "chat") as (first, before):
        assert before == ""
        keeper = LeaseKeeper(channel, "chat", 3600, holder=first)
        running = asyncio.create_task(keeper.run_forever("here:1"))
        assert await keeper.token() == 1
        with holder_ids(tmp_path, "chat") as (other, unknown):
            assert (other != first, unknown) == (True, ""), "the first one lives"
    running.cancel()
    with holder_ids(tmp_path, "chat") as (second, before):
        assert before == first
        keeper = LeaseKeeper(channel, "chat", 3600, holder=second, predecessor=before)
        running = asyncio.create_task(keeper.run_forever("here:1"))
        assert await asyncio.wait_for(keeper.token(), 5) == 2
        running.cancel()


async def test_a_holder_that_was_stopped_stops_acting_before_it_hears_from_anybody(
    registry: RegistryUnderTest, channel: grpc.aio.Channel
) -> None:
    trainer = Trainer(channel, "stopped")
    await trainer.keeper.token()
    await trainer.stop()
    trainer.now += TTL
    assert not trainer.keeper.held()
    await asyncio.wait_for(trainer.keeper.lost(), 1)


async def test_a_registry_that_is_away_for_longer_than_the_ttl_costs_the_token_and_not_the_lease(
    registry: RegistryUnderTest, channel: grpc.aio.Channel
) -> None:
    trainer = Trainer(channel, "only")
    assert await trainer.keeper.token() == 1
    lost = asyncio.create_task(trainer.keeper.lost())
    registry.refusals = {"RenewLease": [Unavailable("away")], "AcquireLease": [Unavailable("away")] * 2}
    trainer.now += TTL
    registry.pass_time(TTL)
    await asyncio.wait_for(lost, 5)
    assert await asyncio.wait_for(trainer.keeper.token(), 5) == 2
    await trainer.stop()


async def test_a_write_that_was_fenced_makes_it_ask_at_once(
    registry: RegistryUnderTest, channel: grpc.aio.Channel
) -> None:
    trainer = Trainer(channel, "fenced")
    token = await trainer.keeper.token()
    await registry.take_lease("another", ttl_s=60)
    trainer.keeper.doubt(token)
    assert not trainer.keeper.held()
    await soon(lambda: trainer.keeper.holder_address == "elsewhere:1")
    await trainer.stop()


async def test_why_the_registry_gives_no_lease_is_told_until_it_does(
    registry: RegistryUnderTest, channel: grpc.aio.Channel
) -> None:
    full = AtollError("no room left in the database", reason=errors_pb2.REASON_STORAGE_FULL)
    registry.refusals["AcquireLease"] = [full] * 1_000
    one = Trainer(channel, "one")

    def told() -> str:
        with pytest.raises(Unavailable) as refused:
            one.keeper.refuse_unless_held()
        assert refused.value.reason == errors_pb2.REASON_NOT_LEASE_HOLDER
        return refused.value.message

    await soon(lambda: "no room left in the database" in told())
    registry.refusals.clear()
    await one.keeper.token()
    one.now += TTL
    assert "no room" not in told()
    await one.stop()
