"""Boots a teacher and runs it until SIGTERM: engines -> proofs -> gRPC.

```
settings -> a watch for each engine: (start) -> prove -> serve -> away -> prove ...
                                                          '-> pool -> scorer -> gRPC, health SERVING while one serves
```
"""

import asyncio
import gc
import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineProtocolError, EngineRefused, EngineUnavailable
from atoll.common.errors import BadConfiguration, InternalError
from atoll.common.server import GrpcServer, wait_for_stop_signal
from atoll.teacher.engine import Engine, EngineState
from atoll.teacher.engine_pool import EnginePool
from atoll.teacher.engine_watch import EngineWatch
from atoll.teacher.model_facts import ModelFacts, read_model_facts
from atoll.teacher.own_engine import COMMAND, engine_environment
from atoll.teacher.proof import Prover
from atoll.teacher.score_service import SERVICE_NAME, ScoreService
from atoll.teacher.scoring import Scorer
from atoll.teacher.sequences import ScoringLimits
from atoll.teacher.settings import TeacherSettings

log = structlog.get_logger(__name__)

ENGINE_RESERVE = 7
"""SGLang takes a prompt of at most its context length minus this (measured, 0.5.23)."""
POLL_SECONDS = 0.25
COLLECTED_AFTER = 100_000
"""New objects between two looks of the garbage collector."""


@dataclass(frozen=True)
class RunningTeacher:
    """What `boot` started."""

    server: GrpcServer
    pool: EnginePool
    watches: tuple[asyncio.Task[None], ...]
    """They end only by an error, and the process with them."""


async def main(settings: TeacherSettings) -> None:
    """Serves until a signal. Raises SystemExit(1), its reason logged, when its own engine was started too often."""
    try:
        await _serve(settings)
    except InternalError as error:
        log.error("gives up", reason=error.message)
        raise SystemExit(1) from error


async def _serve(settings: TeacherSettings) -> None:
    async with AsyncExitStack() as stack:
        teacher = await boot(settings, stack)
        spare_collector()
        stop = asyncio.create_task(wait_for_stop_signal())
        done, _ = await asyncio.wait({stop, *teacher.watches}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stop}:
            task.result()
        log.info("stopping")


def spare_collector() -> None:
    """Makes Python's garbage collector look rarely, and not at what is loaded already.

    An engine's answer with 128 likeliest tokens is tens of thousands of short-lived lists: reading it took 9.8 ms for
    144 tokens with the defaults, 3.7 ms so (measured).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 20, 20)


async def boot(settings: TeacherSettings, stack: AsyncExitStack, command: tuple[str, ...] = COMMAND) -> RunningTeacher:
    """Returns once sequences are scored; what was started stops with the stack.

    Raises BadConfiguration when an engine answers and is not of this model, and when none answers in time.
    """
    urls = settings.engines or (f"http://127.0.0.1:{settings.engine_port}",)
    facts = await _facts(settings, urls)
    prover = Prover(facts, settings.probe_tolerance)
    timeout_s = settings.engine_timeout_s
    clients = [
        await stack.enter_async_context(EngineClient(url, facts.vocabulary_size, idle_timeout_s=timeout_s))
        for url in urls
    ]
    engines = [Engine(url, client, settings.in_flight_tokens) for url, client in zip(urls, clients, strict=True)]
    pool = EnginePool(engines, settings.engine_wait_s)
    watches = [
        EngineWatch(engine, client, pool, prover, settings) for engine, client in zip(engines, clients, strict=True)
    ]
    if settings.engines:
        work = [watch.run() for watch in watches]
    else:
        work = [watches[0].run_own(engine_environment(settings, os.environ), command)]
    tasks = tuple(_background(each, stack) for each in work)
    await _until_proven(watches, pool, tasks, settings.start_timeout_s)

    server = GrpcServer(settings.host, settings.port, settings.token_text)
    scorer = Scorer(pool, await limits_of(facts, clients, settings), settings.call_bytes)
    service = ScoreService(scorer, facts, watches, settings.max_calls)
    teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(service, server.grpc)
    await server.start([SERVICE_NAME])
    stack.push_async_callback(server.stop)
    health: set[asyncio.Task[None]] = set()

    def tell_health(serving: bool) -> None:
        task = asyncio.create_task(server.set_serving(serving))
        health.add(task)
        task.add_done_callback(health.discard)

    pool.on_serving = tell_health
    tell_health(pool.serving)
    log.info("teacher ready", engines=urls, model_path=str(facts.directory), port=server.port)
    return RunningTeacher(server, pool, tasks)


async def limits_of(facts: ModelFacts, clients: list[EngineClient], settings: TeacherSettings) -> ScoringLimits:
    """What every engine can do faithfully with this model; one that is away now is taken for as able as the others."""
    longest = facts.max_positions
    for client in clients:
        try:
            longest = min(longest, await client.context_length() or longest)
        except EngineUnavailable:
            continue
    return ScoringLimits(
        vocabulary_size=facts.vocabulary_size,
        max_sequence_length=longest - ENGINE_RESERVE,
        max_top_k=min(settings.max_top_k, facts.vocabulary_size),
    )


async def _facts(settings: TeacherSettings, urls: tuple[str, ...]) -> ModelFacts:
    """Of the model directory, or of the one that the first engine to answer names."""
    if settings.model_path is not None:
        return read_model_facts(settings.model_path)
    async with AsyncExitStack() as stack:
        # No id is sent with these, so no vocabulary is needed yet.
        clients = [await stack.enter_async_context(EngineClient(url, vocab_size=1)) for url in urls]
        deadline = asyncio.get_running_loop().time() + settings.start_timeout_s
        while True:
            for client in clients:
                try:
                    return read_model_facts(Path((await client.model_info()).model_path))
                except EngineUnavailable as error:
                    problem = error.message
                except (EngineRefused, EngineProtocolError) as error:
                    raise BadConfiguration(f"{client.base_url} is no engine: {error.message}") from error
            if asyncio.get_running_loop().time() > deadline:
                raise BadConfiguration(f"no engine answered within {settings.start_timeout_s:g} s: {problem}")
            await asyncio.sleep(POLL_SECONDS)


async def _until_proven(
    watches: list[EngineWatch], pool: EnginePool, tasks: tuple[asyncio.Task[None], ...], timeout_s: float
) -> None:
    """Every engine was tried, one serves, and none is of another model."""
    proving = asyncio.create_task(_tried(watches, pool))
    done, _ = await asyncio.wait({proving, *tasks}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    if not done:
        proving.cancel()
        states = "; ".join(f"{each.url} is {each.state.value}: {each.detail}" for each in pool.engines)
        raise BadConfiguration(f"no engine was proven within {timeout_s:g} s: {states}")


async def _tried(watches: list[EngineWatch], pool: EnginePool) -> None:
    for watch in watches:
        await watch.tried.wait()
    while not pool.serving:
        _refuse_refused(pool)
        await asyncio.sleep(POLL_SECONDS)
    _refuse_refused(pool)


def _refuse_refused(pool: EnginePool) -> None:
    refused = [engine.detail for engine in pool.engines if engine.state is EngineState.REFUSED]
    if refused:
        raise BadConfiguration("; ".join(refused))


def _background(work: Coroutine[object, object, None], stack: AsyncExitStack) -> asyncio.Task[None]:
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    return task
