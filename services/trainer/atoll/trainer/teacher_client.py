"""Asks the teacher service for a batch's scores: packed ids out, log-probs of the frozen model in."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import cast

import grpc
import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.errors import InternalError, Unavailable
from atoll.common.tensors import TensorReader
from atoll.families.driver import ScoreRequest, TeacherScores
from atoll.families.refusals import batch_refused
from atoll.families.rows import Float32, Int32
from atoll.trainer.calls import failure_of
from atoll.trainer.retries import Patience


class TeacherClient:
    """Implements `atoll.families.driver.TeacherScorer` over one channel. Made in the loop, called from threads."""

    def __init__(self, channel: grpc.aio.Channel, patience: Patience) -> None:
        self._teacher = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        self._patience = patience
        self._loop = asyncio.get_running_loop()

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        """All scores, in the order of the requests; asks again for as long as the teacher is not there.

        Raises: InvalidInput naming the first sample that cannot be scored; nothing is scored in part.
        """
        asked = self._patience.ask("teacher's scores", lambda: self._scores(requests))
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _scores(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        try:
            answers = {name: scores async for name, scores in scores_of(self._teacher.Score(_sent(requests)))}
        except grpc.RpcError as error:
            raise failure_of(error) from None
        unanswered = [request.sample_id for request in requests if request.sample_id not in answers]
        if unanswered:
            raise Unavailable(f"the teacher left {len(unanswered)} of {len(requests)} sequences without an answer")
        return [answers[request.sample_id] for request in requests]


async def _sent(requests: Sequence[ScoreRequest]) -> AsyncIterator[teacher_service_pb2.ScoreRequest]:
    for request in requests:
        tokens = np.ascontiguousarray(request.tokens, dtype="<i4")
        yield teacher_service_pb2.ScoreRequest(
            id=request.sample_id,
            prompt_ids=tokens[: request.start].tobytes(),
            response_ids=tokens[request.start :].tobytes(),
            top_k=request.top_k,
        )


async def scores_of(
    pieces: AsyncIterable[teacher_service_pb2.ScoreResponse],
) -> AsyncIterator[tuple[str, TeacherScores]]:
    """Joins the pieces of a Score stream into (sample id, scores).

    Raises: InvalidInput for a sequence that cannot be scored, Unavailable for one that may be later, InternalError
    for a stream that breaks its own announcements.
    """
    sample_id, reader = "", TensorReader(())
    async for piece in pieces:
        if piece.WhichOneof("piece") == "header" and reader.complete:
            header = piece.header
            if header.HasField("error"):
                message = f"sample {header.id}: the teacher cannot score it: {header.error.message}"
                raise Unavailable(message) if header.error.retryable else batch_refused(message, field="tokens")
            sample_id, reader = header.id, TensorReader(header.tensors)
        elif piece.WhichOneof("piece") == "chunk" and not reader.complete:
            reader.add(piece.chunk)
            if reader.complete:
                yield sample_id, _scores(reader)
        else:
            raise InternalError(f"the teacher sent a piece {piece.WhichOneof('piece')!r} out of order")
    if not reader.complete:
        raise InternalError(f"the teacher's stream ended inside the scores of {sample_id}")


def _scores(reader: TensorReader) -> TeacherScores:
    arrays = reader.arrays()
    if "log_probs" not in arrays:
        raise InternalError(f"the teacher answered {sorted(arrays)} without log_probs")
    return TeacherScores(
        cast(Float32, arrays["log_probs"]),
        cast(Int32 | None, arrays.get("top_k_ids")),
        cast(Float32 | None, arrays.get("top_k_log_probs")),
    )
