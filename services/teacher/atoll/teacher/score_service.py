"""The teacher's gRPC edge: requests in, headers and chunks out."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.errors import InvalidInput
from atoll.common.tensors import Array, chunks_of, spec_of
from atoll.teacher.scoring import Scored, Scorer

SERVICE_NAME = teacher_service_pb2.DESCRIPTOR.services_by_name["TeacherService"].full_name
MAX_BATCH = 1_024

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class TeacherFacts:
    """What GetTeacher tells besides limits and counts."""

    model_path: str
    tokenizer_digest: str


class ScoreService(teacher_service_pb2_grpc.TeacherServiceServicer):
    """Implements atoll.api.teacher.v1.TeacherService."""

    def __init__(self, scorer: Scorer, facts: TeacherFacts) -> None:
        self._scorer = scorer
        self._facts = facts

    async def Score(
        self, request_iterator: AsyncIterator[teacher_service_pb2.ScoreRequest], context: Context
    ) -> AsyncIterator[teacher_service_pb2.ScoreResponse]:
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
        async with aclosing(self._scorer.score(_each(request))) as outcomes:
            async for outcome in outcomes:
                header, chunks = pieces_of(outcome)
                yield teacher_service_pb2.ScoreBatchResponse(header=header)
                for chunk in chunks:
                    yield teacher_service_pb2.ScoreBatchResponse(chunk=chunk)

    async def GetTeacher(
        self, request: teacher_service_pb2.GetTeacherRequest, context: Context
    ) -> teacher_service_pb2.GetTeacherResponse:
        limits, counts = self._scorer.limits, self._scorer.counts
        return teacher_service_pb2.GetTeacherResponse(
            model_path=self._facts.model_path,
            vocabulary_size=limits.vocabulary_size,
            tokenizer_digest=self._facts.tokenizer_digest,
            max_sequence_length=limits.max_sequence_length,
            max_top_k=limits.max_top_k,
            sequences_scored=counts.sequences,
            tokens_scored=counts.response_tokens,
        )


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
