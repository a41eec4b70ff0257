"""A deployment for one test, and what tests do with it: feed batches, hurt a process at a point, check the end."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.client import Client, Ledger
from tests.chaos.databases import RegistryState
from tests.chaos.deployment import GROUPS, Deployment, Shape
from tests.chaos.observer import Observer

WAIT_SECONDS = 90.0


@dataclass
class Stage:
    """Everything of one deployment. Example: `async with stage(tmp_path, model, Shape()) as here: ...`"""

    deployment: Deployment
    client: Client
    observer: Observer
    ledger: Ledger

    async def feed(self, name: str) -> list[str]:
        """Chats and reports that complete one batch; the receipts."""
        return await self.client.feed(GROUPS, name)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> float:
        """Seconds until it is true."""
        started = time.monotonic()
        assert await self.observer.until(condition, seconds), f"{what}: not within {seconds:g} s"
        return time.monotonic() - started

    async def until_head(self, number: int, seconds: float = WAIT_SECONDS) -> float:
        """Seconds until so many versions are committed."""
        return await self.until(lambda: self.observer.head >= number, f"version {number}", seconds)

    async def until_served(self, seconds: float = WAIT_SECONDS) -> None:
        """Until every engine samples from the head."""
        async with asyncio.timeout(seconds):
            while not await self.observer.served():
                await asyncio.sleep(0.01)

    async def check(self) -> RegistryState:
        """Waits until nothing is open, and asserts every invariant; the registry's state then."""
        found = await self.observer.until_quiet(WAIT_SECONDS)
        registry = self.observer.read()[1]
        found.wrong_version.extend(await self.observer.engine_keys(registry))
        assert not found.any, "\n".join(found.lines())
        return registry

    async def arm(self, name: str, failpoint: str, what: signal.Signals = signal.SIGKILL) -> None:
        """Starts a process again so that it is killed, or stopped, at a point."""
        process = self.deployment[name]
        await process.terminate()
        process.environment |= {"ATOLL_FAILPOINT": failpoint, "ATOLL_FAILPOINT_SIGNAL": what.name}
        await process.start()
        await process.wait_until_up(WAIT_SECONDS)

    async def disarm(self, name: str) -> None:
        """Starts a process that was killed at its point as it is without one."""
        process = self.deployment[name]
        for variable in ("ATOLL_FAILPOINT", "ATOLL_FAILPOINT_SIGNAL"):
            process.environment.pop(variable, None)
        if not process.running:
            await process.start()
        await process.wait_until_up(WAIT_SECONDS)

    def consumed(self) -> Counter[str]:
        """How often the chain trained each sample."""
        return Counter(receipt for version in self.observer.read()[1].versions for receipt in version.consumed)


@asynccontextmanager
async def stage(directory: Path, model: Path, shape: Shape) -> AsyncIterator[Stage]:
    """Up; stopped at the end whatever happens."""
    deployment = Deployment(directory, model, shape)
    ledger = Ledger()
    try:
        await deployment.start()
        client = Client(deployment.gateway_url, ledger, 0)
        yield Stage(deployment, client, Observer(deployment, ledger), ledger)
    finally:
        await deployment.stop()
