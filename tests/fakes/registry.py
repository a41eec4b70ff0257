"""The real registry of one scenario in a test's directory, which refuses what the test tells it to refuse."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from atoll.api.registry.v1 import (
    artifact_pb2,
    artifact_service_pb2,
    lease_service_pb2,
    version_pb2,
    version_service_pb2,
)
from atoll.common.errors import AtollError, Unavailable
from atoll.common.server import GrpcServer
from atoll.registry import tables
from atoll.registry.app import SERVICES, Registry, RegistryServer
from atoll.registry.settings import RegistrySettings
from atoll.registry.types import ScenarioDefinition
from pydantic import JsonValue

Handler = Any
Unary = Callable[[Any, Any], Awaitable[Any]]

KEPT = 1_000
"""Retention is another test's matter."""


class Handlers:
    """Stands where a service would register with a server, and keeps its methods by path."""

    def __init__(self) -> None:
        self.found: dict[str, Handler] = {}

    @property
    def grpc(self) -> "Handlers":
        return self

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """The same methods come by name as well."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self.found |= {f"/{service}/{method}": handler for method, handler in handlers.items()}


class RegistryUnderTest:
    """`refusals` maps a method's name to errors, one for each call to come; `after` to hooks that run once after it.

    `away` refuses all calls. `sizes` overrides what GetArtifact says of an artifact's size. `pass_time` moves the clock
    of its leases.
    """

    def __init__(
        self,
        directory: Path,
        base_model: Path,
        scenario: str,
        family: str,
        options: Mapping[str, JsonValue],
        max_staleness: int = 0,
    ) -> None:
        self.scenario = scenario
        self.store = directory / "store"
        settings = RegistrySettings(port=0, store=self.store, keep_checkpoints=KEPT, min_free_space_fraction=0)
        self.real = Registry(settings)
        self._late = timedelta(0)
        self.real.leases._clock = lambda: datetime.now(UTC) + self._late
        self.add_scenario(ScenarioDefinition(scenario, family, options, str(base_model), max_staleness))
        self.refusals: dict[str, list[AtollError]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.sizes: dict[str, int] = {}
        self.away = False
        self._plain: dict[str, Unary] = {}
        recorder = Handlers()
        with mock.patch("atoll.registry.app.GrpcServer", return_value=recorder):
            self._server = RegistryServer(self.real, settings)
        self.handlers = {path: self._scripted(path, handler) for path, handler in recorder.found.items()}

    def add_scenario(self, definition: ScenarioDefinition) -> None:
        """Another one, in the same registry."""
        self.real.scenarios.create(definition)

    def serve_on(self, server: GrpcServer) -> None:
        """Adds all its services to a server."""
        for service in SERVICES:
            methods = {
                path.rpartition("/")[2]: handler
                for path, handler in self.handlers.items()
                if path.startswith(f"/{service}/")
            }
            server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    def close(self) -> None:
        threads: ThreadPoolExecutor = self._server._threads
        threads.shutdown()
        self.real.close()

    def pass_time(self, seconds: float) -> None:
        """Leases are that much older now, by the registry's clock."""
        self._late += timedelta(seconds=seconds)

    async def ask(self, method: str, request: Any) -> Any:
        """Calls a method past what the test scripted."""
        path = next(path for path in self.handlers if path.endswith(f"/{method}"))
        return await self._plain[path](request, None)

    async def versions(self, scenario: str = "") -> list[version_pb2.Version]:
        """Oldest first."""
        request = version_service_pb2.ListVersionsRequest(scenario=scenario or self.scenario, page_size=1_000)
        return list((await self.ask("ListVersions", request)).versions)[::-1]

    async def model_of(self, number: int) -> Path:
        digest = (await self.versions())[number].model_digest
        reply = await self.ask("GetArtifact", artifact_service_pb2.GetArtifactRequest(digest=digest))
        return Path(reply.artifact.location)

    async def lose(self, digest: str) -> None:
        """An artifact's bytes are gone, and the registry knows it."""
        with self.real.artifacts._database.write() as connection:
            gone = tables.artifacts.update().where(tables.artifacts.c.digest == digest)
            connection.execute(gone.values(removed_at=datetime.now(UTC)))
        self.real.artifacts.store.remove(digest)

    async def append(self, job_id: str, sample_ids: tuple[str, ...] = (), like: int = 0) -> version_pb2.Version:
        """Another trainer takes the lease and commits a version with the content of version `like`."""
        versions = await self.versions()
        token = await self.take_lease("another-trainer")
        request = version_service_pb2.CommitVersionRequest(
            scenario=self.scenario,
            job_id=job_id,
            expected_parent=len(versions) - 1,
            operation=version_pb2.OPERATION_TRAINING,
            family=versions[0].family,
            model_digest=versions[like].model_digest,
            checkpoint_digest=versions[like].checkpoint_digest,
            consumed_sample_ids=sample_ids,
            fencing_token=token,
        )
        version: version_pb2.Version = (await self.ask("CommitVersion", request)).version
        await self.ask(
            "ReleaseLease",
            lease_service_pb2.ReleaseLeaseRequest(scenario=self.scenario, role="trainer", holder="another-trainer"),
        )
        return version

    async def take_lease(self, holder: str, ttl_s: int = 15) -> int:
        """The lease lapses and another holder takes it; its token."""
        self.pass_time(3_600)
        request = lease_service_pb2.AcquireLeaseRequest(
            scenario=self.scenario, role="trainer", holder=holder, address="elsewhere:1"
        )
        request.ttl.FromSeconds(ttl_s)
        token: int = (await self.ask("AcquireLease", request)).lease.fencing_token
        return token

    def _scripted(self, path: str, handler: Handler) -> Handler:
        method = path.rpartition("/")[2]
        if handler.unary_unary is None:
            return handler
        self._plain[path] = handler.unary_unary

        async def scripted(request: Any, context: Any) -> Any:
            if self.away:
                raise Unavailable("the registry is away")
            pending = self.refusals.get(method)
            if pending:
                raise pending.pop(0)
            reply = await handler.unary_unary(request, context)
            if isinstance(reply, artifact_service_pb2.GetArtifactResponse):
                artifact: artifact_pb2.Artifact = reply.artifact
                artifact.total_size = self.sizes.get(artifact.digest, artifact.total_size)
            hook = self.after.pop(method, None)
            if hook is not None:
                hook()
            return reply

        return grpc.unary_unary_rpc_method_handler(scripted, handler.request_deserializer, handler.response_serializer)
