"""A registry of one scenario in memory, behind real gRPC, that refuses what a test tells it to refuse."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import (
    artifact_pb2,
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    scenario_pb2,
    scenario_service_pb2,
    scenario_service_pb2_grpc,
    version_pb2,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.common import structs
from atoll.common.errors import AtollError, Conflict, NotFound
from pydantic import JsonValue

Context = grpc.aio.ServicerContext[Any, Any]


class FakeRegistry(
    scenario_service_pb2_grpc.ScenarioServiceServicer,
    version_service_pb2_grpc.VersionServiceServicer,
    artifact_service_pb2_grpc.ArtifactServiceServicer,
):
    """`refusals` maps a method's name to errors, one for each call to come; `after` to hooks that run once after it."""

    def __init__(
        self, store: Path, scenario: str, family: str, options: Mapping[str, JsonValue], max_staleness: int = 0
    ) -> None:
        self.store = store
        self.scenario = scenario_pb2.Scenario(
            scenario_id=scenario, family=family, options=structs.struct_from(options), max_staleness=max_staleness
        )
        self.versions: list[version_pb2.Version] = []
        self.refusals: dict[str, list[AtollError]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.sealed: dict[str, artifact_pb2.Artifact] = {}

    def create(self, write_base: Callable[[Path], None]) -> None:
        """Makes version 0 of a base model that `write_base` writes into a directory that does not exist yet."""
        base = self.store / "base"
        write_base(base)
        files = [_file(base, path) for path in sorted(base.rglob("*")) if path.is_file()]
        digest = self._place(base, files)
        self._append(version_service_pb2.CommitVersionRequest(model_digest=digest))

    async def GetScenario(
        self, request: scenario_service_pb2.GetScenarioRequest, context: Context
    ) -> scenario_service_pb2.GetScenarioResponse:
        self._refuse("GetScenario")
        if request.scenario_id != self.scenario.scenario_id:
            raise NotFound("no such scenario", reason=errors_pb2.REASON_SCENARIO_NOT_FOUND)
        return scenario_service_pb2.GetScenarioResponse(scenario=self.scenario)

    async def GetVersion(
        self, request: version_service_pb2.GetVersionRequest, context: Context
    ) -> version_service_pb2.GetVersionResponse:
        self._refuse("GetVersion")
        found = self.versions[-1:]
        if request.HasField("number"):
            found = [version for version in self.versions if version.number == request.number]
        if request.HasField("job_id"):
            found = [version for version in self.versions if version.job_id == request.job_id]
        if not found:
            raise NotFound("no such version", reason=errors_pb2.REASON_VERSION_NOT_FOUND)
        return version_service_pb2.GetVersionResponse(version=found[0])

    async def CommitVersion(
        self, request: version_service_pb2.CommitVersionRequest, context: Context
    ) -> version_service_pb2.CommitVersionResponse:
        self._refuse("CommitVersion")
        for version in self.versions:
            if version.job_id == request.job_id:
                if version.model_digest != request.model_digest:
                    raise Conflict("committed differently", reason=errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY)
                return version_service_pb2.CommitVersionResponse(version=version)
        if request.expected_parent != self.versions[-1].number:
            raise Conflict("the head moved", reason=errors_pb2.REASON_PARENT_NOT_HEAD)
        consumed = {sample for version in self.versions for sample in version.consumed_sample_ids}
        if consumed & set(request.consumed_sample_ids):
            raise Conflict("consumed twice", reason=errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED)
        version = self._append(request)
        self._run_hook("CommitVersion")
        return version_service_pb2.CommitVersionResponse(version=version)

    async def StageArtifact(
        self, request: artifact_service_pb2.StageArtifactRequest, context: Context
    ) -> artifact_service_pb2.StageArtifactResponse:
        self._refuse("StageArtifact")
        location = self.store / "staging" / request.request_id
        shutil.rmtree(location, ignore_errors=True)
        location.mkdir(parents=True)
        return artifact_service_pb2.StageArtifactResponse(staging_id=request.request_id, location=str(location))

    async def SealArtifact(
        self, request: artifact_service_pb2.SealArtifactRequest, context: Context
    ) -> artifact_service_pb2.SealArtifactResponse:
        self._refuse("SealArtifact")
        location = self.store / "staging" / request.staging_id
        if not location.is_dir():
            raise NotFound("no such staging area", reason=errors_pb2.REASON_STAGING_NOT_FOUND)
        expected = [_file(location, path) for path in sorted(location.rglob("*")) if path.is_file()]
        if list(request.files) != expected:
            raise Conflict("manifest differs", reason=errors_pb2.REASON_ARTIFACT_MISMATCH)
        digest = self._place(location, expected)
        return artifact_service_pb2.SealArtifactResponse(artifact=self.sealed[digest])

    async def AbandonArtifact(
        self, request: artifact_service_pb2.AbandonArtifactRequest, context: Context
    ) -> artifact_service_pb2.AbandonArtifactResponse:
        shutil.rmtree(self.store / "staging" / request.staging_id, ignore_errors=True)
        return artifact_service_pb2.AbandonArtifactResponse()

    async def GetArtifact(
        self, request: artifact_service_pb2.GetArtifactRequest, context: Context
    ) -> artifact_service_pb2.GetArtifactResponse:
        self._refuse("GetArtifact")
        if request.digest not in self.sealed:
            raise NotFound("no such artifact", reason=errors_pb2.REASON_ARTIFACT_NOT_FOUND)
        return artifact_service_pb2.GetArtifactResponse(artifact=self.sealed[request.digest])

    def append(self, job_id: str, sample_ids: tuple[str, ...] = (), like: int = 0) -> version_pb2.Version:
        """Another trainer commits a version with the content of version `like`."""
        source = self.versions[like]
        return self._append(
            version_service_pb2.CommitVersionRequest(
                job_id=job_id,
                family=self.scenario.family,
                model_digest=source.model_digest,
                checkpoint_digest=source.checkpoint_digest,
                consumed_sample_ids=sample_ids,
            )
        )

    def model_of(self, number: int) -> Path:
        return Path(self.sealed[self.versions[number].model_digest].location)

    def _append(self, request: version_service_pb2.CommitVersionRequest) -> version_pb2.Version:
        number = len(self.versions)
        version = version_pb2.Version(
            scenario=self.scenario.scenario_id,
            number=number,
            parent=None if number == 0 else number - 1,
            operation=version_pb2.OPERATION_TRAINING if number else version_pb2.OPERATION_CREATION,
            weight_version=f"1:{number}",
            job_id=request.job_id,
            family=request.family,
            model_digest=request.model_digest,
            checkpoint_digest=request.checkpoint_digest,
            consumed_sample_ids=request.consumed_sample_ids,
            metrics=dict(request.metrics),
            family_state=request.family_state,
            revision=number + 1,
        )
        self.versions.append(version)
        return version

    def _place(self, location: Path, files: list[artifact_pb2.ManifestFile]) -> str:
        lines = "".join(f"{file.sha256} {file.size} {file.path}\n" for file in files)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        target = self.store / "artifacts" / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(location)
        else:
            location.rename(target)
        total = sum(file.size for file in files)
        self.sealed[digest] = artifact_pb2.Artifact(digest=digest, location=str(target), files=files, total_size=total)
        return digest

    def _refuse(self, method: str) -> None:
        pending = self.refusals.get(method)
        if pending:
            raise pending.pop(0)

    def _run_hook(self, method: str) -> None:
        hook = self.after.pop(method, None)
        if hook is not None:
            hook()


def _file(root: Path, path: Path) -> artifact_pb2.ManifestFile:
    data = path.read_bytes()
    return artifact_pb2.ManifestFile(
        path=path.relative_to(root).as_posix(), size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
