"""The rows of a batch, from the pieces of its stream."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from atoll.api.gateway.v1 import sample_service_pb2
from atoll.common.errors import AtollError, InternalError
from atoll.families.rows import VersionSpan
from atoll.families.samples import ReportedSample
from atoll.trainer.batch_reader import rows_of

from tests.fakes.samples import FakeSample, pieces_of

Piece = sample_service_pb2.ReadBatchResponse
BATCH = [
    FakeSample("a", score=0.25, group="q", weight_versions=("1:3", "1:4")),
    FakeSample("b", score=1.0, group="q", tokens=(1, 2, 3), prompt_length=1, temperature=0.7),
]


async def read(pieces: Sequence[Piece]) -> list[ReportedSample]:
    async def stream() -> AsyncIterator[Piece]:
        for piece in pieces:
            yield piece

    return [item async for item in rows_of(stream())]


async def test_rows_keep_their_order_tensors_spans_and_reports() -> None:
    first, second = await read(pieces_of("job", BATCH))
    assert [first.sample.sample_id, second.sample.sample_id] == ["a", "b"]
    np.testing.assert_array_equal(first.sample.tokens, np.asarray([5, 6, 7, 8], dtype=np.int32))
    np.testing.assert_array_equal(second.sample.loss_mask, np.asarray([1, 1], dtype=np.uint8))
    np.testing.assert_array_equal(second.sample.log_probs, np.asarray([-0.5, -0.5], dtype=np.float32))
    assert first.sample.versions == (VersionSpan(0, 1, "1:3"), VersionSpan(1, 2, "1:4"))
    assert (second.sample.prompt_length, second.sample.temperature) == (1, 0.7)
    assert (first.report.report_id, first.report.score, first.report.metadata) == ("report-a", 0.25, {"group": "q"})
    assert first.report.created_at.tzinfo is not None


async def test_a_row_of_many_chunks_is_joined() -> None:
    tokens = tuple(range(100_000))
    pieces = pieces_of("job", [FakeSample("long", score=1.0, group="q", tokens=tokens)])
    whole = b"".join(piece.chunk for piece in pieces)
    cut = [*pieces[:2], *(Piece(chunk=whole[at : at + 1000]) for at in range(0, len(whole), 1000))]
    (row,) = await read(cut)
    np.testing.assert_array_equal(row.sample.tokens, np.arange(100_000, dtype=np.int32))


@pytest.mark.parametrize(
    "order",
    [[1, 2], [0, 2], [0, 1, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4], []],
    ids=["no batch", "no row", "two headers", "a row short", "no bytes", "two batches", "bytes twice", "nothing"],
)
async def test_a_stream_that_breaks_its_announcements_is_refused(order: list[int]) -> None:
    pieces = pieces_of("job", BATCH)
    with pytest.raises(InternalError):
        await read([pieces[index] for index in order])


async def test_a_sample_without_a_report_or_a_tensor_is_refused_by_id() -> None:
    for clear in ("reports", "tensors"):
        pieces = pieces_of("job", BATCH[:1])
        pieces[1].row.ClearField(clear)
        with pytest.raises(AtollError, match="sample a"):
            await read(pieces if clear == "reports" else pieces[:2])
