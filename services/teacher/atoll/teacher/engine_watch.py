"""Watches one engine: proves it, notices when it goes away, and takes it back when it is proven again."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineUnavailable
from atoll.common.errors import AtollError, BadConfiguration, InternalError
from atoll.teacher.engine import Engine, EngineState
from atoll.teacher.engine_pool import EnginePool
from atoll.teacher.own_engine import own_engine
from atoll.teacher.proof import Prover
from atoll.teacher.settings import TeacherSettings

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 60.0
LONGEST_PROBE_PAUSE_S = 5.0
"""Between looks at an engine of others: it may be back at any time."""


class EngineWatch:
    """One engine of the pool. `run` never ends by itself unless a restart is given up."""

    def __init__(
        self, engine: Engine, client: EngineClient, pool: EnginePool, prover: Prover, settings: TeacherSettings
    ) -> None:
        self.engine = engine
        self.tried = asyncio.Event()
        """Set after the first proof, however it ended."""
        self._client = client
        self._pool = pool
        self._prover = prover
        self._settings = settings

    async def run(self) -> None:
        """For an engine that others start and stop."""
        failures = 0
        while True:
            if await self.prove():
                failures = 0
                await self._until_away()
            await asyncio.sleep(_pause(FIRST_PAUSE_S, failures, LONGEST_PROBE_PAUSE_S))
            failures += 1

    async def run_own(self, environment: Mapping[str, str], command: tuple[str, ...]) -> None:
        """For the teacher's own engine: starts it, and starts it again when it dies or hangs.

        Raises: BadConfiguration when it never served, InternalError when it was started again too often.
        """
        deaths: dict[int, float] = {}
        clock = asyncio.get_running_loop().time
        while True:
            async with own_engine(command, environment, self._settings.stop_timeout_s) as process:
                ended = asyncio.create_task(process.wait())
                try:
                    problem = await self._serve_until_gone(ended)
                finally:
                    ended.cancel()
            if not self.engine.weight_version:
                raise BadConfiguration(problem)
            self._pool.leave(self.engine, EngineState.AWAY, problem)
            window = clock() - self._settings.restart_window_s
            deaths = {life: at for life, at in deaths.items() if at > window and life not in self.engine.excused}
            pause = _pause(self._settings.restart_pause_s, len(deaths), LONGEST_PAUSE_S)
            self._pool.leave(self.engine, EngineState.AWAY, f"{problem}; it is started again in {pause:g} s")
            deaths[self.engine.restarts] = clock()
            # Within the pause the sequence that it died of may be found.
            await asyncio.sleep(pause)
            counted = len(deaths.keys() - self.engine.excused)
            if counted > self._settings.max_restarts:
                raise InternalError(f"{problem}; it was started again {counted - 1} times, which is the limit")
            self.engine.restarts += 1
            self._pool.leave(self.engine, EngineState.STARTING, problem)

    async def prove(self) -> bool:
        """Proves the engine now and moves it in the pool accordingly; True when it serves."""
        try:
            weight_version = await self._prover.prove(self._client)
        except EngineUnavailable as error:
            self._pool.leave(self.engine, EngineState.AWAY, error.message)
        except AtollError as error:
            self._pool.leave(self.engine, EngineState.REFUSED, error.message)
        else:
            if self.engine.serving:
                self.engine.weight_version = weight_version
            else:
                self._pool.join(self.engine, weight_version)
        finally:
            self.tried.set()
        self.engine.tell(self.engine.serving)
        return self.engine.serving

    async def _serve_until_gone(self, ended: asyncio.Task[int]) -> str:
        """Why the started engine does not serve any more, or never did."""
        started = asyncio.create_task(self._until_proven())
        try:
            await asyncio.wait({ended, started}, return_when=asyncio.FIRST_COMPLETED)
            if started.done() and not ended.done():
                if (problem := started.result()) is not None:
                    return problem
                away = asyncio.create_task(self._until_away())
                await asyncio.wait({ended, away}, return_when=asyncio.FIRST_COMPLETED)
                away.cancel()
                if not ended.done():
                    # A dying engine closes its connections before its process is gone.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(ended), 1.0)
            if ended.done():
                return f"the teacher's engine ended with status {ended.result()}; its log says why"
            return f"the teacher's engine does not serve any more: {self.engine.detail}"
        finally:
            started.cancel()

    async def _until_proven(self) -> str | None:
        """None once it serves, else why it never will."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                while not await self._client_answers():
                    await asyncio.sleep(FIRST_PAUSE_S)
        except TimeoutError:
            return f"the engine {self.engine.url} did not sample within {self._settings.start_timeout_s:g} s"
        return None if await self.prove() else self.engine.detail

    async def _client_answers(self) -> bool:
        try:
            await self._client.model_info()
            await self._client.weight_version()
        except EngineUnavailable:
            return False
        return True

    async def _until_away(self) -> None:
        """Returns when the engine does not serve any more: found by a look now and then, by a doubt, or by a proof."""
        while self.engine.serving:
            self.engine.changed.clear()
            if self.engine.doubted:
                await self.prove()
                continue
            try:
                async with asyncio.timeout(self._settings.watch_s):
                    await self.engine.changed.wait()
            except TimeoutError:
                await self._glance()

    async def _glance(self) -> None:
        try:
            await self._client.model_info()
        except AtollError as error:
            self._pool.leave(self.engine, EngineState.AWAY, error.message)


def _pause(first_s: float, failures: int, longest_s: float) -> float:
    return min(first_s * 2.0 ** min(failures, 30), longest_s)
