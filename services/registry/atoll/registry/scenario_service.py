"""gRPC: ScenarioService."""

import asyncio

from atoll.api.registry.v1 import scenario_service_pb2 as pb
from atoll.api.registry.v1.scenario_service_pb2_grpc import ScenarioServiceServicer
from atoll.common.errors import InvalidInput
from atoll.common.pages import decode_page_token, encode_page_token, page_size
from atoll.common.server import Context
from atoll.common.structs import object_of
from atoll.registry.messages import fit_page, scenario_message
from atoll.registry.scenarios import Scenarios
from atoll.registry.types import ScenarioDefinition

MAX_REQUEST_ID = 64


class ScenarioRpc(ScenarioServiceServicer):
    """Translates; `Scenarios` decides."""

    def __init__(self, scenarios: Scenarios) -> None:
        self._scenarios = scenarios

    async def CreateScenario(self, request: pb.CreateScenarioRequest, context: Context) -> pb.CreateScenarioResponse:
        if len(request.request_id) > MAX_REQUEST_ID:
            raise InvalidInput(
                f"request_id has {len(request.request_id)} characters, expected at most {MAX_REQUEST_ID}",
                field="request_id",
            )
        definition = ScenarioDefinition(
            scenario_id=request.scenario_id,
            family=request.family,
            options=object_of(request.options, "options"),
            base_model=request.base_model,
            max_staleness=request.max_staleness,
        )
        scenario = await asyncio.to_thread(self._scenarios.create, definition)
        return pb.CreateScenarioResponse(scenario=scenario_message(scenario))

    async def GetScenario(self, request: pb.GetScenarioRequest, context: Context) -> pb.GetScenarioResponse:
        scenario = await asyncio.to_thread(self._scenarios.get, request.scenario_id)
        return pb.GetScenarioResponse(scenario=scenario_message(scenario))

    async def ListScenarios(self, request: pb.ListScenariosRequest, context: Context) -> pb.ListScenariosResponse:
        limit = page_size(request.page_size)
        after = decode_page_token(request.page_token)
        found = await asyncio.to_thread(self._scenarios.list_page, limit + 1, after)
        messages = fit_page(found[:limit], scenario_message)
        more = len(messages) < len(found)
        token = encode_page_token(messages[-1].scenario_id) if more else ""
        return pb.ListScenariosResponse(scenarios=messages, next_page_token=token)
