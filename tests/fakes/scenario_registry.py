"""The registry as gateways see it: scenarios and the chain's heads, from memory, behind real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import (
    scenario_pb2,
    scenario_service_pb2,
    scenario_service_pb2_grpc,
    version_pb2,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.common.errors import NotFound
from atoll.common.server import Context, GrpcServer
from atoll.common.structs import struct_from
from pydantic import JsonValue

SERVICES = ("atoll.api.registry.v1.ScenarioService", "atoll.api.registry.v1.VersionService")


class FakeScenarioRegistry(
    scenario_service_pb2_grpc.ScenarioServiceServicer, version_service_pb2_grpc.VersionServiceServicer
):
    """Use: registry.add("math", "grpo", {...}); registry.append("math"); registry.asked counts GetScenario calls."""

    def __init__(self) -> None:
        self.scenarios: dict[str, scenario_pb2.Scenario] = {}
        self.chains: dict[str, list[version_pb2.Version]] = {}
        self.asked = 0
        self.watches = 0
        self._changed = asyncio.Event()

    def add(self, scenario: str, family: str = "grpo", options: Mapping[str, JsonValue] | None = None) -> None:
        """A scenario with version 0."""
        self.scenarios[scenario] = scenario_pb2.Scenario(
            scenario_id=scenario, family=family, options=struct_from(options or {})
        )
        self.append(scenario)

    def append(
        self,
        scenario: str,
        incarnation: int = 1,
        *,
        same_weights: bool = False,
        operation: version_pb2.Operation.ValueType = version_pb2.OPERATION_TRAINING,
        restores: int | None = None,
    ) -> None:
        """The next version of a chain; watchers hear of it. A version that restores another has its weights, unless
        it has those of its parent."""
        chain = self.chains.setdefault(scenario, [])
        number = len(chain)
        digest = f"{number:064x}"
        if same_weights:
            digest = chain[-1].model_digest
        elif restores is not None:
            digest = chain[restores].model_digest
        chain.append(
            version_pb2.Version(
                scenario=scenario,
                number=number,
                parent=None if number == 0 else number - 1,
                weight_version=f"{incarnation}:{number}",
                operation=operation if number else version_pb2.OPERATION_CREATION,
                model_digest=digest,
                revision=number + 1,
                restores=restores,
            )
        )
        self._changed.set()
        self._changed = asyncio.Event()

    async def GetScenario(
        self, request: scenario_service_pb2.GetScenarioRequest, context: Context
    ) -> scenario_service_pb2.GetScenarioResponse:
        self.asked += 1
        if request.scenario_id not in self.scenarios:
            raise NotFound(
                f"no scenario {request.scenario_id}", reason=errors_pb2.REASON_SCENARIO_NOT_FOUND, field="scenario"
            )
        return scenario_service_pb2.GetScenarioResponse(scenario=self.scenarios[request.scenario_id])

    async def ListScenarios(
        self, request: scenario_service_pb2.ListScenariosRequest, context: Context
    ) -> scenario_service_pb2.ListScenariosResponse:
        """Pages of two, so that callers must page."""
        names = [name for name in sorted(self.scenarios) if name > request.page_token]
        return scenario_service_pb2.ListScenariosResponse(
            scenarios=[self.scenarios[name] for name in names[:2]],
            next_page_token=names[1] if len(names) > 2 else "",
        )

    async def GetVersion(
        self, request: version_service_pb2.GetVersionRequest, context: Context
    ) -> version_service_pb2.GetVersionResponse:
        chain = self.chains[request.scenario]
        version = chain[request.number] if request.HasField("number") else chain[-1]
        return version_service_pb2.GetVersionResponse(version=version)

    async def WatchVersions(
        self, request: version_service_pb2.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[version_service_pb2.WatchVersionsResponse]:
        self.watches += 1
        sent = request.from_revision
        while True:
            changed = self._changed
            for version in self.chains[request.scenario]:
                if version.revision > sent:
                    sent = version.revision
                    yield version_service_pb2.WatchVersionsResponse(version=version, revision=sent)
            await changed.wait()

    async def CreateScenario(
        self, request: scenario_service_pb2.CreateScenarioRequest, context: Context
    ) -> scenario_service_pb2.CreateScenarioResponse:
        raise NotImplementedError("a gateway never creates a scenario")

    async def CommitVersion(
        self, request: version_service_pb2.CommitVersionRequest, context: Context
    ) -> version_service_pb2.CommitVersionResponse:
        raise NotImplementedError("a gateway never commits")

    async def ListVersions(
        self, request: version_service_pb2.ListVersionsRequest, context: Context
    ) -> version_service_pb2.ListVersionsResponse:
        """Newest first, all of them."""
        return version_service_pb2.ListVersionsResponse(versions=reversed(self.chains[request.scenario]))


async def serve_registry(registry: FakeScenarioRegistry, port: int = 0) -> GrpcServer:
    """Starts it; `server.port` tells where. The caller stops it."""
    server = GrpcServer("127.0.0.1", port, None)
    scenario_service_pb2_grpc.add_ScenarioServiceServicer_to_server(registry, server.grpc)
    version_service_pb2_grpc.add_VersionServiceServicer_to_server(registry, server.grpc)
    await server.start(SERVICES)
    return server
