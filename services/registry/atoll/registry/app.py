"""Puts the registry together: open, serve, stop."""

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import structlog
from atoll.api.registry.v1 import (
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    job_record_service_pb2,
    job_record_service_pb2_grpc,
    lease_service_pb2,
    lease_service_pb2_grpc,
    scenario_service_pb2,
    scenario_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.common.errors import AtollError, BadConfiguration
from atoll.common.server import GrpcServer, wait_for_stop_signal
from atoll.common.structs import object_of, struct_from
from atoll.registry.artifact_service import ArtifactRpc
from atoll.registry.artifacts import Artifacts
from atoll.registry.chain import Chain
from atoll.registry.database import Database
from atoll.registry.job_record_service import JobRecordRpc
from atoll.registry.job_records import JobRecords
from atoll.registry.lease_service import LeaseRpc
from atoll.registry.leases import Leases
from atoll.registry.migrate import migrate
from atoll.registry.pins import Pins
from atoll.registry.recovery import recover
from atoll.registry.scenario_service import ScenarioRpc
from atoll.registry.scenarios import Scenarios
from atoll.registry.settings import BootScenario, RegistrySettings
from atoll.registry.store import Store
from atoll.registry.sweep import Sweeper
from atoll.registry.types import ScenarioDefinition
from atoll.registry.version_service import VersionRpc
from atoll.registry.watch import CommitSignal

log = structlog.get_logger(__name__)

STORE_THREADS = 4
SERVICES = (
    scenario_service_pb2.DESCRIPTOR.services_by_name["ScenarioService"].full_name,
    version_service_pb2.DESCRIPTOR.services_by_name["VersionService"].full_name,
    artifact_service_pb2.DESCRIPTOR.services_by_name["ArtifactService"].full_name,
    lease_service_pb2.DESCRIPTOR.services_by_name["LeaseService"].full_name,
    job_record_service_pb2.DESCRIPTOR.services_by_name["JobRecordService"].full_name,
)


class Registry:
    """Database and store of one registry, consistent with each other once the constructor returns."""

    def __init__(self, settings: RegistrySettings) -> None:
        """Migrates, recovers, creates the boot scenarios, removes what retention lets go. Raises BadConfiguration."""
        with _as_configuration("ATOLL_REGISTRY_STORE"):
            store = Store(settings.store)
            self.database = Database(settings.database)
            migrate(self.database)
            self.artifacts = Artifacts(self.database, store)
            recover(self.database, store, self.artifacts, self.database.file)
        self.scenarios = Scenarios(self.database, self.artifacts)
        self.chain = Chain(self.database)
        self.leases = Leases(self.database)
        self.job_records = JobRecords(self.database)
        self.sweeper = Sweeper(self.database, store, settings)
        self.pins = Pins(self.database)
        self._create(settings.scenarios)
        self.sweeper.sweep()

    def _create(self, scenarios: Iterable[BootScenario]) -> None:
        for index, boot in enumerate(scenarios):
            with _as_configuration(f"ATOLL_REGISTRY_SCENARIOS[{index}]"):
                options = object_of(struct_from(boot.options, "options"))
                self.scenarios.create(
                    ScenarioDefinition(boot.scenario_id, boot.family, options, boot.base_model, boot.max_staleness)
                )

    def close(self) -> None:
        self.database.close()


class RegistryServer:
    """Its services on one port. Use: server = RegistryServer(registry, settings); await server.start();
    server.port; await server.stop()."""

    def __init__(self, registry: Registry, settings: RegistrySettings) -> None:
        self._registry = registry
        self._server = GrpcServer(settings.host, settings.port, settings.token_text)
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
        self._commits = CommitSignal()
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep_again = False
        scenario_service_pb2_grpc.add_ScenarioServiceServicer_to_server(
            ScenarioRpc(registry.scenarios), self._server.grpc
        )
        version_service_pb2_grpc.add_VersionServiceServicer_to_server(
            VersionRpc(registry.chain, self._commits, self._committed), self._server.grpc
        )
        artifact_service_pb2_grpc.add_ArtifactServiceServicer_to_server(
            ArtifactRpc(registry.artifacts, registry.sweeper, registry.pins, self._threads), self._server.grpc
        )
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseRpc(registry.leases), self._server.grpc)
        job_record_service_pb2_grpc.add_JobRecordServiceServicer_to_server(
            JobRecordRpc(registry.job_records), self._server.grpc
        )

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Serves. Raises BadConfiguration when the port is taken."""
        await self._server.start(SERVICES)
        log.info("registry serves", port=self.port)

    async def stop(self) -> None:
        """Ends the watches, lets calls finish, waits for retention."""
        self._commits.close()
        await self._server.stop()
        if self._sweeping is not None:
            await self._sweeping
        self._threads.shutdown()

    def _committed(self) -> None:
        self._commits.notify()
        self._sweep_again = True
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while self._sweep_again:
            self._sweep_again = False
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self._registry.sweeper.sweep)
            except Exception as error:  # the commit stands; the next one tries again
                log.error("retention failed", exc_info=error)


async def serve(settings: RegistrySettings) -> None:
    """Runs until SIGTERM or SIGINT. Health says SERVING only when the boot scenarios exist."""
    registry = await asyncio.to_thread(Registry, settings)
    server = RegistryServer(registry, settings)
    await server.start()
    await wait_for_stop_signal()
    await server.stop()
    registry.close()


@contextmanager
def _as_configuration(setting: str) -> Iterator[None]:
    """What is refused at start is a matter of the configuration."""
    try:
        yield
    except BadConfiguration:
        raise
    except (AtollError, OSError) as error:
        raise BadConfiguration(f"{setting}: {error}", field=setting) from error
