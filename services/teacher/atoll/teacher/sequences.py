"""One sequence to score: read from the wire and checked, so that a bad one fails alone and never reaches the engine."""

from dataclasses import dataclass

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2
from atoll.common.engine_types import Ids
from atoll.common.errors import InvalidInput

MAX_ID_LENGTH = 64


@dataclass(frozen=True)
class ScoringLimits:
    """What GetTeacher tells. Example: ScoringLimits(vocabulary_size=49152, max_sequence_length=8186, max_top_k=256)."""

    vocabulary_size: int
    max_sequence_length: int
    """Longest P + R."""
    max_top_k: int


@dataclass(frozen=True, eq=False)
class Sequence:
    """Example: Sequence("s-1", prompt_ids [P], response_ids [R], top_k=0)."""

    sequence_id: str
    prompt_ids: Ids
    response_ids: Ids
    top_k: int

    @property
    def length(self) -> int:
        """P + R."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def bytes(self) -> int:
        """Of its ids and of its result."""
        return 4 * self.length + len(self.response_ids) * (4 + 8 * self.top_k)


def read_sequence(request: teacher_service_pb2.ScoreRequest, limits: ScoringLimits) -> Sequence:
    """The sequence of a request. Raises InvalidInput (INVALID_FIELD, SEQUENCE_TOO_LONG) naming the field."""
    if not 1 <= len(request.id) <= MAX_ID_LENGTH:
        raise InvalidInput(f"id has {len(request.id)} characters, expected 1 to {MAX_ID_LENGTH}", field="id")
    prompt = _read_ids(request.prompt_ids, "prompt_ids", limits.vocabulary_size)
    response = _read_ids(request.response_ids, "response_ids", limits.vocabulary_size)
    length = len(prompt) + len(response)
    if length > limits.max_sequence_length:
        raise InvalidInput(
            f"prompt and response have {length} tokens, the teacher takes at most {limits.max_sequence_length}",
            field="response_ids",
            reason=errors_pb2.REASON_SEQUENCE_TOO_LONG,
        )
    if not 0 <= request.top_k <= limits.max_top_k:
        raise InvalidInput(f"top_k is {request.top_k}, expected 0 to {limits.max_top_k}", field="top_k")
    return Sequence(request.id, prompt, response, request.top_k)


def _read_ids(data: bytes, field: str, vocabulary_size: int) -> Ids:
    if not data or len(data) % 4:
        raise InvalidInput(f"{field} has {len(data)} bytes, expected 4 for each of at least one id", field=field)
    ids = np.frombuffer(data, dtype="<i4")
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary_size))
    if len(outside):
        at = int(outside[0])
        raise InvalidInput(
            f"{field}[{at}] is {ids[at]}, the teacher's vocabulary is 0..{vocabulary_size - 1}", field=f"{field}[{at}]"
        )
    return ids
