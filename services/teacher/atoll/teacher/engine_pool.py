"""Leases of engines: tokens in flight are bounded for each, the least busy one is next, one that is away gets none."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from atoll.common.engine_types import EngineUnavailable
from atoll.teacher.engine import Engine, EngineState
from atoll.teacher.fair_queue import FairQueue, length_class

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Waiter:
    tokens: int
    alone: bool
    lease: asyncio.Future[tuple[Engine, int]]

    @property
    def waits(self) -> bool:
        return not self.lease.done()


class EnginePool:
    """The engines of one model. Belongs to one event loop.

    Args:
        wait_s: how long leases wait while no engine serves; then they fail until one does.
        on_serving: called with False when the last engine leaves, with True when the first one comes.
    """

    def __init__(
        self, engines: Sequence[Engine], wait_s: float, on_serving: Callable[[bool], None] = lambda _: None
    ) -> None:
        self.engines = engines
        self.on_serving = on_serving
        self._wait_s = wait_s
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._alone: deque[_Waiter] = deque()
        self._outage: asyncio.TimerHandle | None = None
        self._hopeless = False

    @property
    def serving(self) -> bool:
        return any(engine.serving for engine in self.engines)

    @asynccontextmanager
    async def lease(self, tokens: int, flow: Hashable = None, *, alone: bool = False) -> AsyncIterator[Engine]:
        """An engine with room for a sequence; `alone`: one that works on nothing else meanwhile.

        Sequences of a flow are served in order, and flows get equal shares; see FairQueue. Raises EngineUnavailable
        when no engine has served for `wait_s`.
        """
        if self._hopeless:
            raise EngineUnavailable(self._outage_message())
        waiter = _Waiter(tokens, alone, asyncio.get_running_loop().create_future())
        if alone:
            self._alone.append(waiter)
        else:
            self._queue.push((flow, length_class(tokens)), tokens, waiter)
        self._dispatch()
        try:
            engine, taken = await waiter.lease
        except asyncio.CancelledError:
            if waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
                self._give_back(*waiter.lease.result())
            else:
                self._dispatch()
            raise
        try:
            yield engine
        finally:
            self._give_back(engine, taken)

    def join(self, engine: Engine, weight_version: str) -> None:
        """The engine was proven and gets sequences."""
        first = not self.serving
        engine.state, engine.detail, engine.weight_version = EngineState.SERVING, "", weight_version
        self._hopeless = False
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        log.info("engine serves", engine=engine.url, weight_version=weight_version)
        if first:
            self.on_serving(True)
        self._dispatch()

    def leave(self, engine: Engine, state: EngineState, detail: str) -> None:
        """The engine gets no sequences any more; those that it has fail or finish by themselves."""
        was_serving = engine.serving
        if (engine.state, engine.detail) != (state, detail):
            log.warning("engine does not serve", engine=engine.url, state=state.value, detail=detail)
        engine.state, engine.detail = state, detail
        engine.tell(False)
        engine.changed.set()
        if was_serving and not self.serving:
            self.on_serving(False)
            self._outage = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    def _give_up(self) -> None:
        self._outage, self._hopeless = None, True
        for waiter in (*self._queue.drain(), *self._alone):
            if waiter.waits:
                waiter.lease.set_exception(EngineUnavailable(self._outage_message()))
        self._alone.clear()

    def _outage_message(self) -> str:
        states = "; ".join(
            f"{each.url} is {each.state.value}: {each.detail or 'no answer yet'}" for each in self.engines
        )
        return f"no engine has served for {self._wait_s:g} s: {states}"

    def _dispatch(self) -> None:
        """Hands out leases strictly in order: one that does not fit waits, and nothing overtakes it meanwhile."""
        while (waiter := self._next()) is not None:
            engine = self._with_room(waiter)
            if engine is None:
                return
            if waiter.alone:
                self._alone.popleft()
            else:
                self._queue.pop()
            taken = engine.size if waiter.alone else min(waiter.tokens, engine.size)
            engine.in_flight += taken
            waiter.lease.set_result((engine, taken))

    def _next(self) -> _Waiter | None:
        while self._alone and not self._alone[0].waits:
            self._alone.popleft()
        return self._alone[0] if self._alone else self._queue.head(lambda waiter: waiter.waits)

    def _with_room(self, waiter: _Waiter) -> Engine | None:
        serving = [engine for engine in self.engines if engine.serving]
        engine = min(serving, key=lambda each: each.in_flight, default=None)
        if engine is None or (engine.in_flight and (waiter.alone or engine.in_flight + waiter.tokens > engine.size)):
            return None
        return engine

    def _give_back(self, engine: Engine, tokens: int) -> None:
        engine.in_flight -= tokens
        self._dispatch()
