"""`atoll score`: what the teacher thinks of one sequence of token ids."""

from collections.abc import Mapping, Sequence

import grpc
import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common import rpc_errors
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, InternalError, InvalidInput, Unavailable
from atoll.common.tensors import Array, TensorReader
from rich.table import Table

CALL_SECONDS = 60.0


def ids_of(text: str, flag: str) -> list[int]:
    """Example: "5, 6,7" is [5, 6, 7]. Raises InvalidInput naming the flag."""
    try:
        ids = [int(word) for word in text.split(",")]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0 or max(ids) >= 2**31:
        raise InvalidInput(f"{flag} is {text[:80]!r}, expected token ids with commas between, e.g. 5,6,7", field=flag)
    return ids


async def score(
    teacher: str, token: str | None, prompt: Sequence[int], response: Sequence[int], top_k: int
) -> Mapping[str, Array]:
    """log_probs [R] and, with top_k > 0, top_k_ids and top_k_log_probs [R, K] of a response after a prompt.

    teacher: host:port. Raises AtollError: the teacher's refusal, Unavailable.
    """
    sequence = teacher_service_pb2.ScoreRequest(
        id="cli",
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        response_ids=np.array(response, "<i4").tobytes(),
        top_k=top_k,
    )
    request = teacher_service_pb2.ScoreBatchRequest(sequences=[sequence])
    async with open_channel(teacher, token) as channel:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        reader = TensorReader(())
        try:
            async for piece in stub.ScoreBatch(request, timeout=CALL_SECONDS):
                if piece.HasField("header"):
                    _refuse_failed(piece.header)
                    reader = TensorReader(piece.header.tensors)
                else:
                    reader.add(piece.chunk)
        except grpc.RpcError as error:
            refusal = rpc_errors.from_rpc_error(error)
            if isinstance(refusal, Unavailable):
                raise Unavailable(f"the teacher does not answer at {teacher}: {refusal.message}") from None
            raise refusal from None
    arrays = reader.arrays()
    if "log_probs" not in arrays:
        raise InternalError(f"the teacher at {teacher} answered without log-probs")
    return arrays


def _refuse_failed(header: teacher_service_pb2.ScoreHeader) -> None:
    if header.HasField("error"):
        raise AtollError(f"the teacher did not score it: {header.error.message}", reason=header.error.reason)


def scores_as_json(response: Sequence[int], arrays: Mapping[str, Array]) -> list[dict[str, object]]:
    """One object a token. Example: [{"token": 7, "log_prob": -0.7, "top_k": [[9, -0.5], [7, -0.7]]}]"""
    tokens: list[dict[str, object]] = []
    for place, token in enumerate(response):
        entry: dict[str, object] = {"token": token, "log_prob": float(arrays["log_probs"][place])}
        if "top_k_ids" in arrays:
            ids, log_probs = arrays["top_k_ids"][place].tolist(), arrays["top_k_log_probs"][place].tolist()
            entry["top_k"] = [list(pair) for pair in zip(ids, log_probs, strict=True)]
        tokens.append(entry)
    return tokens


def scores_table(response: Sequence[int], arrays: Mapping[str, Array]) -> Table:
    """One row a token, with every candidate that was asked for."""
    table = Table(title=f"sum {float(arrays['log_probs'].sum()):.4f}", title_justify="left")
    with_candidates = "top_k_ids" in arrays
    for column in ("token", "log-prob", *(["likeliest"] if with_candidates else [])):
        table.add_column(column, justify="left" if column == "likeliest" else "right")
    for place, token in enumerate(response):
        cells = [str(token), f"{arrays['log_probs'][place]:.4f}"]
        if with_candidates:
            ids, log_probs = arrays["top_k_ids"][place], arrays["top_k_log_probs"][place]
            pairs = list(zip(ids.tolist(), log_probs.tolist(), strict=True))
            cells.append("  ".join(f"{each} {log_prob:.4f}" for each, log_prob in pairs))
        table.add_row(*cells)
    return table
