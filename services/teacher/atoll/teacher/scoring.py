"""Scores sequences as they arrive and hands out results as they are ready.

```
requests --read, while the call has memory--> check --> a task each: lease of an engine --> score --> results
              ^-------------------- its memory is free again when the result was taken ----------------'
```
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import structlog
from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.engine_types import EngineRefused, EngineUnavailable, ScoreResult
from atoll.common.errors import AtollError, InternalError, InvalidInput, Unavailable
from atoll.common.names import new_id
from atoll.teacher.budget import Budget
from atoll.teacher.engine import Engine
from atoll.teacher.engine_pool import EnginePool
from atoll.teacher.measures import Measures
from atoll.teacher.sequences import ScoringLimits, Sequence, read_sequence
from google.protobuf.message import DecodeError

log = structlog.get_logger(__name__)

MAX_TRIES = 4
"""Of a sequence whose engine lives and does not answer it."""
MAX_DEATHS = 3
"""Of engines under one sequence: one among others, which proves nothing, and two alone."""
FIRST_PAUSE_S = 0.2
ERROR_BYTES = 4_096
"""What a sequence costs besides its tensors: its task, its request, its error."""


@dataclass(frozen=True, eq=False)
class Scored:
    """The outcome of one sequence: a result, or the error that it alone has."""

    sequence_id: str
    result: ScoreResult | None
    error: AtollError | None

    @property
    def retryable(self) -> bool:
        return isinstance(self.error, Unavailable)


class Scorer:
    """Shared by all calls: each gets an equal share of the engines."""

    def __init__(self, pool: EnginePool, limits: ScoringLimits, call_bytes: int) -> None:
        self.pool = pool
        self.limits = limits
        self.measures = Measures()
        self._call_bytes = call_bytes

    async def score(self, requests: AsyncIterator[teacher_service_pb2.ScoreRequest]) -> AsyncGenerator[Scored, None]:
        """One outcome for every request, in the order they are ready. Closing the iterator stops what still runs."""
        call = _Call(self._call_bytes)
        reading = asyncio.create_task(self._read(requests, call))
        try:
            while (item := await call.results.get()) is not None:
                scored, size = item
                yield scored
                call.memory.give_back(size)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[teacher_service_pb2.ScoreRequest], call: "_Call") -> None:
        seen: set[str] = set()
        unreadable: DecodeError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    async for request in requests:
                        await self._begin(request, seen, tasks, call)
                except DecodeError as error:
                    # Raised behind the group: what was read before it is answered.
                    unreadable = error
            if unreadable is not None:
                raise InvalidInput(
                    f"a request of the stream cannot be read: {unreadable}; is it made from the same .proto files?"
                )
        finally:
            call.results.put_nowait(None)

    async def _begin(
        self, request: teacher_service_pb2.ScoreRequest, seen: set[str], tasks: asyncio.TaskGroup, call: "_Call"
    ) -> None:
        """Answers a bad request, has a good one scored; returns when the call has memory for it."""
        try:
            if request.id in seen:
                raise InvalidInput(f"id {request.id!r} came before in this call", field="id")
            sequence = read_sequence(request, self.limits)
        except AtollError as error:
            size = ERROR_BYTES + len(request.id)
            await call.memory.take(size)
            self.measures.failed()
            call.results.put_nowait((Scored(request.id, None, error), size))
            return
        seen.add(request.id)
        await call.memory.take(ERROR_BYTES + sequence.bytes)
        tasks.create_task(self._answer(sequence, call))

    async def _answer(self, sequence: Sequence, call: "_Call") -> None:
        try:
            scored = Scored(sequence.sequence_id, await self._tried(sequence, call), None)
        except AtollError as error:
            scored = Scored(sequence.sequence_id, None, error)
        except Exception as defect:
            incident = new_id()
            log.error("defect", sequence=sequence.sequence_id, incident=incident, exc_info=defect)
            hidden = InternalError(f"a defect of Atoll; the log explains incident {incident}")
            scored = Scored(sequence.sequence_id, None, hidden)
        if scored.error is not None:
            self.measures.failed()
        call.results.put_nowait((scored, ERROR_BYTES + sequence.bytes))

    async def _tried(self, sequence: Sequence, call: "_Call") -> ScoreResult:
        """Scores again what an engine did not answer: scoring changes nothing, so repeating it is safe.

        A sequence whose engine died is scored alone from then on: the one that kills engines fails, its neighbours
        do not.
        """
        deaths: list[tuple[Engine, int]] = []
        refusals = 0
        while True:
            waiting_since = time.monotonic()
            async with self.pool.lease(sequence.length, call.flow, alone=bool(deaths)) as engine:
                leased_at, life = time.monotonic(), engine.restarts
                try:
                    result = await _score_frozen(engine, sequence)
                except EngineUnavailable as failure:
                    error = failure
                    # Asked before the lease ends: the next sequence must not be given to an engine that is dead.
                    lives = await engine.lives()
                else:
                    now = time.monotonic()
                    engine.answered()
                    self.measures.scored(sequence, queued_s=leased_at - waiting_since, engine_s=now - leased_at)
                    return result
            if lives:
                refusals += 1
                if refusals == MAX_TRIES:
                    raise error
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (refusals - 1) * random.uniform(0.5, 1.5))
                continue
            deaths.append((engine, life))
            if len(deaths) == MAX_DEATHS:
                for victim in {each for each, _ in deaths}:
                    victim.blame({ended for each, ended in deaths if each is victim})
                raise EngineRefused(
                    f"the engine died {MAX_DEATHS} times while it scored this sequence, the last {MAX_DEATHS - 1} "
                    f"times with no other: {error.message}"
                ) from error


async def _score_frozen(engine: Engine, sequence: Sequence) -> ScoreResult:
    result = await engine.client.score(sequence.prompt_ids, sequence.response_ids, sequence.top_k)
    if result.weight_version != engine.weight_version:
        raise EngineUnavailable(
            f"the engine answered with weights {result.weight_version!r}, its proven ones are "
            f"{engine.weight_version!r}: it must be frozen"
        )
    return result


class _Call:
    """What one call has in flight. `results` is bounded by the memory; None ends it."""

    def __init__(self, size: int) -> None:
        self.flow = object()
        """Names it in the line for engines, which may remember the name longer than the call's results may live."""
        self.memory = Budget(size)
        self.results: asyncio.Queue[tuple[Scored, int] | None] = asyncio.Queue()
