"""From weights in memory to two sealed artifacts: the model export and the checkpoint."""

import asyncio
import errno
import hashlib
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc
import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import artifact_pb2, artifact_service_pb2, artifact_service_pb2_grpc
from atoll.common.errors import AtollError
from atoll.common.failpoints import reached
from atoll.trainer.backend import BackendCrashed, TrainingBackend
from atoll.trainer.calls import answer_of
from atoll.trainer.chain import CALL_SECONDS, ChainVersion
from atoll.trainer.phases import PhaseClock
from atoll.trainer.retries import Patience

SEAL_SECONDS = 900.0
"""Deadline of a seal, which reads and syncs every byte."""

FIRST_VERSION_FACTOR = 5
"""Size of a first version in models: the export, and a checkpoint of weights, two moments and a master copy."""

HASH_THREADS = 4
READ_BYTES = 4 << 20

RESTAGE = frozenset(
    {
        errors_pb2.REASON_STAGING_NOT_FOUND,
        errors_pb2.REASON_ARTIFACT_MISMATCH,
        errors_pb2.REASON_ARTIFACT_NOT_FOUND,
        # The registry reads and syncs every byte, and its disk may fail for a while.
        errors_pb2.REASON_INTERNAL,
    }
)
"""Refusals after which the artifacts are written again."""

log = structlog.get_logger(__name__)

T = TypeVar("T")
Kind: TypeAlias = artifact_pb2.ArtifactKind.ValueType


class StorageFull(AtollError):
    """Raised when the store has no room for a version; the weights in memory are untouched."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=errors_pb2.REASON_STORAGE_FULL)


@dataclass(frozen=True)
class StagedArtifacts:
    """Digests of the sealed artifacts of one version."""

    model_digest: str
    checkpoint_digest: str
    """Empty for a live version."""


@dataclass(frozen=True)
class _Area:
    staging_id: str
    location: Path


class Stager:
    """Writes versions into the registry's store, which it shares a directory with."""

    def __init__(self, channel: grpc.aio.Channel, scenario: str, backend: TrainingBackend, patience: Patience) -> None:
        self._scenario = scenario
        self._artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(channel)
        self._backend = backend
        self._patience = patience

    async def refuse_without_room(self, parent: ChainVersion, *, durable: bool) -> None:
        """Raises StorageFull when a version as large as its parent does not fit into the store."""
        try:
            model = await self._find(parent.model_digest)
            checkpoint = await self._find(parent.checkpoint_digest) if parent.checkpoint_digest else None
        except AtollError as error:
            if error.reason != errors_pb2.REASON_ARTIFACT_NOT_FOUND:
                raise
            # The parent's bytes are lost, which is no reason to lose a batch too; a disk that fills up defers it.
            return
        needed = model.total_size
        if durable and checkpoint is not None:
            needed += checkpoint.total_size
        elif durable:
            needed = FIRST_VERSION_FACTOR * model.total_size
        refuse_full(Path(model.location), needed)

    async def stage(
        self,
        job_id: str,
        attempt: int,
        driver_state: bytes,
        clock: PhaseClock,
        *,
        durable: bool,
        unmoved_model: str = "",
    ) -> StagedArtifacts:
        """Stages, writes, hashes and seals the model and, for a durable version, the checkpoint.

        ``unmoved_model`` is the digest of a sealed model that still is the one in memory: it is not written again.
        Repeating it starts over in the same areas; what earlier attempts left half written goes first. Raises
        StorageFull, BackendCrashed.
        """
        for kind in (artifact_pb2.ARTIFACT_KIND_MODEL, artifact_pb2.ARTIFACT_KIND_CHECKPOINT):
            for earlier in range(1, attempt):
                await self._abandon(staging_request_id(self._scenario, job_id, earlier, kind))
        kinds = [] if unmoved_model else [artifact_pb2.ARTIFACT_KIND_MODEL]
        kinds += [artifact_pb2.ARTIFACT_KIND_CHECKPOINT] if durable else []
        areas: dict[Kind, _Area] = {}
        try:
            for kind in kinds:
                areas[kind] = await self._open(job_id, attempt, kind)
            sealed = await self._fill(areas, driver_state, clock)
        except Exception:
            for area in areas.values():
                await self._abandon(area.staging_id)
            raise
        model = sealed.get(artifact_pb2.ARTIFACT_KIND_MODEL, unmoved_model)
        return StagedArtifacts(model, sealed.get(artifact_pb2.ARTIFACT_KIND_CHECKPOINT, ""))

    async def _fill(self, areas: Mapping[Kind, _Area], driver_state: bytes, clock: PhaseClock) -> Mapping[Kind, str]:
        """Digests by kind."""
        with clock.phase("export"):
            if areas:
                await asyncio.to_thread(self._write, areas, driver_state)
        reached("trainer.exported")
        with clock.phase("hash"):
            manifests = {kind: await asyncio.to_thread(self._hash, area) for kind, area in areas.items()}
        with clock.phase("seal"):
            sealed = {kind: (await self._seal(area, manifests[kind])).digest for kind, area in areas.items()}
        reached("trainer.sealed")
        return sealed

    def _write(self, areas: Mapping[Kind, _Area], driver_state: bytes) -> None:
        # The registry hands out empty directories; the backend makes its own.
        places = {kind: area.location for kind, area in areas.items()}
        with _failures_of_the_store("write", next(iter(places.values())).parent):
            for place in places.values():
                place.rmdir()
            self._backend.stage(
                places.get(artifact_pb2.ARTIFACT_KIND_MODEL),
                places.get(artifact_pb2.ARTIFACT_KIND_CHECKPOINT),
                driver_state,
            )

    def _hash(self, area: _Area) -> list[artifact_pb2.ManifestFile]:
        with _failures_of_the_store("read", area.location):
            return manifest_of(area.location)

    async def _open(self, job_id: str, attempt: int, kind: artifact_pb2.ArtifactKind.ValueType) -> _Area:
        request = artifact_service_pb2.StageArtifactRequest(
            request_id=staging_request_id(self._scenario, job_id, attempt, kind), kind=kind
        )
        reply = await self._ask("stage", lambda: self._artifacts.StageArtifact(request, timeout=CALL_SECONDS))
        return _Area(reply.staging_id, Path(reply.location))

    async def _seal(self, area: _Area, files: list[artifact_pb2.ManifestFile]) -> artifact_pb2.Artifact:
        request = artifact_service_pb2.SealArtifactRequest(staging_id=area.staging_id, files=files)
        reply = await self._ask("seal", lambda: self._artifacts.SealArtifact(request, timeout=SEAL_SECONDS))
        return reply.artifact

    async def _abandon(self, staging_id: str) -> None:
        """Gives the room back; what cannot be removed now goes when the registry finds it idle."""
        request = artifact_service_pb2.AbandonArtifactRequest(staging_id=staging_id)
        try:
            await answer_of(self._artifacts.AbandonArtifact(request, timeout=CALL_SECONDS))
        except AtollError as error:
            log.warning("staging area stays", staging_id=staging_id, error=error.message)

    async def _find(self, digest: str) -> artifact_pb2.Artifact:
        request = artifact_service_pb2.GetArtifactRequest(digest=digest)
        return (
            await self._ask("artifact", lambda: self._artifacts.GetArtifact(request, timeout=CALL_SECONDS))
        ).artifact

    async def _ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        return await self._patience.ask(what, lambda: answer_of(call()))


