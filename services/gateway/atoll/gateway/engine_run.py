"""One choice being sampled: tries engines until one gives the first token, then stays with it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineUnavailable, GenerationChunk, SamplingParams
from atoll.gateway.engine_pool import Engine, EnginePool
from atoll.gateway.head import Head
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

RETRY_SECONDS = 8.0
"""Longer than a publish keeps an engine silent, shorter than a person waits for a refusal."""


@dataclass(frozen=True)
class Ask:
    """What one choice asks of an engine.

    Example: Ask(prompt_ids=[5, 6], params=SamplingParams(64), vocabulary_size=1024, top_k=0, head=None,
    pinned=None, strangers=frozenset(), streamed=True, deadline=loop.time() + 600)
    """

    prompt_ids: list[int]
    params: SamplingParams
    vocabulary_size: int
    top_k: int
    """Most likely ids to tell with every token."""
    head: Head | None
    """The newest version, None when it is not known."""
    pinned: frozenset[str] | None
    """The only weight versions allowed."""
    strangers: frozenset[str]
    """URLs of engines that serve another scenario."""
    streamed: bool
    """Chunks as they are sampled, or one for the whole reply, which costs engine and gateway less."""
    deadline: float
    """In the event loop's time."""


class EngineRun:
    """Iterate chunks() to its end; abort() from another task ends it early with what there is."""

    def __init__(self, pool: EnginePool, ask: Ask, run_id: str) -> None:
        """run_id: unique; the engine's name for the request starts with it."""
        self._pool = pool
        self._ask = ask
        self._run_id = run_id
        self._running: tuple[EngineClient, str] | None = None
        self._aborted = False

    async def chunks(self) -> AsyncIterator[GenerationChunk]:
        """The reply's chunks; the last one has `finish`. None at all when aborted before the first.

        Raises EngineUnavailable when no engine gave a first chunk within RETRY_SECONDS or the deadline, or when the
        engine was lost later; what EngineClient raises otherwise.
        """
        started = await self._started()
        if started is None:
            return
        first, rest = started
        async with aclosing(rest):
            yield first
            async for chunk in rest:
                yield chunk

    async def abort(self) -> None:
        """Tells the engine to stop. The iterator then ends with a chunk whose reason is ABORT."""
        self._aborted = True
        if self._running is not None:
            client, rid = self._running
            await client.abort(rid)

    async def _started(self) -> tuple[GenerationChunk, AsyncGenerator[GenerationChunk, None]] | None:
        """Only here is anything repeated: the client has seen nothing yet."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(EngineUnavailable),
            stop=stop_after_delay(min(RETRY_SECONDS, self._seconds_left())),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        ):
            with attempt:
                if self._aborted:
                    return None
                engine = self._pool.choose(self._ask.head, self._ask.pinned, self._ask.strangers)
                source = self._sampled_by(engine, f"{self._run_id}-{attempt.retry_state.attempt_number}")
                try:
                    return await anext(source), source
                except EngineUnavailable as error:
                    self._pool.failed(engine, error)
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _sampled_by(self, engine: Engine, rid: str) -> AsyncGenerator[GenerationChunk, None]:
        ask = self._ask
        client = self._pool.client(engine, ask.vocabulary_size)
        self._running = client, rid
        engine.in_flight += 1
        try:
            if ask.streamed:
                stream = client.generate(
                    ask.prompt_ids,
                    ask.params,
                    top_k_log_probs=ask.top_k,
                    rid=rid,
                    timeout_s=self._seconds_left(),
                )
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        self._note(engine, chunk)
                        yield chunk
            else:
                whole = await client.generate_once(
                    ask.prompt_ids,
                    ask.params,
                    top_k_log_probs=ask.top_k,
                    rid=rid,
                    timeout_s=self._seconds_left(),
                )
                chunk = GenerationChunk(
                    whole.index, whole.token_ids, whole.log_probs, whole.text, whole.top_k, whole.finish
                )
                self._note(engine, chunk)
                yield chunk
        finally:
            engine.in_flight -= 1

    def _note(self, engine: Engine, chunk: GenerationChunk) -> None:
        if chunk.finish is not None and chunk.finish.spans:
            self._pool.sampled(engine, chunk.finish.spans[-1].weight_version)

    def _seconds_left(self) -> float:
        return max(0.01, self._ask.deadline - asyncio.get_running_loop().time())
