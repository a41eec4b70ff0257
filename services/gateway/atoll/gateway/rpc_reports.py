"""ReportService: feedback over gRPC."""

from atoll.api.gateway.v1 import report_service_pb2, report_service_pb2_grpc
from atoll.common.server import Context
from atoll.common.structs import object_of, value_of
from atoll.gateway.records import NewReport
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.rpc_messages import reason_of, report_message

SERVICE_NAME = "atoll.api.gateway.v1.ReportService"


class ReportServicer(report_service_pb2_grpc.ReportServiceServicer):
    """Translates at the edge; ReportIntake does the work."""

    def __init__(self, reports: ReportIntake) -> None:
        self._reports = reports

    async def CreateReport(
        self, request: report_service_pb2.CreateReportRequest, context: Context
    ) -> report_service_pb2.CreateReportResponse:
        answer = await self._reports.create(
            NewReport(
                scenario=request.scenario,
                receipts=tuple(request.receipts),
                score=request.score if request.HasField("score") else None,
                feedback=value_of(request.feedback, "feedback") if request.HasField("feedback") else None,
                metadata=object_of(request.metadata, "metadata"),
                request_id=request.request_id,
            )
        )
        settled = answer.settled
        return report_service_pb2.CreateReportResponse(
            report=report_message(answer.report),
            job_id=answer.job_id,
            settled_code=reason_of("" if settled is None else settled.code),
            settled_reason="" if settled is None else settled.reason,
        )
