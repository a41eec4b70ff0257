"""gRPC: JobRecordService."""

import asyncio

from atoll.api.registry.v1 import job_record_service_pb2 as pb
from atoll.api.registry.v1.job_record_service_pb2_grpc import JobRecordServiceServicer
from atoll.common.errors import InvalidInput
from atoll.common.pages import decode_number_token, encode_page_token, page_size
from atoll.common.server import Context
from atoll.registry.job_messages import body_of, progress_of, record_message
from atoll.registry.job_records import JobRecords
from atoll.registry.messages import fit_page


class JobRecordRpc(JobRecordServiceServicer):
    """Translates; `JobRecords` decides."""

    def __init__(self, records: JobRecords) -> None:
        self._records = records

    async def PutJobRecord(self, request: pb.PutJobRecordRequest, context: Context) -> pb.PutJobRecordResponse:
        if not request.HasField("record"):
            raise InvalidInput("record is unset, expected the record to write", field="record")
        wanted = request.record
        record = await asyncio.to_thread(
            self._records.put,
            wanted.scenario,
            wanted.job_id,
            body_of(wanted),
            progress_of(wanted),
            request.fencing_token,
        )
        return pb.PutJobRecordResponse(record=record_message(record))

    async def GetJobRecord(self, request: pb.GetJobRecordRequest, context: Context) -> pb.GetJobRecordResponse:
        record = await asyncio.to_thread(self._records.get, request.scenario, request.job_id)
        return pb.GetJobRecordResponse(record=record_message(record))

    async def ListJobRecords(self, request: pb.ListJobRecordsRequest, context: Context) -> pb.ListJobRecordsResponse:
        limit = page_size(request.page_size)
        after = decode_number_token(request.page_token)
        found = await asyncio.to_thread(
            self._records.list_page, request.scenario, open_only=request.open_only, limit=limit + 1, after=after
        )
        messages = fit_page(found[:limit], record_message)
        more = len(messages) < len(found)
        token = encode_page_token(str(messages[-1].order)) if more else ""
        return pb.ListJobRecordsResponse(records=messages, next_page_token=token)
