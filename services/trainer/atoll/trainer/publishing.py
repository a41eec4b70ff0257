"""Reconciliation: drives every engine to the head, for ever, and never undoes a commit.

```
unknown --sampled: the head's weights--> serves the head <--updated-- unsure
   ^------------- does not answer, head moved -----'      any other answer to an update --^
```
A task per engine looks at what the engine serves; when that is not the head's weights, it updates the engine. It runs
at boot, after every commit, and every few seconds, so an engine that restarted with old weights is found too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.engine_types import ModelInfo, WeightsRefused
from atoll.common.errors import AtollError, InvalidInput, Unavailable
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.refused_head import HeadWatch, OnRefusedHead
from atoll.trainer.retries import Patience
from atoll.trainer.waiting import set_or_after

log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What publishing needs of an engine; `atoll.common.engine_client.EngineClient` has it."""

    base_url: str

    async def model_info(self) -> ModelInfo: ...

    async def weight_version(self) -> str: ...

    async def continue_generation(self) -> None: ...

    async def update_weights(self, model_path: Path, weight_version: str) -> None: ...


class Versions(Protocol):
    """What publishing needs of the registry; `atoll.trainer.chain.Chain` has it."""

    scenario: str

    async def head(self) -> ChainVersion: ...

    async def version(self, number: int) -> ChainVersion: ...

    async def location(self, digest: str) -> Path: ...


class NotHeld(Exception):
    """Raised before an engine would be touched without the lease."""


@dataclass
class _Seen:
    """What one engine last proved to serve."""

    version: WeightVersion | None = None
    """The version whose weights it has; None when that is not known."""
    proven: str = ""
    """The name that it samples under."""
    unsure: bool = False
    """An update did not succeed: whatever the engine says, it may have taken the weights, or some of them."""
    failure: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note_failure(self, engine: str, error: Exception) -> None:
        """Logs a failure once, however often it repeats."""
        self.version, self.proven = None, ""
        why = error.message if isinstance(error, AtollError) else repr(error)
        if why != self.failure:
            log.warning("engine does not serve the head, trying again", engine=engine, error=why)
        self.failure = why


async def _nobody_to_ask(head: ChainVersion) -> None:
    log.error("nothing rolls back by itself here; roll back by hand", version=head.number)


class Publisher:
    """on_served(number) is called when at least `min_engines` engines answer with version `number` or a later one.

    `held` says whether this process may touch engines. `on_refused_head` is called once for a head that engines
    refuse and none loads within `publish_timeout_s` (0: never).
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        chain: Versions,
        patience: Patience,
        *,
        min_engines: int,
        poll_s: float,
        on_served: Callable[[int], Awaitable[None]],
        held: Callable[[], bool] = lambda: True,
        publish_timeout_s: float = 0.0,
        on_refused_head: OnRefusedHead = _nobody_to_ask,
    ) -> None:
        self._engines = engines
        self._chain = chain
        self._patience = patience
        self._min_engines = min_engines
        self._poll_s = poll_s
        self._on_served = on_served
        self._held = held
        self._watch = HeadWatch(chain.scenario, publish_timeout_s, on_refused_head)
        self._seen = {engine.base_url: _Seen() for engine in engines}

    def wake(self) -> None:
        """Call after a commit, and when the lease was acquired: the engines are looked at now."""
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
                self._watch.note_lease(self._held())
                self._refuse_unless_held()
                head = await self._reconcile(engine, seen)
            except NotHeld:
                # Whoever holds the lease drives the engine meanwhile.
                seen.version, seen.proven = None, ""
                await set_or_after(seen.changed, self._poll_s)
                seen.changed.clear()
                continue
            except Exception as error:  # whatever an engine answers, training goes on and so does publishing
                seen.note_failure(engine.base_url, error)
                await self._watch.check()
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
            await set_or_after(seen.changed, self._poll_s)
            seen.changed.clear()

    async def _reconcile(self, engine: Engine, seen: _Seen) -> ChainVersion:
        """The head, once the engine serves it; raises what keeps it from that."""
        info = await engine.model_info()
        # Asked for after the engine: what it reports is never ahead of this head, and never driven back.
        head = await self._patience.ask("head to publish", self._chain.head)
        self._watch.see(head)
        try:
            await self._drive(engine, seen, info.weight_version, head)
        except WeightsRefused:
            self._watch.note_refused(head)
            raise
        self._watch.note_loaded(head)
        return head

    async def _drive(self, engine: Engine, seen: _Seen, reported: str, head: ChainVersion) -> None:
        """Returns when the engine serves the head's weights; raises the engine's AtollError when it does not."""
        if not seen.unsure and await self._has_weights_of(reported, head):
            if seen.proven == reported:
                return
            # A trainer that was killed while it published leaves a paused engine, and /model_info may be ahead of
            # the weights: end the pause, then ask the weights themselves.
            self._refuse_unless_held()
            await engine.continue_generation()
            if await engine.weight_version() == reported:
                seen.proven = reported
                return
        wanted = str(head.weight_version)
        path = await self._chain.location(head.model_digest)
        self._refuse_unless_held()
        seen.version, seen.proven, seen.unsure = None, "", True
        await engine.update_weights(path, wanted)
        seen.proven, seen.unsure = wanted, False

    async def _has_weights_of(self, reported: str, head: ChainVersion) -> bool:
        """Whether this name stands for the head's weights: a job of a critic alone changes none, so nothing is
        published for it. A name of another incarnation never does: samples under it would not be admitted."""
        try:
            version = WeightVersion.parse(reported)
        except InvalidInput:
            return False
        if version == head.weight_version:
            return True
        if version.incarnation != head.weight_version.incarnation or not version.number < head.number:
            return False
        try:
            known = await self._patience.ask("engine's version", lambda: self._chain.version(version.number))
        except AtollError as error:
            if error.reason == errors_pb2.REASON_VERSION_NOT_FOUND:
                return False
            raise
        return known.weight_version == version and known.model_digest == head.model_digest != ""

    def _refuse_unless_held(self) -> None:
        if not self._held():
            raise NotHeld


def served_number(versions: Mapping[str, WeightVersion | None], head: ChainVersion, min_engines: int) -> int | None:
    """The newest version that at least `min_engines` engines serve or are past, within the head's incarnation."""
    current = head.weight_version.incarnation
    numbers = sorted((v.number for v in versions.values() if v is not None and v.incarnation == current), reverse=True)
    return numbers[min_engines - 1] if len(numbers) >= min_engines else None
