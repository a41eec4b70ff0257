"""Feedback over gRPC is the feedback of HTTP: the same intake, the same answers."""

from pathlib import Path

import grpc
import pytest
from atoll.api.gateway.v1 import report_service_pb2, report_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.structs import object_of, struct_from, value_from, value_of
from atoll.gateway.records import JsonObject, NewReport

from tests.gateway.store_world import SCENARIO, open_world

pytestmark = pytest.mark.usefixtures("both_databases")


async def test_a_report_over_grpc_and_its_replay_have_one_answer(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, open_channel(f"127.0.0.1:{world.gateway.server.port}") as channel:
        stub = report_service_pb2_grpc.ReportServiceStub(channel)
        receipts = await world.record(2)
        requests = [
            report_service_pb2.CreateReportRequest(
                request_id=receipt,
                scenario=SCENARIO,
                receipts=[receipt],
                score=0.0,
                feedback=value_from({"stars": 4}),
                metadata=struct_from({"group": "q1", "attempt": 2}),
            )
            for receipt in receipts
        ]
        answers = [await stub.CreateReport(request) for request in requests]
        assert [bool(answer.job_id) for answer in answers] == [False, True]
        assert await stub.CreateReport(requests[1]) == answers[1]
        report = answers[1].report
        assert report.HasField("score") and report.score == 0.0
        assert value_of(report.feedback) == {"stars": 4}
        assert object_of(report.metadata) == {"group": "q1", "attempt": 2}
        assert report.name == f"scenarios/{SCENARIO}/reports/{report.report_id}"
        metadata: JsonObject = {"group": "q1", "attempt": 2}
        same = NewReport(SCENARIO, (receipts[1],), 0, {"stars": 4}, metadata, request_id=receipts[1])
        assert (await world.gateway.reports.create(same)).report.report_id == report.report_id


async def test_a_refused_report_names_its_field_and_reason(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, open_channel(f"127.0.0.1:{world.gateway.server.port}") as channel:
        stub = report_service_pb2_grpc.ReportServiceStub(channel)
        (receipt,) = await world.record()
        group = struct_from({"group": "q1"})
        nan = struct_from({"group": "q1"})
        nan.fields["x"].number_value = float("nan")
        endless = float("inf")
        create = report_service_pb2.CreateReportRequest
        for request, code, field in (
            (create(scenario=SCENARIO, score=1, metadata=group), "invalid_field", "receipts"),
            (create(scenario=SCENARIO, receipts=[receipt], metadata=group), "report_refused", "score"),
            (create(scenario=SCENARIO, receipts=[receipt], score=1), "report_refused", "metadata.group"),
            (
                create(scenario=SCENARIO, receipts=[receipt], score=endless, metadata=group),
                "invalid_field",
                "score",
            ),
            (create(scenario=SCENARIO, receipts=[receipt], score=1, metadata=nan), "invalid_field", "metadata.x"),
            (create(scenario="nowhere", receipts=[receipt], score=1, metadata=group), "scenario_not_found", "scenario"),
            (create(scenario="No Where", receipts=[receipt], score=1, metadata=group), "invalid_field", "scenario"),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                await stub.CreateReport(request)
            error = from_rpc_error(refusal.value)
            assert (error.code, error.field) == (code, field)
