"""Bindings are asked for once; heads are followed through restarts of the registry."""

from functools import partial
from pathlib import Path

import pytest
from atoll.common.errors import AtollError, NotFound, Unavailable
from atoll.gateway.assembly import build_gateway
from atoll.gateway.head import Head
from atoll.gateway.scenarios import ScenarioDirectory

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry
from tests.gateway.store_world import OPTIONS, SCENARIO, eventually, head_at, open_world, settings_for


def _is_head(scenarios: ScenarioDirectory, head: Head) -> bool:
    return scenarios.head(SCENARIO) == head


async def test_a_binding_is_read_once_and_carries_its_family(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.registry.add("later", "grpo", {"groups_per_step": 3})
        later = await world.gateway.scenarios.get("later")
        assert later is await world.gateway.scenarios.get("later") and world.registry.asked == 1
        assert later.family.name == "grpo" and later.family.options.model_dump()["groups_per_step"] == 3
        with pytest.raises(NotFound) as refusal:
            await world.gateway.scenarios.get("nowhere")
        assert refusal.value.code == "scenario_not_found"


async def test_a_scenario_that_cannot_be_used_does_not_hide_the_others(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.registry.add("broken", "grpo", {"no_such_option": 1})
        world.registry.add("strange", "nofamily", {})
        listed = await world.gateway.scenarios.list()
        assert [bound.scenario_id for bound in listed] == [SCENARIO]
        failed = world.gateway.scenarios.failed()
        assert sorted(failed) == ["broken", "strange"] and "no_such_option" in failed["broken"]
        with pytest.raises(AtollError, match="no_such_option"):
            await world.gateway.scenarios.get("broken")
        world.registry.add("broken", "grpo", {})
        await world.gateway.scenarios.get("broken")
        assert sorted(world.gateway.scenarios.failed()) == ["strange"]


async def test_the_head_is_followed_with_its_parent(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        scenarios = world.gateway.scenarios
        await eventually(lambda: scenarios.head(SCENARIO) == head_at(0))
        world.registry.append(SCENARIO)
        await eventually(lambda: scenarios.head(SCENARIO) == head_at(1))
        world.registry.append(SCENARIO, incarnation=2)
        await eventually(lambda: scenarios.head(SCENARIO) == Head(2, "2:2", frozenset({"2:2"}), frozenset({"1:1"})))
        assert scenarios.head("nowhere") is None


async def test_a_line_of_versions_with_the_same_weights_is_known_by_all_its_names(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        scenarios = world.gateway.scenarios
        await eventually(lambda: scenarios.head(SCENARIO) is not None)
        world.registry.append(SCENARIO)
        for number in (2, 3):
            world.registry.append(SCENARIO, same_weights=True)
            names = frozenset(f"1:{each}" for each in range(1, number + 1))
            expected = Head(number, f"1:{number}", names, names - {f"1:{number}"})
            await eventually(partial(_is_head, scenarios, expected))
    world.registry.append(SCENARIO, same_weights=True)
    server = await serve_registry(world.registry)
    fresh = build_gateway(settings_for(tmp_path / "later", server.port, None))
    await fresh.start()
    try:
        names = frozenset({"1:1", "1:2", "1:3"})
        expected = Head(4, "1:4", names | {"1:4"}, names)
        await eventually(lambda: fresh.scenarios.head(SCENARIO) == expected)
    finally:
        await fresh.stop()
        await server.grpc.stop(None)


async def test_a_registry_that_comes_later_or_again_is_found(tmp_path: Path) -> None:
    registry = FakeScenarioRegistry()
    registry.add(SCENARIO, "grpo", OPTIONS)
    server = await serve_registry(registry)
    await server.grpc.stop(None)
    gateway = build_gateway(settings_for(tmp_path, server.port, None))
    await gateway.start()
    try:
        with pytest.raises(Unavailable):
            await gateway.scenarios.get(SCENARIO)
        server = await serve_registry(registry, server.port)
        bound = None
        for _ in range(200):
            try:
                bound = await gateway.scenarios.get(SCENARIO)
                break
            except Unavailable:
                continue
        assert bound is not None
        await eventually(lambda: gateway.scenarios.head(SCENARIO) is not None)
        await server.grpc.stop(None)
        registry.append(SCENARIO)
        server = await serve_registry(registry, server.port)
        await eventually(lambda: gateway.scenarios.head(SCENARIO) == head_at(1))
    finally:
        await gateway.stop()
        await server.grpc.stop(None)
