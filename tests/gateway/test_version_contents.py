"""A version stands for its weights: any name of them in its incarnation, and no others."""

from collections.abc import AsyncIterator

import pytest
from atoll.api.registry.v1 import version_pb2
from atoll.common.channels import open_channel
from atoll.gateway.registry_reader import RegistryReader
from atoll.gateway.version_contents import Pin, VersionContents, is_weight_version

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry

SCENARIO = "math"


@pytest.fixture
async def contents() -> AsyncIterator[VersionContents]:
    """Of a chain in which 1:2 changed nothing, 1:3 did, and 2:4 gave 1:2 back."""
    registry = FakeScenarioRegistry()
    registry.add(SCENARIO)
    registry.append(SCENARIO)
    registry.append(SCENARIO, same_weights=True)
    registry.append(SCENARIO)
    registry.append(SCENARIO, incarnation=2, operation=version_pb2.OPERATION_ROLLBACK, restores=2)
    server = await serve_registry(registry)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield VersionContents(RegistryReader(channel))
    await server.grpc.stop(None)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("1:1", True), ("1:2", True), ("1:3", False), ("2:4", False), ("1:0", False), ("2:2", False)],
)
async def test_a_pinned_version_is_answered_by_its_weights_under_any_name_of_its_incarnation(
    contents: VersionContents, name: str, allowed: bool
) -> None:
    digest = await contents.digest(SCENARIO, "1:2")
    assert digest is not None
    assert await Pin(SCENARIO, "1:2", digest, frozenset(), contents).allows(name) is allowed


def test_a_word_of_the_engines_own_is_no_weight_version() -> None:
    assert is_weight_version("1:2") and not is_weight_version("default")
