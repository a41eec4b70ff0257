"""A registry on a fresh directory, and the same behind its real gRPC server."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceStub
from atoll.api.registry.v1.scenario_service_pb2_grpc import ScenarioServiceStub
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceStub
from atoll.common.channels import open_channel
from atoll.registry.app import Registry, RegistryServer

from tests.registry.material import settings_for, write_base_model


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    return write_base_model(tmp_path / "model")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """With the scenario "support" at version 0, keeping two versions."""
    opened = Registry(settings_for(tmp_path))
    yield opened
    opened.close()


@dataclass(frozen=True)
class Client:
    """The three services over the wire, and the server behind them."""

    scenarios: ScenarioServiceStub
    versions: VersionServiceStub
    artifacts: ArtifactServiceStub
    server: RegistryServer


@pytest.fixture
async def client(registry: Registry, tmp_path: Path) -> AsyncIterator[Client]:
    server = RegistryServer(registry, settings_for(tmp_path))
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield Client(ScenarioServiceStub(channel), VersionServiceStub(channel), ArtifactServiceStub(channel), server)
    await server.stop()
