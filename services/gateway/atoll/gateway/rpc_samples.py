"""SampleService: reads of recorded samples over gRPC."""

from collections.abc import AsyncIterator, Iterator

from atoll.api.gateway.v1 import sample_service_pb2, sample_service_pb2_grpc
from atoll.common.errors import InvalidInput
from atoll.common.server import Context
from atoll.common.tensors import CHUNK_BYTES
from atoll.gateway.rpc_messages import row_header, sample_message, state_of
from atoll.gateway.sample_store import SampleStore
from atoll.gateway.scenarios import ScenarioDirectory

SERVICE_NAME = "atoll.api.gateway.v1.SampleService"


class SampleServicer(sample_service_pb2_grpc.SampleServiceServicer):
    """Translates at the edge; SampleStore does the work."""

    def __init__(self, samples: SampleStore, scenarios: ScenarioDirectory) -> None:
        self._samples = samples
        self._scenarios = scenarios

    async def GetSample(
        self, request: sample_service_pb2.GetSampleRequest, context: Context
    ) -> AsyncIterator[sample_service_pb2.GetSampleResponse]:
        await self._scenarios.get(request.scenario)
        row = await self._samples.get_with_reports(request.scenario, request.receipt)
        yield sample_service_pb2.GetSampleResponse(row=row_header(row))
        for chunk in _chunks(row.packed.tensors):
            yield sample_service_pb2.GetSampleResponse(chunk=chunk)

    async def ListSamples(
        self, request: sample_service_pb2.ListSamplesRequest, context: Context
    ) -> sample_service_pb2.ListSamplesResponse:
        state = state_of(request.state)
        if state is None and request.state:
            raise InvalidInput(f"state is {request.state}, expected one of SampleState", field="state")
        await self._scenarios.get(request.scenario)
        samples, token = await self._samples.page(request.scenario, state, request.page_size, request.page_token)
        return sample_service_pb2.ListSamplesResponse(
            samples=[sample_message(sample) for sample in samples], next_page_token=token
        )

    async def ReadBatch(
        self, request: sample_service_pb2.ReadBatchRequest, context: Context
    ) -> AsyncIterator[sample_service_pb2.ReadBatchResponse]:
        batch = await self._samples.open_batch(request.job_id)
        yield sample_service_pb2.ReadBatchResponse(
            batch=sample_service_pb2.BatchHeader(
                job_id=batch.job_id, scenario=batch.scenario, row_count=batch.row_count
            )
        )
        async for row in batch.rows:
            yield sample_service_pb2.ReadBatchResponse(row=row_header(row))
            for chunk in _chunks(row.packed.tensors):
                yield sample_service_pb2.ReadBatchResponse(chunk=chunk)


def _chunks(data: bytes) -> Iterator[bytes]:
    """The stored bytes as they are, in pieces that fit a message."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
