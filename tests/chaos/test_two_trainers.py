"""Two trainers on one scenario: who holds the lease acts, and whoever comes back late changes nothing."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.chaos.deployment import Shape
from tests.chaos.stage import Stage, stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LEASE_TTL_S = 4.0
RENEWED_EVERY_S = LEASE_TTL_S / 3
SLACK_SECONDS = 2.0
"""For a machine that does other work too."""


@pytest.fixture
async def here(tiny_models: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    """Version 1 is committed and served by both engines."""
    shape = Shape(trainers=2, engines=2, trainer_settings={"LEASE_TTL_S": str(LEASE_TTL_S)})
    async with stage(tmp_path, tiny_models / "student", shape) as running:
        await running.feed("first")
        await running.until_head(1)
        await running.check()
        yield running


def other(here: Stage, name: str) -> str:
    (found,) = set(here.deployment.trainer_names) - {name}
    return found


async def until_handed_over(here: Stage, holder: str) -> float:
    return await here.until(lambda: here.observer.holder == other(here, holder), "the hand-over", 60)


async def test_a_killed_holder_is_followed_by_the_other_one_within_the_ttl(here: Stage) -> None:
    holder = here.observer.holder
    await here.deployment[holder].kill()
    receipts, took = await asyncio.gather(here.feed("second"), until_handed_over(here, holder))
    assert took <= LEASE_TTL_S + SLACK_SECONDS, f"handed over after {took:.1f} s"
    after = await here.until_head(2)
    print(f"handed over {took:.1f} s after the kill, committed {after:.1f} s later")
    await here.deployment[holder].start()
    registry = await here.check()
    assert [version.number for version in registry.versions] == [0, 1, 2]
    assert set(registry.versions[2].consumed) == set(receipts)
    assert registry.versions[2].fencing_token > registry.versions[1].fencing_token


async def test_a_holder_that_is_asked_to_stop_hands_over_at_once(here: Stage) -> None:
    holder = here.observer.holder
    here.deployment[holder].signal(signal.SIGTERM)
    took = await until_handed_over(here, holder)
    # The one that stands by asks as often as the holder renews; nobody waits for the ttl.
    assert took <= RENEWED_EVERY_S + SLACK_SECONDS, f"handed over after {took:.1f} s"
    await here.deployment[holder].ended()
    await here.feed("second")
    await here.until_head(2)
    await here.deployment[holder].start()
    await here.check()


@pytest.mark.parametrize("failpoint", ["trainer.stepped", "trainer.sealed", "trainer.staged", "trainer.committed"])
async def test_a_holder_that_was_stopped_beyond_its_lease_cannot_commit(here: Stage, failpoint: str) -> None:
    """It stops at the point, the other one ends the job and makes another version, and then it goes on."""
    for name in here.deployment.trainer_names:
        await here.arm(name, failpoint, signal.SIGSTOP)
    await here.until(lambda: here.observer.holder != "", "a holder")
    feeding = asyncio.create_task(here.feed("second"))
    stopped = await until_stopped(here)
    # Whoever is still armed would stop there too.
    follower = here.deployment[other(here, stopped)]
    await follower.kill()
    await here.disarm(follower.name)
    await here.until(lambda: here.observer.holder == follower.name, "the hand-over")
    await feeding
    await here.until_head(2)
    await here.feed("third")
    await here.until_head(3)
    before = [version.weight_version for version in here.observer.read()[1].versions]
    here.deployment[stopped].signal(signal.SIGCONT)
    await asyncio.sleep(LEASE_TTL_S)
    registry = await here.check()
    assert [version.weight_version for version in registry.versions] == before
    assert here.deployment[stopped].running, "it stands by now"
    await here.feed("fourth")
    await here.until_head(4)
    await here.check()


async def until_stopped(here: Stage) -> str:
    """Name of the trainer that reached its point and stands still."""

    def stopped() -> list[str]:
        states = {name: here.deployment[name].state for name in here.deployment.trainer_names}
        return [name for name, state in states.items() if state == "stopped"]

    await here.until(lambda: bool(stopped()), "a trainer reaches its point")
    return stopped()[0]


async def test_what_a_deposed_holder_still_sends_to_an_engine_is_reconciled_away(here: Stage) -> None:
    """A request that was on its way when its sender lost the lease: an older version, under its true name."""
    old = here.observer.read()[1].versions[-1]
    await here.feed("second")
    await here.until_head(2)
    await here.check()
    late = {
        "model_path": str(here.deployment.store / "artifacts" / old.model_digest / "files"),
        "weight_version": old.weight_version,
    }
    url = here.deployment.engine_urls[0]
    async with aiohttp.ClientSession() as session, session.post(f"{url}/update_weights_from_disk", json=late) as answer:
        assert (await answer.json())["success"]
    # Some chats while it serves the old version: whatever they are told is true.
    await here.feed("third")
    await here.check()
