"""The gateway's SampleService.ReadBatch from memory, behind real gRPC."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.api.gateway.v1 import report_pb2, sample_pb2, sample_service_pb2, sample_service_pb2_grpc
from atoll.common import structs
from atoll.common.errors import AtollError, NotFound
from atoll.common.tensors import Array, chunks_of, spec_of
from google.protobuf import timestamp_pb2

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class FakeSample:
    """A reported sample. Example: FakeSample("4f0c", score=0.5, group="a")."""

    sample_id: str
    score: float
    group: str
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    prompt_length: int = 2
    weight_versions: tuple[str, ...] = ("1:0",)
    """One span for each, over equal shares of the response."""
    temperature: float = 1.0
    log_prob: float = -0.5


class FakeSamples(sample_service_pb2_grpc.SampleServiceServicer):
    """`batches` by job id; `refusals` are raised by the calls to come, one each, after the first row.

    `cuts`: so many calls to come end after the first row as those of a gateway that is stopping.
    """

    def __init__(self) -> None:
        self.batches: dict[str, Sequence[FakeSample]] = {}
        self.refusals: list[AtollError] = []
        self.cuts = 0

    async def ReadBatch(
        self, request: sample_service_pb2.ReadBatchRequest, context: Context
    ) -> AsyncIterator[sample_service_pb2.ReadBatchResponse]:
        if request.job_id not in self.batches:
            raise NotFound(f"no batch of job {request.job_id}", reason=errors_pb2.REASON_JOB_NOT_FOUND)
        batch = self.batches[request.job_id]
        for piece in pieces_of(request.job_id, batch):
            yield piece
            if piece.HasField("chunk") and self.refusals:
                raise self.refusals.pop(0)
            if piece.HasField("chunk") and self.cuts:
                self.cuts -= 1
                await context.abort(grpc.StatusCode.CANCELLED, "stopping")


def pieces_of(job_id: str, batch: Sequence[FakeSample]) -> list[sample_service_pb2.ReadBatchResponse]:
    """The stream of a batch."""
    header = sample_service_pb2.BatchHeader(job_id=job_id, scenario="chat", row_count=len(batch))
    pieces = [sample_service_pb2.ReadBatchResponse(batch=header)]
    for item in batch:
        length = len(item.tokens) - item.prompt_length
        arrays: dict[str, Array] = {
            "token_ids": np.asarray(item.tokens, dtype=np.int32),
            "loss_mask": np.ones(length, dtype=np.uint8),
            "log_probs": np.full(length, item.log_prob, dtype=np.float32),
        }
        row = sample_service_pb2.RowHeader(
            sample=_sample(item, length),
            reports=[_report(item)],
            tensors=[spec_of(name, array) for name, array in arrays.items()],
        )
        pieces.append(sample_service_pb2.ReadBatchResponse(row=row))
        pieces += [sample_service_pb2.ReadBatchResponse(chunk=chunk) for chunk in chunks_of(list(arrays.values()))]
    return pieces


def _sample(item: FakeSample, length: int) -> sample_pb2.Sample:
    edges = np.linspace(0, length, len(item.weight_versions) + 1).astype(int).tolist()
    return sample_pb2.Sample(
        receipt=item.sample_id,
        prompt_length=item.prompt_length,
        response_length=length,
        temperature=item.temperature,
        exact=True,
        spans=[
            sample_pb2.WeightVersionSpan(weight_version=version, start=start, end=end)
            for version, start, end in zip(item.weight_versions, edges, edges[1:], strict=False)
        ],
        create_time=_now(),
    )


def _report(item: FakeSample) -> report_pb2.Report:
    return report_pb2.Report(
        report_id=f"report-{item.sample_id}",
        receipts=[item.sample_id],
        score=item.score,
        metadata=structs.struct_from({"group": item.group}),
        create_time=_now(),
    )


def _now() -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(datetime.now(UTC))
    return stamp
