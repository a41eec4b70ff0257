"""What is done to a deployment: processes are killed or stopped in a random order, and come back after a moment."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping

from tests.chaos.deployment import Deployment

MAX_DOWN_SECONDS = 2.0
"""Before a killed process is started again."""
WATCH_SECONDS = 0.2
KILLED_WORKER = "worker of "


class Faults:
    """Reproducible by its seed as far as the choices go; where they hit is up to the machine's timing."""

    def __init__(self, deployment: Deployment, seed: int, weights: Mapping[str, float]) -> None:
        """weights: how often each kind is hit, relative to the others: registry, gateway, trainer, worker, engine."""
        self._deployment = deployment
        self._draw = random.Random(seed)
        self._weights = weights
        self._away: dict[str, asyncio.Task[None]] = {}
        self.kills: Counter[str] = Counter()
        """SIGKILLs by kind of process."""
        self.ends: list[str] = []
        """Processes that ended by themselves, and what they said last."""

    async def supervise(self) -> None:
        """Starts again what ends by itself, as any supervisor of services does, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for name, process in self._deployment.processes.items():
                if name not in self._away and not process.running:
                    self.ends.append(f"{name}: {process.last_lines(1)}")
                    self._away[name] = asyncio.create_task(self._start_later(name))

    async def kill_something(self) -> str:
        """SIGKILL of a running process, chosen at random, which is started again soon. Returns what was hit."""
        while True:
            victims = self._victims()
            if victims:
                name = self._draw.choices(list(victims), [weight for weight, _ in victims.values()])[0]
                if await self._kill(name, victims[name][1]):
                    self.kills[_kind(name)] += 1
                    return name
            await asyncio.sleep(0.1)

    async def kill(self, name: str) -> None:
        """SIGKILL of one process, which is started again soon; nothing when it is away already."""
        process = self._deployment[name]
        if name not in self._away and process.running and await self._kill(name, process.pid):
            self.kills[_kind(name)] += 1

    def stop(self, name: str, seconds: float) -> bool:
        """SIGSTOP of a process, without its children, and SIGCONT later. False when it is away already."""
        if name in self._away or not self._deployment[name].running:
            return False
        self._deployment[name].signal(signal.SIGSTOP)
        self._away[name] = asyncio.create_task(self._continue_later(name, seconds))
        return True

    async def all_back(self) -> None:
        """Returns when everything that was hurt has been started or continued."""
        while self._away:
            await asyncio.gather(*self._away.values())

    def _victims(self) -> dict[str, tuple[float, int]]:
        """Weight and process id of everything that can be killed now."""
        found: dict[str, tuple[float, int]] = {}
        for name, process in self._deployment.processes.items():
            if name in self._away or not process.running:
                continue
            share = sum(_kind(other) == _kind(name) for other in self._deployment.processes)
            found[name] = (self._weights[_kind(name)] / share, process.pid)
            workers = process.workers() if _kind(name) == "trainer" else []
            if workers:
                found[KILLED_WORKER + name] = (self._weights["worker"] / share, self._draw.choice(workers))
        return {name: victim for name, victim in found.items() if victim[0] > 0}

    async def _kill(self, name: str, pid: int) -> bool:
        if name.startswith(KILLED_WORKER):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
            return True
        # Away before it is killed: the supervisor must not take it for one that ended by itself.
        self._deployment[name].signal(signal.SIGKILL)
        self._away[name] = asyncio.create_task(self._start_later(name))
        return True

    async def _start_later(self, name: str) -> None:
        await self._deployment[name].ended()
        await asyncio.sleep(self._draw.uniform(0, MAX_DOWN_SECONDS))
        await self._deployment[name].start()
        del self._away[name]

    async def _continue_later(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._deployment[name].signal(signal.SIGCONT)
        del self._away[name]


def _kind(name: str) -> str:
    return "worker" if name.startswith(KILLED_WORKER) else name.partition("-")[0]