@contextmanager
def _failures_of_the_store(doing: str, place: Path) -> Iterator[None]:
    """Raises StorageFull, BackendCrashed for what the operating system says."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room left to {doing} the version in {place}") from error
        # A store that fails for a while is no defect: the attempt is lost as in a crash, and counted like one.
        raise BackendCrashed(0, f"could not {doing} the version in {place}: {error}", "") from error


def staging_request_id(scenario: str, job_id: str, attempt: int, kind: artifact_pb2.ArtifactKind.ValueType) -> str:
    """Names the staging area of one artifact of one attempt: a restarted trainer finds and empties the same one.

    The scenario is part of it: two scenarios of one registry may have jobs of the same id.
    """
    text = f"{scenario}/{job_id}/{attempt}/{artifact_pb2.ArtifactKind.Name(kind)}"
    return f"stage-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def refuse_full(directory: Path, needed: int) -> None:
    """Raises StorageFull when the filesystem has less room than is needed."""
    # An artifact's directory may have been removed by hand, which says nothing about room.
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise StorageFull(
            f"the store has {free} bytes free and a version takes about {needed}; free some room, the job goes on by "
            "itself"
        )


def manifest_of(directory: Path) -> list[artifact_pb2.ManifestFile]:
    """Path, size and SHA-256 of every file, sorted by path; files are hashed in parallel threads."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(lambda path: _manifest_file(directory, path), paths))


def _manifest_file(root: Path, path: Path) -> artifact_pb2.ManifestFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return artifact_pb2.ManifestFile(path=path.relative_to(root).as_posix(), size=size, sha256=digest.hexdigest())
