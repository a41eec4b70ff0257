"""What a trainer talks to, in process and without sockets, with a place to die before and after every effect."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.common.engine_types import ModelInfo
from atoll.families.steps import TrainStep
from atoll.trainer.backend import FamilyBinding, Loaded, StepReport

from tests.fakes.backend import FakeBackend, read_weights, write_model

NO_PLACES = ("Lease", "Get", "List")
"""Calls without an effect on a job: dying before or after one of these is dying after the effect before it."""


class Killed(BaseException):
    """Raised in a thread of a process that is dead."""


Place = tuple[str, int]
"""What is about to happen or has happened, and for which time. Example: ("after CommitVersion", 2)."""


class Tripwire:
    """Counts the places where a process could die, and at place `at` it does.

    Whatever it would have done after that, it hangs: its memory is dropped by cancelling its tasks.
    """

    def __init__(self, at: Place | None = None) -> None:
        self.at = at
        self.places: list[Place] = []
        self.dead = asyncio.Event()
        self.is_dead = False
        self._visits: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()

    def next_is(self, place: str) -> bool:
        """Whether this is where it dies, the next time that it gets there."""
        return self.at == (place, self._visits[place] + 1)

    async def reach(self, place: str) -> None:
        """A place on the event loop."""
        if self._dies(place):
            await asyncio.Event().wait()

    def reach_in_thread(self, place: str) -> None:
        """A place in a thread. Raises Killed."""
        if self._dies(place):
            raise Killed

    def _dies(self, place: str) -> bool:
        if self.is_dead:
            return True
        dies = self.next_is(place)
        self._visits[place] += 1
        self.places.append((place, self._visits[place]))
        if not dies:
            return False
        self.is_dead = True
        self._loop.call_soon_threadsafe(self.dead.set)
        return True


class LocalChannel:
    """Stands for a `grpc.aio.Channel`: calls a service's handlers, which raise their AtollErrors as they are."""

    def __init__(self, handlers: Mapping[str, Any], wire: Tripwire) -> None:
        self._handlers = handlers
        self._wire = wire

    def unary_unary(self, path: str, *_: object, **__: object) -> Any:
        handler, name = self._handlers[path].unary_unary, path.rpartition("/")[2]
        is_place = not any(part in name for part in NO_PLACES)

        async def call(request: Any, timeout: float | None = None) -> Any:
            if is_place:
                await self._wire.reach(f"before {name}")
            elif self._wire.is_dead:
                await asyncio.Event().wait()
            reply = await handler(request, None)
            if is_place:
                await self._wire.reach(f"after {name}")
            return reply

        return call

    def unary_stream(self, path: str, *_: object, **__: object) -> Any:
        name = path.rpartition("/")[2]

        async def call(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> AsyncIterator[Any]:
            await self._wire.reach(f"before {name}")
            async for piece in self._handlers[path].unary_stream(request, None):
                yield piece
            await self._wire.reach(f"after {name}")

        return call

    def stream_stream(self, path: str, *_: object, **__: object) -> Any:
        raise NotImplementedError("no service that a trainer calls has one")

    stream_unary = stream_stream


class MortalBackend(FakeBackend):
    """A backend whose process can die before, within and after every call."""

    def __init__(self, wire: Tripwire) -> None:
        super().__init__()
        self._wire = wire

    def load(
        self,
        model_directory: Path,
        checkpoint_directory: Path | None,
        reference_directory: Path | None,
        *,
        weights_from_model: bool = False,
    ) -> Loaded:
        self._wire.reach_in_thread("before load")
        loaded = super().load(
            model_directory, checkpoint_directory, reference_directory, weights_from_model=weights_from_model
        )
        self._wire.reach_in_thread("after load")
        return loaded

    def train(self, family: FamilyBinding, steps: Sequence[TrainStep], learning_rates: Sequence[float]) -> StepReport:
        self._wire.reach_in_thread("before train")
        self.before["second_step"] = [lambda: self._wire.reach_in_thread("within train")]
        report = super().train(family, steps, learning_rates)
        self._wire.reach_in_thread("after train")
        return report

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        self._wire.reach_in_thread("before stage")
        assert model_directory is not None
        if self._wire.next_is("within stage"):
            write_model(model_directory, self.weights)
        self._wire.reach_in_thread("within stage")
        super().stage(model_directory, checkpoint_directory, driver_state)
        self._wire.reach_in_thread("after stage")


class MortalEngine:
    """An engine that lives on while the trainer at the other end dies; `attach` gives it the next one's wire."""

    base_url = "http://engine"

    def __init__(self) -> None:
        self.served = "1:0"
        self.weights: list[float] = []
        self._wire: Tripwire | None = None

    def attach(self, wire: Tripwire) -> None:
        self._wire = wire

    async def model_info(self) -> ModelInfo:
        return ModelInfo("/model", self.served, ("Fake",))

    async def weight_version(self) -> str:
        return self.served

    async def continue_generation(self) -> None:
        """Nothing pauses it."""

    async def update_weights(self, model_path: Path, weight_version: str) -> None:
        assert self._wire is not None
        await self._wire.reach("before update_weights")
        self.served = weight_version
        self.weights = read_weights(model_path)
        await self._wire.reach("after update_weights")
