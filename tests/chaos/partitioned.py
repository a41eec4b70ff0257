"""Partitions between services, each on a host of its own. A program, because it needs a network of its own:

    unshare --user --map-root-user --net python -m tests.chaos.partitioned CASE DIRECTORY

Ends with status 0 when the case came out as it should.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.engine.models.tiny import make_tiny

from tests.chaos.client import Client, Ledger
from tests.chaos.databases import StoredJob
from tests.chaos.deployment import GROUPS, Deployment, Place, Shape
from tests.chaos.namespaces import HUB, Hosts
from tests.chaos.observer import Observer

LEASE_TTL_S = 3.0
SOON_SECONDS = 10.0
"""What "right after" means here: a few retries and a job of a second, on a machine that does other work too."""
WAIT_SECONDS = 60.0
HOST_OF = {"registry": "registry", "trainer-1": "trainer", "engine-1": "engine", "gateway": HUB, "gateway-grpc": HUB}


@dataclass
class Split:
    """A deployment over four hosts."""

    hosts: Hosts
    deployment: Deployment
    client: Client
    observer: Observer

    async def feed(self, name: str) -> None:
        await self.client.feed(GROUPS, name)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> float:
        """Seconds until it is true."""
        started = time.monotonic()
        assert await self.observer.until(condition, seconds), f"{what}: not within {seconds:g} s"
        return time.monotonic() - started

    @property
    def newest_job(self) -> StoredJob | None:
        jobs = list(self.observer.read()[1].jobs.values())
        return jobs[-1] if jobs else None

    async def check(self) -> None:
        found = await self.observer.until_quiet(WAIT_SECONDS)
        assert not found.any, "\n".join(found.lines())


@asynccontextmanager
async def split(directory: Path) -> AsyncIterator[Split]:
    """Up and with version 1 committed."""
    model = make_tiny(directory / "model", 0)
    with Hosts(["hub", "registry", "trainer", "engine"]) as hosts:

        def place_of(name: str) -> Place:
            return Place(hosts.address(HOST_OF[name]), hosts.enter(HOST_OF[name]))

        shape = Shape(trainer_settings={"LEASE_TTL_S": str(LEASE_TTL_S)})
        deployment = Deployment(directory, model, shape, place_of)
        ledger = Ledger()
        here = Split(hosts, deployment, Client(deployment.gateway_url, ledger, 0), Observer(deployment, ledger))
        try:
            await deployment.start()
            await here.feed("first")
            await here.until(lambda: here.observer.head == 1, "version 1")
            yield here
        finally:
            await deployment.stop()


async def a_step_outlives_a_registry_that_is_away_longer_than_the_lease(here: Split) -> None:
    """The workers are held in mid-step while the link to the registry breaks, and go on behind the partition."""
    (worker,) = here.deployment["trainer-1"].workers()
    os.kill(worker, signal.SIGSTOP)
    await here.feed("second")
    await here.until(lambda: (job := here.newest_job) is not None and job.phase == "running", "the step begins")
    here.hosts.cut("trainer", "registry")
    os.kill(worker, signal.SIGCONT)
    await asyncio.sleep(3 * LEASE_TTL_S)
    assert here.observer.head == 1, "nothing can be committed without the registry"
    here.hosts.heal("trainer", "registry")
    took = await here.until(lambda: here.observer.head == 2, "the commit after the heal", SOON_SECONDS)
    job = here.newest_job
    assert job is not None and (job.phase, job.attempt) == ("committed", 1), f"the step was taken again: {job}"
    print(f"committed {took:.1f} s after the heal, in attempt 1")
    await here.check()


async def a_job_that_comes_while_the_registry_is_away_waits_and_ends_after_the_heal(here: Split) -> None:
    """Nothing is begun without the registry."""
    here.hosts.cut("trainer", "registry")
    await here.feed("second")
    await asyncio.sleep(3 * LEASE_TTL_S)
    assert here.observer.head == 1
    here.hosts.heal("trainer", "registry")
    took = await here.until(lambda: here.observer.head == 2, "the commit after the heal", SOON_SECONDS)
    print(f"committed {took:.1f} s after the heal")
    await here.check()


async def versions_are_committed_while_the_engine_is_away_and_published_after_the_heal(here: Split) -> None:
    """Publishing waits, commits do not, and the engine gets the newest version once it is there."""
    await here.check()
    here.hosts.cut("trainer", "engine")
    await here.feed("second")
    took = await here.until(lambda: here.observer.head == 2, "a commit behind the partition", SOON_SECONDS)
    print(f"committed {took:.1f} s after the last report, without the engine")
    # Longer than a lease, shorter than any probe gives up on its own.
    await asyncio.sleep(3 * LEASE_TTL_S)
    here.hosts.heal("trainer", "engine")
    started = time.monotonic()
    found = await here.observer.until_quiet(WAIT_SECONDS)
    assert not found.any, "\n".join(found.lines())
    took = time.monotonic() - started
    assert took < SOON_SECONDS, f"published only {took:.1f} s after the heal"
    print(f"published {took:.1f} s after the heal")


CASES: dict[str, Callable[[Split], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        a_step_outlives_a_registry_that_is_away_longer_than_the_lease,
        a_job_that_comes_while_the_registry_is_away_waits_and_ends_after_the_heal,
        versions_are_committed_while_the_engine_is_away_and_published_after_the_heal,
    )
}


async def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    async with split(arguments.directory) as here:
        await CASES[arguments.case](here)


if __name__ == "__main__":
    asyncio.run(main())
