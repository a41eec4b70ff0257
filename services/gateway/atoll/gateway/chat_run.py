"""One chat request being answered: its choices are sampled at once, and each is recorded as one sample."""

import asyncio
from collections.abc import AsyncIterator

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.engine_types import EngineUnavailable, FinishReason, GenerationChunk
from atoll.common.errors import Conflict
from atoll.gateway.chat_request import Chat
from atoll.gateway.completion import Completion
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.engine_run import Ask, EngineRun
from atoll.gateway.sample_writer import SampleWriter

log = structlog.get_logger(__name__)

ABORT_SECONDS = 5.0
"""How long an engine may take to stop and say which version sampled what; after that the partial sample is lost."""


class ChatRun:
    """Starts sampling when made. Iterate chunks(), record() what is finished, and close() in every case.

    abandon() instead, when the client went away.
    """

    def __init__(self, chat: Chat, pool: EnginePool, writer: SampleWriter, timeout_s: float) -> None:
        self.chat = chat
        self.completions = tuple(
            Completion(index, receipt, chat.params.stop) for index, receipt in enumerate(chat.receipts)
        )
        self._writer = writer
        self._arrived: asyncio.Queue[tuple[Completion, GenerationChunk] | Exception] = asyncio.Queue()
        self._recordings: dict[int, asyncio.Task[None]] = {}
        ask = Ask(
            prompt_ids=chat.prompt_ids,
            params=chat.params,
            vocabulary_size=chat.vocabulary_size,
            top_k=chat.top_k,
            head=chat.head,
            pinned=None if chat.pinned is None else chat.pinned.served,
            strangers=chat.strangers,
            streamed=chat.request.stream,
            deadline=asyncio.get_running_loop().time() + timeout_s,
        )
        self._runs = [EngineRun(pool, ask, completion.receipt) for completion in self.completions]
        self._sampling = [
            asyncio.create_task(self._sample(run, completion))
            for run, completion in zip(self._runs, self.completions, strict=True)
        ]

    async def chunks(self) -> AsyncIterator[tuple[Completion, GenerationChunk]]:
        """What the engines send, of all choices in the order of arrival, until every choice is finished.

        Raises EngineUnavailable, also when an engine cuts a reply; EngineRefused; EngineProtocolError;
        Conflict(VERSION_NOT_SERVED) when a publish overtook a request for one version.
        """
        unfinished = len(self.completions)
        while unfinished:
            item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item
            completion, chunk = item
            if chunk.finish is not None:
                unfinished -= 1
                await self._check_end(completion)
            yield completion, chunk

    async def record(self, *completions: Completion) -> None:
        """Returns when their samples are durable, in one group commit. Raises what SampleWriter.record raises."""
        for completion in completions:
            if completion.index not in self._recordings:
                chat = self.chat
                sample = completion.sample(
                    chat.scenario, chat.body, chat.messages, chat.prompt_ids, chat.params, chat.created_at
                )
                self._recordings[completion.index] = asyncio.create_task(self._writer.record(sample))
        # The client may leave in between, and abandon() then waits for the same recordings.
        await asyncio.gather(*(asyncio.shield(self._recordings[completion.index]) for completion in completions))

    async def abandon(self) -> None:
        """The client is gone: stops the engines and records what they had sampled as aborted samples."""
        stopping = (run.abort() for run, task in zip(self._runs, self._sampling, strict=True) if not task.done())
        await asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.wait(self._sampling, timeout=ABORT_SECONDS)
        await self.close()
        for completion in self.completions:
            if completion.finish is None or completion.token_count == 0:
                log.info("client left, nothing to record", receipt=completion.receipt)
                continue
            try:
                await self.record(completion)
            except Exception as error:
                log.error("client left, sample not recorded", receipt=completion.receipt, exc_info=error)
            else:
                log.info("client left, sample recorded", receipt=completion.receipt, tokens=completion.token_count)

    async def close(self) -> None:
        """Drops what is still being sampled."""
        for task in self._sampling:
            task.cancel()
        await asyncio.wait(self._sampling)

    async def _sample(self, run: EngineRun, completion: Completion) -> None:
        try:
            async for chunk in run.chunks():
                self._arrived.put_nowait((completion, completion.add(chunk)))
        except Exception as error:
            self._arrived.put_nowait(error)

    async def _check_end(self, completion: Completion) -> None:
        finish = completion.finish
        assert finish is not None
        if finish.reason is FinishReason.ABORT:
            raise EngineUnavailable(f"the engine cut the reply: {finish.detail or 'no reason given'}")
        pin = self.chat.pinned
        if pin is None:
            return
        versions = sorted({span.weight_version for span in finish.spans})
        overtaken = [version for version in versions if not await pin.allows(version)]
        if overtaken:
            raise Conflict(
                f"{', '.join(overtaken)} was published while {pin.weight_version} answered; nothing was recorded",
                reason=errors_pb2.REASON_VERSION_NOT_SERVED,
                field="model",
            )
