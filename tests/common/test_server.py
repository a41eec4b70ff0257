"""The server bootstrap, through a real server and a real channel, with the registry's scenario contract."""

from collections.abc import AsyncIterator

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import scenario_service_pb2 as pb
from atoll.api.registry.v1 import scenario_service_pb2_grpc as rpc
from atoll.api.registry.v1 import version_service_pb2, version_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration, Conflict, InvalidInput, Unavailable
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.server import GrpcServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

SERVICE = "atoll.api.registry.v1.ScenarioService"


class Scenarios(rpc.ScenarioServiceServicer):
    async def GetScenario(self, request: pb.GetScenarioRequest, context: object) -> pb.GetScenarioResponse:
        if request.scenario_id == "defect":
            raise ZeroDivisionError("secret detail")
        raise InvalidInput("scenario_id is odd", field="scenario_id")

    async def CreateScenario(self, request: pb.CreateScenarioRequest, context: object) -> pb.CreateScenarioResponse:
        return pb.CreateScenarioResponse()


class Versions(version_service_pb2_grpc.VersionServiceServicer):
    async def WatchVersions(
        self, request: version_service_pb2.WatchVersionsRequest, context: object
    ) -> AsyncIterator[version_service_pb2.WatchVersionsResponse]:
        yield version_service_pb2.WatchVersionsResponse(revision=1)
        raise Conflict("compacted", reason=errors_pb2.REASON_REVISION_COMPACTED)


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, "s3cret")
    rpc.add_ScenarioServiceServicer_to_server(Scenarios(), server.grpc)  # type: ignore[abstract]
    version_service_pb2_grpc.add_VersionServiceServicer_to_server(Versions(), server.grpc)  # type: ignore[abstract]
    await server.start([SERVICE])
    yield server
    await server.stop()


async def test_a_refusal_keeps_its_reason_and_field_on_the_way(server: GrpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await rpc.ScenarioServiceStub(channel).GetScenario(pb.GetScenarioRequest(scenario_id="x"))
    error = from_rpc_error(failure.value)
    assert isinstance(error, InvalidInput)
    assert (error.message, error.field) == ("scenario_id is odd", "scenario_id")


async def test_a_defect_is_hidden_behind_an_incident(server: GrpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await rpc.ScenarioServiceStub(channel).GetScenario(pb.GetScenarioRequest(scenario_id="defect"))
    assert from_rpc_error(failure.value).reason == errors_pb2.REASON_INTERNAL
    assert "secret" not in (failure.value.details() or "")
    assert "incident" in (failure.value.details() or "")


@pytest.mark.parametrize("method", [f"/{SERVICE}/GetScenario", "/atoll.api.registry.v1.VersionService/WatchVersions"])
async def test_bytes_that_are_no_message_are_the_callers_fault(server: GrpcServer, method: str) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            if "Watch" in method:
                await channel.unary_stream(method, request_serializer=bytes)(b"\xff").read()
            else:
                await channel.unary_unary(method, request_serializer=bytes)(b"\xff")
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in (failure.value.details() or "")


async def test_a_stream_can_end_with_a_refusal(server: GrpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        stub = version_service_pb2_grpc.VersionServiceStub(channel)
        call = stub.WatchVersions(version_service_pb2.WatchVersionsRequest())
        assert await call.read() == version_service_pb2.WatchVersionsResponse(revision=1)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
    assert from_rpc_error(failure.value).reason == errors_pb2.REASON_REVISION_COMPACTED


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_calls_and_streams_without_the_token_are_refused_and_health_is_open(
    server: GrpcServer, token: str | None
) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", token) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await rpc.ScenarioServiceStub(channel).CreateScenario(pb.CreateScenarioRequest())
        assert from_rpc_error(failure.value).reason == errors_pb2.REASON_UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in version_service_pb2_grpc.VersionServiceStub(channel).WatchVersions(
                version_service_pb2.WatchVersionsRequest()
            ):
                pass
        assert from_rpc_error(failure.value).reason == errors_pb2.REASON_UNAUTHENTICATED
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_service(server: GrpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = [s.name async for answer in call for s in answer.list_services_response.service]
    assert SERVICE in names


async def test_a_dead_address_is_unavailable_and_a_used_port_is_refused(server: GrpcServer) -> None:
    second = GrpcServer("127.0.0.1", server.port, "s3cret")
    with pytest.raises(BadConfiguration, match=str(server.port)):
        await second.start([SERVICE])
    await server.stop()
    async with open_channel(f"127.0.0.1:{server.port}", "s3cret") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await rpc.ScenarioServiceStub(channel).GetScenario(pb.GetScenarioRequest(), timeout=5)
    assert isinstance(from_rpc_error(failure.value), Unavailable)


def test_an_open_listener_without_a_token_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="ATOLL_TOKEN"):
        GrpcServer("0.0.0.0", 0, None)
