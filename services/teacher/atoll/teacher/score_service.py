"""The teacher's gRPC edge: requests in, headers and chunks out."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.errors import InvalidInput, Unavailable
from atoll.common.tensors import Array, chunks_of, spec_of
from atoll.common.token_map import BLOCK, TokenMap, first_different_block
from atoll.teacher.engine import Engine, EngineState
from atoll.teacher.engine_watch import EngineWatch
from atoll.teacher.model_facts import ModelFacts
from atoll.teacher.scoring import Scored, Scorer

SERVICE_NAME = teacher_service_pb2.DESCRIPTOR.services_by_name["TeacherService"].full_name
MAX_BATCH = 1_024
SHA256_BYTES = 32

Context = grpc.aio.ServicerContext[Any, Any]


_STATES = {
    EngineState.STARTING: teacher_service_pb2.ENGINE_STATE_STARTING,
    EngineState.SERVING: teacher_service_pb2.ENGINE_STATE_SERVING,
    EngineState.AWAY: teacher_service_pb2.ENGINE_STATE_AWAY,
    EngineState.REFUSED: teacher_service_pb2.ENGINE_STATE_REFUSED,
}


class ScoreService(teacher_service_pb2_grpc.TeacherServiceServicer):
    """Implements atoll.api.teacher.v1.TeacherService."""

    def __init__(self, scorer: Scorer, facts: ModelFacts, watches: Sequence[EngineWatch], max_calls: int) -> None:
        self._scorer = scorer
        self._facts = facts
        self._watches = watches
        self._calls = 0
        self._max_calls = max_calls

    async def Score(
        self, request_iterator: AsyncIterator[teacher_service_pb2.ScoreRequest], context: Context
    ) -> AsyncIterator[teacher_service_pb2.ScoreResponse]:
        with self._one_more_call():
            async with aclosing(self._scorer.score(request_iterator)) as outcomes:
                async for outcome in outcomes:
                    header, chunks = pieces_of(outcome)
                    yield teacher_service_pb2.ScoreResponse(header=header)
                    for chunk in chunks:
                        yield teacher_service_pb2.ScoreResponse(chunk=chunk)

    async def ScoreBatch(
        self, request: teacher_service_pb2.ScoreBatchRequest, context: Context
    ) -> AsyncIterator[teacher_service_pb2.ScoreBatchResponse]:
        check_batch(request)
        with self._one_more_call():
            async with aclosing(self._scorer.score(_each(request))) as outcomes:
                async for outcome in outcomes:
                    header, chunks = pieces_of(outcome)
                    yield teacher_service_pb2.ScoreBatchResponse(header=header)
                    for chunk in chunks:
                        yield teacher_service_pb2.ScoreBatchResponse(chunk=chunk)

    async def GetTeacher(
        self, request: teacher_service_pb2.GetTeacherRequest, context: Context
    ) -> teacher_service_pb2.GetTeacherResponse:
        if request.verify:
            await asyncio.gather(*(watch.prove() for watch in self._watches if watch.engine.serving))
        limits, measures = self._scorer.limits, self._scorer.measures
        answer = teacher_service_pb2.GetTeacherResponse(
            model_path=str(self._facts.directory),
            vocabulary_size=limits.vocabulary_size,
            tokenizer_digest=self._facts.tokens.digest,
            max_sequence_length=limits.max_sequence_length,
            max_top_k=limits.max_top_k,
            sequences_scored=measures.sequences,
            tokens_scored=measures.response_tokens,
            sequences_failed=measures.failures,
            tokens_per_second=measures.tokens_per_second,
            engines=[status_of(watch.engine) for watch in self._watches],
        )
        answer.mean_queue_time.FromNanoseconds(int(measures.mean_queue_seconds * 1e9))
        answer.mean_engine_time.FromNanoseconds(int(measures.mean_engine_seconds * 1e9))
        return answer

    async def CompareTokenizer(
        self, request: teacher_service_pb2.CompareTokenizerRequest, context: Context
    ) -> teacher_service_pb2.CompareTokenizerResponse:
        return compared(request, self._facts.tokens)

    @contextmanager
    def _one_more_call(self) -> Iterator[None]:
        if self._calls >= self._max_calls:
            raise Unavailable(f"{self._calls} calls are open, which is the limit; send again when one has ended")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


def status_of(engine: Engine) -> teacher_service_pb2.EngineStatus:
    """How an engine is, as GetTeacher tells it."""
    return teacher_service_pb2.EngineStatus(
        url=engine.url,
        state=_STATES[engine.state],
        detail=engine.detail,
        tokens_in_flight=engine.in_flight,
        sequences_scored=engine.sequences_scored,
        restarts=engine.restarts,
    )


def compared(
    request: teacher_service_pb2.CompareTokenizerRequest, tokens: TokenMap
) -> teacher_service_pb2.CompareTokenizerResponse:
    """Where the caller's tokenizer differs from the teacher's. Raises InvalidInput for digests that do not add up."""
    expected = SHA256_BYTES * -(-request.token_count // BLOCK)
    if request.token_count < 0 or len(request.block_digests) != expected:
        raise InvalidInput(
            f"block_digests has {len(request.block_digests)} bytes, expected {expected} for {request.token_count} ids",
            field="block_digests",
        )
    start = first_different_block(request.block_digests, tokens.block_digests)
    answer = teacher_service_pb2.CompareTokenizerResponse(
        same=start is None and request.decoder == tokens.decoder, token_count=tokens.count
    )
    if request.decoder != tokens.decoder:
        answer.decoder = tokens.decoder
    for token in tokens.block(start) if start is not None else ():
        answer.tokens.add(id=token.id, text=token.text or "", kind="" if token.kind is None else token.kind.value)
    return answer


def pieces_of(outcome: Scored) -> tuple[teacher_service_pb2.ScoreHeader, Iterator[bytes]]:
    """The header of an outcome and the bytes that follow it; none follow an error."""
    header = teacher_service_pb2.ScoreHeader(id=outcome.sequence_id)
    if outcome.result is None:
        assert outcome.error is not None
        header.error.reason = outcome.error.reason
        header.error.message = outcome.error.message
        header.error.retryable = outcome.retryable
        return header, iter(())
    arrays: dict[str, Array] = {"log_probs": _packed(outcome.result.log_probs, "<f4")}
    if outcome.result.top_k is not None:
        arrays["top_k_ids"] = _packed(outcome.result.top_k.ids, "<i4")
        arrays["top_k_log_probs"] = _packed(outcome.result.top_k.log_probs, "<f4")
    header.tensors.extend(spec_of(name, array) for name, array in arrays.items())
    return header, chunks_of(list(arrays.values()))


def check_batch(request: teacher_service_pb2.ScoreBatchRequest) -> None:
    """Raises InvalidInput for a batch that is empty, too large, or names an id twice."""
    count = len(request.sequences)
    if not 1 <= count <= MAX_BATCH:
        raise InvalidInput(f"sequences has {count} items, expected 1 to {MAX_BATCH}", field="sequences")
    seen: set[str] = set()
    for index, sequence in enumerate(request.sequences):
        if sequence.id in seen:
            raise InvalidInput(
                f"sequences[{index}].id is {sequence.id!r} a second time", field=f"sequences[{index}].id"
            )
        seen.add(sequence.id)


async def _each(request: teacher_service_pb2.ScoreBatchRequest) -> AsyncIterator[teacher_service_pb2.ScoreRequest]:
    for sequence in request.sequences:
        yield sequence


def _packed(array: Array, dtype: str) -> Array:
    packed: Array = np.ascontiguousarray(array, dtype=dtype)
    return packed
