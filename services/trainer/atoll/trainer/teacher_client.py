"""Asks the teacher service for a batch's scores: packed ids out, log-probs of the frozen model in."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import cast

import grpc
import numpy as np
import structlog
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.errors import InternalError, Unavailable
from atoll.common.tensors import TensorReader
from atoll.common.token_map import TokenMap
from atoll.families.driver import ScoreRequest, TeacherScorer, TeacherScores
from atoll.families.refusals import sample_refused
from atoll.families.rows import Float32, Int32
from atoll.trainer.calls import answer_of, failure_of
from atoll.trainer.phases import PhaseClock
from atoll.trainer.retries import Patience
from atoll.trainer.teacher_tokenizer import refuse_other_tokenizer

log = structlog.get_logger(__name__)

METRIC = "perf/distill_teacher_time"
"""Seconds that a job's scores took, with every pause in which the teacher was away."""


class TeacherClient:
    """Implements `atoll.families.driver.TeacherScorer` over one channel. Made in the loop, called from threads."""

    def __init__(self, channel: grpc.aio.Channel, patience: Patience) -> None:
        self._teacher = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._proven_digest: str | None = None

    async def prove_tokenizer(self, student: TokenMap) -> None:
        """Waits for the teacher, then for ever only takes scores of one whose tokenizer is the student's.

        Raises: BadConfiguration naming the first id, or the decoder, that is different.
        """
        await self._patience.ask("teacher's tokenizer", lambda: refuse_other_tokenizer(self._teacher, student))
        self._proven_digest = student.digest

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        """All scores, in the order of the requests; asks again for as long as the teacher is not there.

        After a break only what has no answer yet is sent again. Raises: InvalidInput naming the first sample that
        cannot be scored; nothing is scored in part.
        """
        answers: dict[str, TeacherScores] = {}
        asked = self._patience.ask("teacher's scores", lambda: self._ask_for_rest(requests, answers))
        asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return [answers[request.sample_id] for request in requests]

    async def _ask_for_rest(self, requests: Sequence[ScoreRequest], answers: dict[str, TeacherScores]) -> None:
        """Adds to the answers. Raises Unavailable while some are missing."""
        await self._refuse_other_teacher()
        rest = {request.sample_id: request for request in requests if request.sample_id not in answers}
        call = self._teacher.Score(_sent(list(rest.values())))
        try:
            async for name, scores in scores_of(call):
                if name not in rest:
                    raise InternalError(f"the teacher answered {name!r}, which was not asked for or has its answer")
                del rest[name]
                if isinstance(scores, Unavailable):
                    log.warning("not scored yet", sample=name, error=scores.message)
                else:
                    answers[name] = scores
        except grpc.RpcError as error:
            raise failure_of(error) from None
        finally:
            call.cancel()
        missing = len(requests) - len(answers)
        if missing:
            raise Unavailable(f"the teacher left {missing} of {len(requests)} sequences without a result")

    async def _refuse_other_teacher(self) -> None:
        """A teacher that was replaced by one of another tokenizer is waited out: the batch is not to blame."""
        if self._proven_digest is None:
            return
        told = await answer_of(self._teacher.GetTeacher(teacher_service_pb2.GetTeacherRequest()))
        if told.tokenizer_digest != self._proven_digest:
            raise Unavailable(
                f"the teacher is {told.model_path} now, whose tokenizer is not the student's: start the one it was, or "
                "the trainer again"
            )


class TimedTeacher:
    """A teacher whose time goes into a job's metrics."""

    def __init__(self, teacher: TeacherScorer, clock: PhaseClock) -> None:
        self._teacher = teacher
        self._clock = clock

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        with self._clock.metric(METRIC):
            return self._teacher.score(requests)


async def _sent(requests: Iterable[ScoreRequest]) -> AsyncIterator[teacher_service_pb2.ScoreRequest]:
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
) -> AsyncIterator[tuple[str, TeacherScores | Unavailable]]:
    """Joins the pieces of a Score stream into (sample id, scores), or what keeps the sample from having them yet.

    Raises: InvalidInput for a sequence that can never be scored, InternalError for a stream that breaks its own
    announcements.
    """
    sample_id, reader = "", TensorReader(())
    async for piece in pieces:
        if piece.WhichOneof("piece") == "header" and reader.complete:
            header = piece.header
            if header.HasField("error"):
                if not header.error.retryable:
                    # A family that asks several times for a sample adds to its id after a slash.
                    sample, _, part = header.id.partition("/")
                    what = f"its {part}" if part else "it"
                    message = f"the teacher cannot score {what}: {header.error.message}"
                    raise sample_refused(sample, message, field="tokens")
                message = f"sample {header.id}: the teacher cannot score it: {header.error.message}"
                yield header.id, Unavailable(message, reason=header.error.reason)
                continue
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
