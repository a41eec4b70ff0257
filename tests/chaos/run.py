"""A loop under fire: clients chat and report, processes die, and in the end everything must be in its place."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.client import Client, Ledger
from tests.chaos.deployment import GROUPS, Deployment, Shape
from tests.chaos.faults import Faults
from tests.chaos.invariants import Findings
from tests.chaos.observer import Observer

CLIENTS = 2
MAX_OPEN_BATCHES = 2
"""Clients pause at so many: what is sampled far ahead of the trainer can only be dropped."""
LEASE_TTL_S = 3.0
EVERY_KIND = {"registry": 3.0, "gateway": 4.0, "engine": 3.0, "trainer": 4.0, "worker": 4.0}


@dataclass(frozen=True)
class Plan:
    """What is done. Example: Plan(kills=200, seed=7, shape=Shape(trainers=2, engines=2))"""

    kills: int
    seed: int
    shape: Shape
    weights: Mapping[str, float] = field(default_factory=lambda: EVERY_KIND)
    pause_s: float = 2.5
    """Mean time between two faults."""
    commit_every_kills: int = 10
    """The fire is held until a version was committed since so many kills: the loop must go on, not just stay alive."""
    stop_every_kills: int = 20
    """A trainer is stopped beyond its lease and continued."""
    rollback_every_kills: int = 40
    patience_s: float = 120.0
    """Without a fault, the next version comes within this, and everything that is open ends."""
    lease_ttl_s: float = LEASE_TTL_S


@dataclass
class Outcome:
    """What came of it."""

    findings: Findings
    kills: Counter[str]
    ends: Sequence[str] = ()
    """Processes that ended by themselves and were started again."""
    stops: int = 0
    rollbacks: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    """By operation."""
    states: Counter[str] = field(default_factory=Counter)
    """Samples by state."""
    seconds: float = 0.0


class ChaosRun:
    """One deployment and its clients. `execute` does everything."""

    def __init__(self, directory: Path, model: Path, plan: Plan) -> None:
        self._plan = plan
        self._deployment = Deployment(directory, model, plan.shape)
        self._ledger = Ledger()
        self._observer = Observer(self._deployment, self._ledger)
        self._faults = Faults(self._deployment, plan.seed, plan.weights)
        self._draw = random.Random(plan.seed + 1)
        self._found = Findings()
        self._stops = 0
        self._rollbacks: list[str] = []

    async def execute(self) -> Outcome:
        """Starts, hurts, waits for quiet, checks, and stops everything. Raises AssertionError when it cannot start."""
        started = time.monotonic()
        try:
            await self._deployment.start()
            self._say(f"everything is up after {time.monotonic() - started:.0f} s")
            async with self._supervised():
                async with self._chatting() as clients:
                    await self._fire(clients)
                await self._faults.all_back()
            await self._deployment.wait_until_up()
            await self._check_end()
            gateway, registry = self._observer.read()
        finally:
            await self._deployment.stop()
        self._found.stuck.extend(self._observer.leftovers())
        states = Counter(
            gateway.claims[receipt].state if receipt in gateway.claims else "pending" for receipt in gateway.samples
        )
        operations = Counter(version.operation for version in registry.versions)
        seconds = time.monotonic() - started
        return Outcome(
            findings=self._found,
            kills=self._faults.kills,
            ends=self._faults.ends,
            stops=self._stops,
            rollbacks=len(self._rollbacks),
            versions=operations,
            states=states,
            seconds=seconds,
        )

    @contextlib.asynccontextmanager
    async def _supervised(self) -> AsyncIterator[None]:
        supervisor = asyncio.create_task(self._faults.supervise())
        try:
            yield
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _chatting(self) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Clients at work; one that fails is found out by the caller's next look at it."""
        url, may_go_on = self._deployment.gateway_url, self._may_chat
        seeds = range(self._plan.seed, self._plan.seed + CLIENTS)
        clients = [asyncio.create_task(Client(url, self._ledger, seed, may_go_on).run()) for seed in seeds]
        try:
            yield clients
        finally:
            for client in clients:
                client.cancel()
            for ended in await asyncio.gather(*clients, return_exceptions=True):
                if isinstance(ended, Exception):
                    self._found.lost.append(f"a client failed: {ended}")

    def _may_chat(self) -> bool:
        return self._observer.open_batches < MAX_OPEN_BATCHES

    async def _fire(self, clients: list["asyncio.Task[None]"]) -> None:
        plan, head, since_commit = self._plan, self._observer.head, 0
        waiting: list[asyncio.Task[None]] = []
        while (done := self._faults.kills.total()) < plan.kills:
            await asyncio.sleep(min(self._draw.expovariate(1 / plan.pause_s), 4 * plan.pause_s))
            if any(client.done() for client in clients):
                return
            await self._faults.kill_something()
            since_commit += 1
            if (done + 1) % plan.stop_every_kills == 0:
                self._stop_a_trainer()
            if (done + 1) % plan.rollback_every_kills == 0:
                waiting.append(asyncio.create_task(self._roll_back(f"rollback-{done}")))
            if (done + 1) % 10 == 0:
                await self._report_progress()
            if self._observer.head > head:
                head, since_commit = self._observer.head, 0
            if since_commit >= plan.commit_every_kills:
                await self._faults.all_back()
                before = head
                if not await self._observer.until(lambda: self._observer.head > before, self._plan.patience_s):  # noqa: B023
                    self._found.stuck.append(
                        f"no version after {head} within {self._plan.patience_s:g} s without a fault"
                    )
                    break
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(ended, BaseException):
                self._found.stuck.append(f"a rollback failed: {ended}")

    async def _roll_back(self, request_id: str) -> None:
        """To one of the newest versions, which may be a live one or without bytes: then it is refused."""
        target = max(0, self._observer.head - self._draw.randint(0, 4))
        job_id = await Client(self._deployment.gateway_url, self._ledger, 0).rollback(target, request_id)
        if job_id:
            self._rollbacks.append(job_id)

    def _stop_a_trainer(self) -> None:
        name = self._draw.choice(self._deployment.trainer_names)
        self._stops += self._faults.stop(name, self._plan.lease_ttl_s * self._draw.uniform(1.2, 2.0))

    async def _report_progress(self) -> None:
        self._found.add(await self._observer.findings())
        kills = ", ".join(f"{kind} {count}" for kind, count in sorted(self._faults.kills.items()))
        ledger = self._ledger
        self._say(
            f"{self._faults.kills.total()} of {self._plan.kills} kills ({kills}); head {self._observer.head}, "
            f"{len(ledger.chats)} chats, {len(ledger.reports)} reports; {self._found.counts()}"
        )

    async def _check_end(self) -> None:
        """Quiet, then one more batch: a loop that has come to rest must also still turn."""
        self._found.add(await self._observer.until_quiet(self._plan.patience_s))
        head = self._observer.head
        await Client(self._deployment.gateway_url, self._ledger, self._plan.seed).feed(GROUPS, "last")
        if not await self._observer.until(lambda: self._observer.head > head, self._plan.patience_s):
            self._found.stuck.append(f"the last batch made no version after {head}")
        self._found.add(await self._observer.until_quiet(self._plan.patience_s))
        gateway, registry = self._observer.read()
        if self._plan.shape.real_engine:
            from tests.chaos.log_probs import wrong_log_probs

            self._found.wrong_version.extend(wrong_log_probs(gateway, registry, self._deployment.store))
        else:
            self._found.wrong_version.extend(await self._observer.engine_keys(registry))
        self._found.lost.extend(self._ledger.refused)
        self._found.lost.extend(f"rollback {job}" for job in self._rollbacks if job not in registry.jobs)

    def _say(self, text: str) -> None:
        print(text, flush=True)
