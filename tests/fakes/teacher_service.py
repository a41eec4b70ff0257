"""A teacher service behind real gRPC that scores by arithmetic and fails when a test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.tensors import Array, chunks_of, spec_of
from atoll.common.token_map import TokenMap
from atoll.teacher.score_service import compared

Context = grpc.aio.ServicerContext[Any, Any]
Response = teacher_service_pb2.ScoreResponse


def pieces_of(name: str, arrays: dict[str, Array]) -> list[Response]:
    header = teacher_service_pb2.ScoreHeader(id=name, tensors=[spec_of(key, each) for key, each in arrays.items()])
    return [Response(header=header), *(Response(chunk=chunk) for chunk in chunks_of(list(arrays.values())))]


def error_of(name: str, *, retryable: bool) -> Response:
    error = teacher_service_pb2.ScoreError(
        reason=errors_pb2.REASON_SEQUENCE_TOO_LONG, message="too long", retryable=retryable
    )
    return Response(header=teacher_service_pb2.ScoreHeader(id=name, error=error))


class EchoTeacher(teacher_service_pb2_grpc.TeacherServiceServicer):
    """Scores -0.1 times each response id, the last sequence first; `bad` names one that fails, `away` calls that do."""

    def __init__(self, tokens: TokenMap | None = None) -> None:
        self.bad = ""
        self.away = 0
        self.retryable = 0
        self.cut_after: list[int] = []
        """Calls to come break after so many results, one each; -1: in the middle of the first."""
        self.asked: list[list[str]] = []
        """Ids of every call."""
        self.gate = asyncio.Event()
        """Calls wait for it; open unless a test closes it."""
        self.gate.set()
        self.renames: dict[str, str] = {}
        """Answers under another id."""
        self.tokens = tokens or TokenMap({}, "null")

    async def Score(self, requests: Any, context: Context) -> AsyncIterator[Response]:
        received = [request async for request in requests]
        self.asked.append([request.id for request in received])
        await self.gate.wait()
        cut_after = self.cut_after.pop(0) if self.cut_after else len(received) + 1
        if self.away:
            self.away -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        for number, request in enumerate(reversed(received)):
            if number == cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
            if request.id == self.bad:
                self.bad, retry = ("", True) if self.retryable else (self.bad, False)
                yield error_of(request.id, retryable=retry)
                continue
            ids = np.frombuffer(request.response_ids, dtype="<i4")
            arrays: dict[str, Array] = {"log_probs": (-0.1 * ids).astype(np.float32)}
            if request.top_k:
                shape = (len(ids), request.top_k)
                arrays |= {"top_k_ids": np.zeros(shape, np.int32), "top_k_log_probs": np.zeros(shape, np.float32)}
            for piece in pieces_of(self.renames.get(request.id, request.id), arrays):
                yield piece
                if cut_after == -1:
                    await context.abort(grpc.StatusCode.CANCELLED, "stopping")

    async def ScoreBatch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async def sequences() -> AsyncIterator[Any]:
            for sequence in request.sequences:
                yield sequence

        async for piece in self.Score(sequences(), context):
            if piece.HasField("header"):
                yield teacher_service_pb2.ScoreBatchResponse(header=piece.header)
            else:
                yield teacher_service_pb2.ScoreBatchResponse(chunk=piece.chunk)

    async def GetTeacher(self, request: Any, context: Context) -> Any:
        return teacher_service_pb2.GetTeacherResponse(model_path="echo", tokenizer_digest=self.tokens.digest)

    async def CompareTokenizer(self, request: Any, context: Context) -> Any:
        return compared(request, self.tokens)
