"""Pulls the rows of a batch from the gateway: packed bytes in, NumPy views out."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import cast

import grpc
import numpy as np
from atoll.api.gateway.v1 import report_pb2, sample_service_pb2, sample_service_pb2_grpc
from atoll.common import structs
from atoll.common.errors import InternalError
from atoll.common.tensors import Array, TensorReader
from atoll.families.batching import ReportView
from atoll.families.refusals import batch_refused, sample_refused
from atoll.families.rows import Float32, Int32, UInt8, VersionSpan
from atoll.families.samples import ReportedSample, SampleView
from atoll.trainer.calls import failure_of

PULL_SECONDS = 600.0
"""Deadline of a whole pull."""


class BatchReader:
    """Reads batches over one channel to the gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._samples = sample_service_pb2_grpc.SampleServiceStub(channel)

    async def read(self, job_id: str, sample_ids: Sequence[str]) -> tuple[ReportedSample, ...]:
        """The reported samples of a job's batch, in its order.

        Raises: what the gateway answers (JOB_NOT_FOUND, SAMPLE_CORRUPT, ...), Unavailable when the stream breaks,
        InvalidInput (BATCH_REFUSED) when the batch is not the one that was submitted.
        """
        call = self._samples.ReadBatch(
            sample_service_pb2.ReadBatchRequest(job_id=job_id), timeout=PULL_SECONDS, wait_for_ready=False
        )
        try:
            items = [item async for item in rows_of(call)]
        except grpc.RpcError as error:
            raise failure_of(error) from None
        got = [sample_id for item in items for sample_id in item.sample.turns or (item.sample.sample_id,)]
        if got != list(sample_ids):
            raise batch_refused(
                f"the gateway's batch of job {job_id} holds {len(got)} samples that are not, in this order, the "
                f"{len(sample_ids)} submitted ones; submit the job with the samples of its batch",
                field="sample_ids",
            )
        return tuple(items)


async def rows_of(pieces: AsyncIterable[sample_service_pb2.ReadBatchResponse]) -> AsyncIterator[ReportedSample]:
    """Joins the pieces of a ReadBatch stream. Raises InternalError for a stream that breaks its own announcements."""
    header: sample_service_pb2.RowHeader | None = None
    reader = TensorReader(())
    announced, seen = -1, 0
    async for piece in pieces:
        kind = piece.WhichOneof("piece")
        if kind == "batch" and announced < 0:
            announced = piece.batch.row_count
        elif kind == "row" and announced >= 0 and header is None:
            header, reader = piece.row, TensorReader(piece.row.tensors)
        elif kind == "chunk" and header is not None:
            reader.add(piece.chunk)
        else:
            raise InternalError(f"ReadBatch sent a piece {kind!r} out of order after {seen} rows")
        if header is not None and reader.complete:
            yield _reported_sample(header, reader)
            header, seen = None, seen + 1
    if header is not None or seen != announced:
        raise InternalError(f"ReadBatch ended after {seen} whole rows, it announced {max(announced, 0)}")


def _reported_sample(header: sample_service_pb2.RowHeader, reader: TensorReader) -> ReportedSample:
    sample, arrays = header.sample, reader.arrays()
    missing = {"token_ids", "loss_mask", "log_probs"} - set(arrays)
    if missing:
        raise sample_refused(sample.receipt, f"it came without {', '.join(sorted(missing))}", field="tensors")
    if not header.reports:
        raise sample_refused(sample.receipt, "it is in the batch without a report", field="reports")
    spans = tuple(VersionSpan(span.start, span.end, span.weight_version) for span in sample.spans)
    view = SampleView(
        sample_id=sample.receipt,
        tokens=cast(Int32, _flat(arrays["token_ids"], np.int32, sample.receipt, "token_ids")),
        prompt_length=sample.prompt_length,
        loss_mask=cast(UInt8, _flat(arrays["loss_mask"], np.uint8, sample.receipt, "loss_mask")),
        log_probs=cast(Float32, _flat(arrays["log_probs"], np.float32, sample.receipt, "log_probs")),
        temperature=sample.temperature,
        exact=sample.exact,
        versions=spans,
        created_at=sample.create_time.ToDatetime(tzinfo=UTC),
        request=structs.object_of(sample.request, "request"),
        text=sample.text,
        top_k_ids=cast(Int32 | None, arrays.get("top_k_ids")),
        top_k_log_probs=cast(Float32 | None, arrays.get("top_k_log_probs")),
        turns=tuple(header.receipts) if len(header.receipts) > 1 else (),
    )
    # The newest report stands; a sample in a batch takes no other.
    return ReportedSample(view, report_view(header.reports[-1]))


def _flat(array: Array, dtype: type[np.generic], sample_id: str, name: str) -> Array:
    if array.dtype != dtype or array.ndim != 1:
        raise sample_refused(
            sample_id,
            f"{name} must be one-dimensional {np.dtype(dtype)}, got {array.dtype} {array.shape}",
            field=name,
        )
    return array


def report_view(report: report_pb2.Report) -> ReportView:
    """A report as families see it."""
    created_at: datetime = report.create_time.ToDatetime(tzinfo=UTC)
    return ReportView(
        report_id=report.report_id,
        receipts=tuple(report.receipts),
        score=report.score if report.HasField("score") else None,
        created_at=created_at,
        feedback=structs.value_of(report.feedback, "feedback") if report.HasField("feedback") else None,
        metadata=structs.object_of(report.metadata, "metadata"),
    )
