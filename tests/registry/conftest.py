"""A registry on a fresh directory, and the same behind its real gRPC server."""

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceStub
from atoll.api.registry.v1.job_record_service_pb2_grpc import JobRecordServiceStub
from atoll.api.registry.v1.lease_service_pb2_grpc import LeaseServiceStub
from atoll.api.registry.v1.scenario_service_pb2_grpc import ScenarioServiceStub
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceStub
from atoll.common.channels import open_channel
from atoll.common.names import new_id
from atoll.registry.app import Registry, RegistryServer
from atoll.registry.settings import RegistrySettings

from tests.postgres import PostgresServer
from tests.registry.material import settings_for, write_base_model

if TYPE_CHECKING:  # these classes are in the stubs only
    from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceAsyncStub
    from atoll.api.registry.v1.job_record_service_pb2_grpc import JobRecordServiceAsyncStub
    from atoll.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub
    from atoll.api.registry.v1.scenario_service_pb2_grpc import ScenarioServiceAsyncStub
    from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceAsyncStub

TEMPLATE = "registry_template"


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    return write_base_model(tmp_path / "model")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database; every test that uses it runs on both kinds, on PostgreSQL in the slow lane."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = new_id()
    yield server.create(name)
    server.drop(name)


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry at version 0 that tests copy: opening one takes a tenth of making one."""
    directory = tmp_path_factory.mktemp("registry")
    Registry(settings_for(directory)).close()
    return directory


@pytest.fixture(scope="session")
def _postgres_template(
    _template: Path, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> RegistrySettings:
    """The same on PostgreSQL."""
    directory = tmp_path_factory.mktemp("registry-on-postgresql")
    made = settings_for(directory, base=_template / "base", database_url=postgres.create(TEMPLATE))
    Registry(made).close()
    return made


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def settings(request: pytest.FixtureRequest, _template: Path, tmp_path: Path) -> Iterator[RegistrySettings]:
    """A registry of its own for one test: the scenario "support" at version 0, keeping two versions. On both kinds of
    database, on PostgreSQL in the slow lane."""
    base = _template / "base"
    if request.param == "sqlite":
        shutil.copytree(_template / "store", tmp_path / "store")
        yield settings_for(tmp_path, base=base)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    template: RegistrySettings = request.getfixturevalue("_postgres_template")
    shutil.copytree(template.store, tmp_path / "store")
    name = new_id()
    yield settings_for(tmp_path, base=base, database_url=server.create(name, TEMPLATE))
    server.drop(name)


@pytest.fixture
def registry(settings: RegistrySettings) -> Iterator[Registry]:
    opened = Registry(settings)
    yield opened
    opened.close()


@dataclass(frozen=True)
class Client:
    """The services over the wire, and the server behind them."""

    scenarios: "ScenarioServiceAsyncStub"
    versions: "VersionServiceAsyncStub"
    artifacts: "ArtifactServiceAsyncStub"
    leases: "LeaseServiceAsyncStub"
    jobs: "JobRecordServiceAsyncStub"
    server: RegistryServer


@pytest.fixture
async def client(registry: Registry, settings: RegistrySettings) -> AsyncIterator[Client]:
    server = RegistryServer(registry, settings)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield Client(
            ScenarioServiceStub(channel),
            VersionServiceStub(channel),
            ArtifactServiceStub(channel),
            LeaseServiceStub(channel),
            JobRecordServiceStub(channel),
            server,
        )
    await server.stop()
