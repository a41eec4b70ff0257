"""Looks at a running deployment: its databases, its store, its engines. Waits for what must come by itself."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import psutil

from tests.chaos.client import Ledger
from tests.chaos.databases import (
    GatewayState,
    RegistryState,
    head_number,
    lease_address,
    open_batches,
    read_gateway,
    read_registry,
)
from tests.chaos.deployment import SCENARIO, Deployment
from tests.chaos.invariants import Findings, check, check_head_bytes
from tests.fakes.weight_engine import token_of

LOOK_SECONDS = 0.1
RECHECK_SECONDS = 1.0
"""The two databases are read one after the other; what is only between them is gone on a second look."""
PROBE_PROMPT = [5, 6, 7]


class Observer:
    """Reads; changes nothing."""

    def __init__(self, deployment: Deployment, ledger: Ledger) -> None:
        self._deployment = deployment
        self._ledger = ledger

    @property
    def open_batches(self) -> int:
        return open_batches(self._deployment.gateway_database)

    @property
    def head(self) -> int:
        """Number of the newest version."""
        return head_number(self._deployment.registry_database, SCENARIO)

    @property
    def holder(self) -> str:
        """Name of the trainer that had the lease last; "" when none ever had it."""
        address = lease_address(self._deployment.registry_database, SCENARIO)
        names = [name for name in self._deployment.trainer_names if self._deployment.address(name) == address]
        return names[0] if names else ""

    def read(self) -> tuple[GatewayState, RegistryState]:
        gateway = read_gateway(self._deployment.gateway_database)
        return gateway, read_registry(self._deployment.registry_database, SCENARIO)

    async def findings(self) -> Findings:
        """What is broken, on two looks in a row."""
        first = await asyncio.to_thread(self._look)
        if not first.any:
            return first
        await asyncio.sleep(RECHECK_SECONDS)
        second = await asyncio.to_thread(self._look)
        return Findings(*([item for item in kept if item in vars(second)[name]] for name, kept in vars(first).items()))

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether a condition came true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    async def until_quiet(self, seconds: float) -> Findings:
        """Waits until nothing is open any more and every engine serves the head; then checks everything.

        Call it when everything runs and nobody chats.
        """
        deadline = time.monotonic() + seconds
        while True:
            gateway, registry = await asyncio.to_thread(self.read)
            waiting = [*_unfinished(gateway, registry), *await self._engine_problems(registry)]
            if not waiting or time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_SECONDS)
        found = await self.findings()
        found.stuck.extend(f"{item}, after {seconds:g} s" for item in waiting)
        found.lost.extend(check_head_bytes(registry, self._deployment.store))
        return found

    async def served(self) -> bool:
        """Whether every engine samples from the head."""
        registry = await asyncio.to_thread(read_registry, self._deployment.registry_database, SCENARIO)
        return not await self._engine_problems(registry)

    async def engine_keys(self, registry: RegistryState) -> list[str]:
        """Engines whose tokens are not those of the version that they report, of the fake kind."""
        wrong = []
        for url in self._deployment.engine_urls:
            version, tokens = await _probe(url)
            stored = registry.by_weight_version.get(version)
            expected = [] if stored is None else [token_of(registry.key_of(stored), PROBE_PROMPT, 0)]
            if tokens != expected:
                wrong.append(f"{url} says {version} and samples {tokens}, expected {expected}")
        return wrong

    def leftovers(self) -> list[str]:
        """Processes of this deployment that nobody holds any more: workers that outlived their trainer."""
        marker = str(self._deployment.directory)
        held = {process.pid for process in self._deployment.processes.values() if process.running}
        held |= {child.pid for pid in held for child in psutil.Process(pid).children(recursive=True)}
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            try:
                mine = marker in process.environ().get("ATOLL_TRAINER_RUN_DIR", "")
            except psutil.Error:
                continue
            if mine and process.pid not in held:
                found.append(f"process {process.pid} is left: {' '.join(process.info['cmdline'] or [])[:120]}")
        return found

    def _look(self) -> Findings:
        gateway, registry = self.read()
        arithmetic = not self._deployment.shape.real_engine
        return check(gateway, registry, self._ledger, arithmetic=arithmetic)

    async def _engine_problems(self, registry: RegistryState) -> list[str]:
        head, problems = registry.versions[-1], []
        for url in self._deployment.engine_urls:
            try:
                version, _ = await _probe(url)
            except (aiohttp.ClientError, TimeoutError, KeyError) as error:
                problems.append(f"engine {url} does not answer: {error!r}")
                continue
            served = registry.by_weight_version.get(version)
            same = served is not None and (served.model_digest, served.incarnation) == (
                head.model_digest,
                head.incarnation,
            )
            if not same:
                problems.append(f"engine {url} serves {version}, the head is {head.weight_version}")
        return problems


def _unfinished(gateway: GatewayState, registry: RegistryState) -> list[str]:
    return [
        *(f"batch {job_id} is open" for job_id, state in gateway.batches.items() if state == "open"),
        *(f"receipt {receipt} is reserved" for receipt, claim in gateway.claims.items() if claim.state == "reserved"),
        *(f"job {job_id} is {job.phase}" for job_id, job in registry.jobs.items() if job.open),
    ]


async def _probe(url: str) -> tuple[str, list[int]]:
    """The version that samples, found by sampling one token, and that token."""
    body = {"input_ids": PROBE_PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(f"{url}/generate", json=body) as answer:
        frame = await answer.json()
    return frame["meta_info"]["weight_versions"][-1]["version"], frame["output_ids"]
