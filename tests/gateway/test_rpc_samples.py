"""Samples and batches over gRPC: the bytes that were recorded, in chunks, with what describes them."""

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from atoll.api.gateway.v1 import sample_pb2, sample_service_pb2, sample_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.structs import object_of
from atoll.common.tensors import CHUNK_BYTES, TensorReader

from tests.gateway.store_world import SCENARIO, World, new_sample, open_world

pytestmark = pytest.mark.usefixtures("both_databases")


@asynccontextmanager
async def stub_of(world: World) -> AsyncIterator["sample_service_pb2_grpc.SampleServiceAsyncStub"]:
    async with open_channel(f"127.0.0.1:{world.gateway.server.port}") as channel:
        yield sample_service_pb2_grpc.SampleServiceStub(channel)


async def test_a_long_sample_with_candidates_arrives_in_chunks_as_it_was_sampled(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, stub_of(world) as stub:
        receipt = world.gateway.receipts.issue(SCENARIO)
        new = new_sample(receipt, prompt=1000, response=3000, top_k=128)
        await world.gateway.writer.record(new)
        call = stub.GetSample(sample_service_pb2.GetSampleRequest(scenario=SCENARIO, receipt=receipt))
        header, *chunks = [piece async for piece in call]
        assert len(chunks) == 3 and all(len(piece.chunk) <= CHUNK_BYTES for piece in chunks)
        reader = TensorReader(header.row.tensors)
        for piece in chunks:
            reader.add(piece.chunk)
        arrays = reader.arrays()
    assert list(arrays) == ["token_ids", "loss_mask", "log_probs", "top_k_ids", "top_k_log_probs"]
    assert new.top_k_ids is not None and new.top_k_log_probs is not None
    np.testing.assert_array_equal(arrays["token_ids"], np.concatenate([new.prompt_ids, new.response_ids]))
    np.testing.assert_array_equal(arrays["loss_mask"], new.loss_mask)
    np.testing.assert_array_equal(arrays["log_probs"], new.log_probs)
    np.testing.assert_array_equal(arrays["top_k_ids"], new.top_k_ids)
    np.testing.assert_array_equal(arrays["top_k_log_probs"], new.top_k_log_probs)
    sample = header.row.sample
    assert object_of(sample.request) == new.request and sample.text == "4" and sample.exact
    assert [(span.start, span.end, span.weight_version) for span in sample.spans] == [(0, 3000, "1:0")]
    assert sample.create_time.ToDatetime().timestamp() > 0 and not header.row.reports


async def test_a_batch_streams_its_rows_with_their_reports(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, stub_of(world) as stub:
        job_id, receipts = await world.batch("q7")
        pieces = [piece async for piece in stub.ReadBatch(sample_service_pb2.ReadBatchRequest(job_id=job_id))]
    kinds = [piece.WhichOneof("piece") for piece in pieces]
    assert kinds == ["batch", "row", "chunk", "row", "chunk"]
    assert (pieces[0].batch.job_id, pieces[0].batch.scenario, pieces[0].batch.row_count) == (job_id, SCENARIO, 2)
    rows = [piece.row for piece in pieces if piece.WhichOneof("piece") == "row"]
    assert [row.sample.receipt for row in rows] == receipts
    assert {row.sample.state for row in rows} == {sample_pb2.SAMPLE_STATE_RESERVED}
    for row in rows:
        (report,) = row.reports
        assert list(report.receipts) == [row.sample.receipt] and report.score == 1.0
        assert object_of(report.metadata) == {"group": "q7"} and not report.HasField("feedback")


async def test_samples_are_listed_without_tensors(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, stub_of(world) as stub:
        recorded = [(await world.record())[0] for _ in range(3)]
        request = sample_service_pb2.ListSamplesRequest(scenario=SCENARIO, page_size=2)
        page = await stub.ListSamples(request)
        request.page_token = page.next_page_token
        rest = await stub.ListSamples(request)
        assert [sample.receipt for sample in (*page.samples, *rest.samples)] == recorded[::-1]
        assert rest.next_page_token == ""
        reserved = sample_service_pb2.ListSamplesRequest(scenario=SCENARIO, state=sample_pb2.SAMPLE_STATE_RESERVED)
        assert not (await stub.ListSamples(reserved)).samples


async def test_refusals_carry_their_reason(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, stub_of(world) as stub:
        handed_out = world.gateway.receipts.issue(SCENARIO)

        async def code(call: AsyncIterable[object]) -> str:
            with pytest.raises(grpc.RpcError) as refusal:
                [piece async for piece in call]
            return from_rpc_error(refusal.value).code

        get, read = stub.GetSample, stub.ReadBatch
        asked = sample_service_pb2.GetSampleRequest
        assert await code(get(asked(scenario=SCENARIO, receipt=handed_out))) == "receipt_not_recorded"
        assert await code(get(asked(scenario=SCENARIO, receipt="0" * 32))) == "receipt_not_found"
        assert await code(get(asked(scenario="nowhere", receipt=handed_out))) == "scenario_not_found"
        assert await code(read(sample_service_pb2.ReadBatchRequest(job_id="job-0"))) == "job_not_found"
        with pytest.raises(grpc.RpcError) as refusal:
            await stub.ListSamples(sample_service_pb2.ListSamplesRequest(scenario=SCENARIO, state=99))  # type: ignore[arg-type]
        assert from_rpc_error(refusal.value).field == "state"
