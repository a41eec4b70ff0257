"""`atoll scenarios`: what the registry binds to what."""

from datetime import UTC
from typing import cast

from atoll.api.registry.v1 import scenario_service_pb2, scenario_service_pb2_grpc
from atoll.api.registry.v1.scenario_pb2 import Scenario
from atoll.cli.registry_api import registry_channel
from atoll.common.structs import object_of
from google.protobuf.json_format import MessageToDict
from rich.table import Table

CALL_SECONDS = 10.0


async def read_scenarios(registry: str, token: str | None) -> list[Scenario]:
    """Every scenario, by id. registry: host:port. Raises AtollError: the registry's refusal, or Unavailable."""
    async with registry_channel(registry, token) as channel:
        stub = scenario_service_pb2_grpc.ScenarioServiceStub(channel)
        found: list[Scenario] = []
        request = scenario_service_pb2.ListScenariosRequest()
        while True:
            page = await stub.ListScenarios(request, timeout=CALL_SECONDS)
            found.extend(page.scenarios)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token


def scenario_as_json(scenario: Scenario) -> dict[str, object]:
    """The message in proto3 JSON with its field names."""
    return cast(dict[str, object], MessageToDict(scenario, preserving_proto_field_name=True))


def scenarios_table(scenarios: list[Scenario]) -> Table:
    """One row a scenario, with the options that it was created with."""
    table = Table(title=None if scenarios else "no scenarios", title_justify="left")
    for column in ("scenario", "family", "options", "max staleness", "head", "created"):
        table.add_column(column, justify="right" if column in ("max staleness", "head") else "left")
    for scenario in scenarios:
        options = object_of(scenario.options, "options")
        table.add_row(
            scenario.scenario_id,
            scenario.family,
            ", ".join(f"{name} {value}" for name, value in sorted(options.items())) or "-",
            str(scenario.max_staleness),
            str(scenario.head),
            scenario.create_time.ToDatetime(tzinfo=UTC).strftime("%Y-%m-%d %H:%M:%S"),
        )
    return table
