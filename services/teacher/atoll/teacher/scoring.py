"""Scores sequences as they arrive and hands out results as they are ready.

```
requests --read, while the call has tokens free--> check --> a task each: engine budget -> engine --> results
              ^------------------- tokens are free again when the result was taken -------------------'
```
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.engine_types import Ids, ScoreResult
from atoll.common.errors import AtollError, InvalidInput, Unavailable
from atoll.teacher.sequences import ScoringLimits, Sequence, read_sequence
from atoll.teacher.token_budget import TokenBudget


class ScoringEngine(Protocol):
    """What scoring needs of an engine; `atoll.common.engine_client.EngineClient` has it."""

    async def score(self, prompt_ids: Ids, response_ids: Ids, top_k: int = 0) -> ScoreResult: ...


@dataclass(frozen=True, eq=False)
class Scored:
    """The outcome of one sequence: a result, or the error that it alone has."""

    sequence_id: str
    result: ScoreResult | None
    error: AtollError | None

    @property
    def retryable(self) -> bool:
        return isinstance(self.error, Unavailable)


@dataclass
class ScoringCounts:
    """Since start."""

    sequences: int = 0
    response_tokens: int = 0


class Scorer:
    """Shared by all calls: they compete for the engine's tokens, first come first served."""

    def __init__(self, engine: ScoringEngine, limits: ScoringLimits, in_flight_tokens: int, call_tokens: int) -> None:
        self.limits = limits
        self.counts = ScoringCounts()
        self._engine = engine
        self._engine_budget = TokenBudget(in_flight_tokens)
        self._call_tokens = call_tokens

    async def score(self, requests: AsyncIterator[teacher_service_pb2.ScoreRequest]) -> AsyncGenerator[Scored, None]:
        """One outcome for every request, in the order they are ready. Closing the iterator stops what still runs."""
        call = _Call(self._call_tokens)
        reading = asyncio.create_task(self._read(requests, call))
        try:
            while (item := await call.results.get()) is not None:
                scored, tokens = item
                yield scored
                call.budget.give_back(tokens)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[teacher_service_pb2.ScoreRequest], call: "_Call") -> None:
        seen: set[str] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    try:
                        if request.id in seen:
                            raise InvalidInput(f"id {request.id!r} came before in this call", field="id")
                        sequence = read_sequence(request, self.limits)
                    except AtollError as error:
                        await call.budget.take(1)
                        call.results.put_nowait((Scored(request.id, None, error), 1))
                        continue
                    seen.add(request.id)
                    await call.budget.take(sequence.length)
                    tasks.create_task(self._score_one(sequence, call))
        finally:
            call.results.put_nowait(None)

    async def _score_one(self, sequence: Sequence, call: "_Call") -> None:
        await self._engine_budget.take(sequence.length)
        try:
            result = await self._engine.score(sequence.prompt_ids, sequence.response_ids, sequence.top_k)
            scored = Scored(sequence.sequence_id, result, None)
            self.counts.sequences += 1
            self.counts.response_tokens += len(sequence.response_ids)
        except AtollError as error:
            scored = Scored(sequence.sequence_id, None, error)
        finally:
            self._engine_budget.give_back(sequence.length)
        call.results.put_nowait((scored, sequence.length))


class _Call:
    """What one call has in flight. `results` is bounded by the budget; None ends it."""

    def __init__(self, tokens: int) -> None:
        self.budget = TokenBudget(tokens)
        self.results: asyncio.Queue[tuple[Scored, int] | None] = asyncio.Queue()
