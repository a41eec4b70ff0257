"""Scenarios as a table: families, options as they were given, heads."""

from io import StringIO

import pytest
from atoll.api.registry.v1.scenario_pb2 import Scenario
from atoll.cli.scenarios import read_scenarios, scenario_as_json, scenarios_table
from atoll.common.errors import Unavailable
from atoll.common.structs import struct_from
from rich.console import Console

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry


def shown(scenarios: list[Scenario]) -> str:
    text = StringIO()
    Console(file=text, width=200).print(scenarios_table(scenarios))
    return text.getvalue()


def test_a_scenario_is_a_row_with_the_options_that_it_was_created_with() -> None:
    scenario = Scenario(scenario_id="math", family="grpo", options=struct_from({"eps_clip": 0.1, "groups_per_step": 2}))
    text = shown([scenario])
    assert "math" in text and "grpo" in text and "eps_clip 0.1, groups_per_step 2 " in text
    assert scenario_as_json(scenario)["scenario_id"] == "math"
    assert "no scenarios" in shown([])


async def test_every_page_of_the_registry_is_read() -> None:
    registry = FakeScenarioRegistry()
    for name in ("a", "b", "c", "d", "e"):
        registry.add(name)
    server = await serve_registry(registry)
    found = await read_scenarios(f"127.0.0.1:{server.port}", None)
    assert [scenario.scenario_id for scenario in found] == ["a", "b", "c", "d", "e"]
    await server.grpc.stop(None)


async def test_a_registry_that_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=r"the registry does not answer at 127\.0\.0\.1:1"):
        await read_scenarios("127.0.0.1:1", None)
