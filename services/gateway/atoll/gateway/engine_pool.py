"""The serving engines: which of them answer, what they serve, and which one takes the next request.

A gateway does not see a publish. It sees what an engine reports and which weights its replies came from. An engine that
refused an update keeps reporting the version before, and takes traffic only while no other serves the head; one whose
report and replies disagree has weights that nobody named, and takes none until they agree.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import structlog
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineUnavailable
from atoll.common.errors import AtollError
from atoll.gateway.head import Head, serves_now

log = structlog.get_logger(__name__)

PROBE_INTERVAL_SECONDS = 2.0
PROBE_SECONDS = 5.0
"""How long an engine may take to say what it serves; one that is silent keeps nobody else waiting."""
FIRST_ANSWER_SECONDS = 2.0
"""How long a start waits for engines."""


@dataclass
class Engine:
    """One engine as last heard. Only EnginePool and the runs it counts change it.

    Example: Engine("http://127.0.0.1:30000", True, "1:3", "/store/artifacts/9f2c...", 2048, in_flight=2)
    """

    url: str
    healthy: bool = False
    weight_version: str | None = None
    model_path: str | None = None
    context_length: int | None = None
    """None until it has said so, and when it takes the model's own limit."""
    in_flight: int = 0
    problem: str = "not asked yet"
    doubted: bool = False
    """A reply came from other weights than it reports. Out of traffic until both agree."""


class EnginePool:
    """Spreads requests over the engines. start() before use, stop() after."""

    def __init__(self, urls: tuple[str, ...], reply_timeout_s: float) -> None:
        """urls: base URLs. reply_timeout_s: how long a reply may be silent; a plain one is until it is complete."""
        self.engines = tuple(Engine(url.rstrip("/")) for url in urls)
        self._reply_timeout_s = reply_timeout_s
        self._clients: dict[tuple[str, int], EngineClient] = {}
        self._following: list[asyncio.Task[None]] = []
        self._look = asyncio.Event()
        self._rechecks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Asks every engine what it serves, again and again; returns once all have answered, or soon without them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await self.probe()
        self._following = [asyncio.create_task(self._follow(engine)) for engine in self.engines]

    async def stop(self) -> None:
        tasks = [*self._following, *self._rechecks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def client(self, engine: Engine, vocabulary_size: int) -> EngineClient:
        """The client of an engine that serves a model of this vocabulary."""
        key = (engine.url, vocabulary_size)
        if key not in self._clients:
            self._clients[key] = EngineClient(engine.url, vocabulary_size, idle_timeout_s=self._reply_timeout_s)
        return self._clients[key]

    def choose(self, head: Head | None, pinned: frozenset[str] | None, strangers: frozenset[str]) -> Engine:
        """The engine for the next request: one that answers, serves the head, and has the least to do, in this order.

        head: the scenario's newest version, None when unknown: then any engine will do. pinned: only an engine that
        serves one of these weight versions. strangers: URLs of engines of other scenarios. Raises EngineUnavailable
        when none is left; the engines are asked again at once then, because what is known of them may be old.
        """
        if not self.engines:
            raise EngineUnavailable("no serving engine is configured")
        known = [engine for engine in self.engines if engine.url not in strangers]
        if not known:
            raise EngineUnavailable("every serving engine serves another scenario")
        known = [engine for engine in known if not engine.doubted]
        if not known:
            raise EngineUnavailable("no engine agrees with itself about what it serves; an update failed half-way")
        if pinned is not None:
            candidates = [engine for engine in known if engine.weight_version in pinned]
            wanted = " or ".join(sorted(pinned))
        elif head is not None:
            # One that has not answered yet is tried when there is no other.
            candidates = [e for e in known if e.weight_version is None or serves_now(e.weight_version, head)]
            wanted = f"the head {head.weight_version}"
        else:
            candidates, wanted = known, ""
        if not candidates:
            self._look_again()
            served = sorted({str(engine.weight_version) for engine in known})
            raise EngineUnavailable(f"no engine serves {wanted}, they serve {', '.join(served)}")
        return min(
            candidates,
            key=lambda engine: (
                not engine.healthy,
                head is not None and engine.weight_version not in head.content,
                engine.in_flight,
            ),
        )

    async def context_length(self) -> int | None:
        """Most tokens that every engine that answers takes, None when they take the model's own limit.

        While none answers, what they said last.
        """
        if not any(engine.healthy for engine in self.engines):
            await self.probe()
        known = [engine for engine in self.engines if engine.context_length is not None]
        # A busy engine may miss a probe, and takes no longer prompts for that.
        told = [engine for engine in known if engine.healthy] or known
        return min((engine.context_length for engine in told if engine.context_length is not None), default=None)

    async def probe(self) -> None:
        """Asks every engine what it serves, all at once."""
        await asyncio.gather(*(self._probe(engine) for engine in self.engines))

    def _look_again(self) -> None:
        self._look.set()
        self._look = asyncio.Event()

    async def _follow(self, engine: Engine) -> None:
        while True:
            look = self._look
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_SECONDS):
                    await look.wait()
            try:
                await self._probe(engine)
            except Exception as defect:  # this engine would never be asked again, in silence
                log.error("engine not asked", engine=engine.url, exc_info=defect)

    async def _probe(self, engine: Engine) -> None:
        # A probe sends no token ids, so any vocabulary will do.
        client = self.client(engine, 1)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                info = await client.model_info()
                if not engine.healthy:
                    engine.context_length = await client.context_length()
                sampled_by = await client.weight_version() if engine.doubted else info.weight_version
        except TimeoutError:
            self.failed(engine, EngineUnavailable(f"{engine.url} says nothing within {PROBE_SECONDS:g} s"))
            return
        except AtollError as error:
            self.failed(engine, error)
            return
        if sampled_by != info.weight_version:
            problem = f"{engine.url} reports {info.weight_version} and samples from {sampled_by}"
            self.failed(engine, EngineUnavailable(problem))
            return
        engine.doubted = False
        if not engine.healthy or engine.weight_version != info.weight_version:
            log.info("engine serves", engine=engine.url, weight_version=info.weight_version)
        engine.healthy, engine.problem = True, ""
        engine.weight_version, engine.model_path = info.weight_version, info.model_path

    def sampled(self, engine: Engine, weight_version: str) -> None:
        """A reply's last token came from these weights. An engine that reports others has been published to since, or
        took an update half-way: it is asked at once, and doubted unless it says the same."""
        if weight_version != engine.weight_version and not engine.doubted:
            task = asyncio.create_task(self._recheck(engine, weight_version))
            self._rechecks.add(task)
            task.add_done_callback(self._rechecks.discard)

    async def _recheck(self, engine: Engine, weight_version: str) -> None:
        await self._probe(engine)
        if engine.healthy and engine.weight_version != weight_version:
            engine.doubted = True
            # Asks the weights themselves this time.
            await self._probe(engine)

    def failed(self, engine: Engine, error: AtollError) -> None:
        """Others are preferred until the engine answers a probe again."""
        if engine.healthy or engine.problem != error.message:
            log.warning("engine does not answer", engine=engine.url, problem=error.message)
        engine.healthy, engine.problem = False, error.message
