"""Reconciliation: drives every engine to the head, for ever, and never undoes a commit.

A task per engine looks at what the engine serves; when that is not the head, it updates the engine. It runs at boot,
after every commit, and every few seconds, so an engine that restarted with old weights is found too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from atoll.common.engine_types import ModelInfo
from atoll.common.errors import AtollError, Unavailable
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.retries import Patience

log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What publishing needs of an engine; `atoll.common.engine_client.EngineClient` has it."""

    base_url: str

    async def model_info(self) -> ModelInfo: ...

    async def weight_version(self) -> str: ...

    async def continue_generation(self) -> None: ...

    async def update_weights(self, model_path: Path, weight_version: str) -> None: ...


@dataclass
class _Seen:
    """What one engine last proved to serve; None when it is not known."""

    version: WeightVersion | None = None
    failure: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note_failure(self, engine: str, error: Exception) -> None:
        """Logs a failure once, however often it repeats."""
        self.version = None
        why = error.message if isinstance(error, AtollError) else repr(error)
        if why != self.failure:
            log.warning("engine does not serve the head, trying again", engine=engine, error=why)
        self.failure = why


class Publisher:
    """on_served(number) is called when at least `min_engines` engines answer with version `number` or a later one."""

    def __init__(
        self,
        engines: Sequence[Engine],
        chain: Chain,
        patience: Patience,
        *,
        min_engines: int,
        poll_s: float,
        on_served: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engines = engines
        self._chain = chain
        self._patience = patience
        self._min_engines = min_engines
        self._poll_s = poll_s
        self._on_served = on_served
        self._seen = {engine.base_url: _Seen() for engine in engines}

    def wake(self) -> None:
        """Call after a commit: the engines are looked at now."""
        for seen in self._seen.values():
            seen.changed.set()

    async def run_forever(self) -> None:
        """Reconciles until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._follow(engine))

    async def _follow(self, engine: Engine) -> None:
        seen = self._seen[engine.base_url]
        failures = 0
        while True:
            try:
                head = await self._patience.ask("head to publish", self._chain.head)
                await self._drive(engine, head)
            except Exception as error:  # whatever an engine answers, training goes on and so does publishing
                seen.note_failure(engine.base_url, error)
                away = isinstance(error, Unavailable)
                # Asking costs nothing; an update that an engine refuses costs it its cache every time.
                await asyncio.sleep(self._poll_s if away else self._patience.pause_s(failures))
                failures = 0 if away else failures + 1
                continue
            if seen.version != head.weight_version:
                log.info("engine serves the head", engine=engine.base_url, weight_version=str(head.weight_version))
            seen.version, seen.failure = head.weight_version, ""
            failures = 0
            number = served_number({url: s.version for url, s in self._seen.items()}, head, self._min_engines)
            if number is not None:
                await self._on_served(number)
            await _set_or_after(seen.changed, self._poll_s)

    async def _drive(self, engine: Engine, head: ChainVersion) -> None:
        """Returns when the engine serves the head; raises the engine's AtollError when it does not."""
        wanted = str(head.weight_version)
        info = await engine.model_info()
        if info.weight_version == wanted:
            if self._seen[engine.base_url].version == head.weight_version:
                return
            # A trainer that was killed while it published leaves a paused engine, and /model_info may be ahead of
            # the weights: end the pause, then ask the weights themselves.
            await engine.continue_generation()
            if await engine.weight_version() == wanted:
                return
        await engine.update_weights(await self._chain.location(head.model_digest), wanted)


def served_number(versions: Mapping[str, WeightVersion | None], head: ChainVersion, min_engines: int) -> int | None:
    """The newest version that at least `min_engines` engines serve or are past, within the head's incarnation."""
    current = head.weight_version.incarnation
    numbers = sorted((v.number for v in versions.values() if v is not None and v.incarnation == current), reverse=True)
    return numbers[min_engines - 1] if len(numbers) >= min_engines else None


async def _set_or_after(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    finally:
        event.clear()
