"""gRPC: ArtifactService."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path

from atoll.api.registry.v1 import artifact_pb2
from atoll.api.registry.v1 import artifact_service_pb2 as pb
from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceServicer
from atoll.common.errors import InvalidInput
from atoll.common.names import check_id
from atoll.common.pages import decode_page_token, encode_page_token, page_size
from atoll.common.server import Context
from atoll.common.tensors import CHUNK_BYTES
from atoll.registry.artifacts import Artifacts
from atoll.registry.messages import KIND_FROM_PROTO, artifact_message, manifest_files
from atoll.registry.pins import Pins
from atoll.registry.sweep import Sweeper
from atoll.registry.types import Artifact, Kind


class ArtifactRpc(ArtifactServiceServicer):
    """Translates; `Artifacts`, `Sweeper` and `Pins` decide.

    store_threads: where bytes are hashed and synced. Not the threads of the database calls: a seal of many gigabytes
    must not hold up a commit.
    """

    def __init__(self, artifacts: Artifacts, sweeper: Sweeper, pins: Pins, store_threads: Executor) -> None:
        self._artifacts = artifacts
        self._sweeper = sweeper
        self._pins = pins
        self._threads = store_threads

    async def StageArtifact(self, request: pb.StageArtifactRequest, context: Context) -> pb.StageArtifactResponse:
        staging_id = check_id(request.request_id, "request_id")
        kind = KIND_FROM_PROTO.get(request.kind)
        if kind is None:
            raise InvalidInput(
                f"kind is {request.kind}, expected ARTIFACT_KIND_MODEL or ARTIFACT_KIND_CHECKPOINT", field="kind"
            )
        loop = asyncio.get_running_loop()
        location = await loop.run_in_executor(self._threads, self._stage, staging_id, kind)
        return pb.StageArtifactResponse(staging_id=staging_id, location=str(location))

    async def SealArtifact(self, request: pb.SealArtifactRequest, context: Context) -> pb.SealArtifactResponse:
        staging_id = check_id(request.staging_id, "staging_id")
        files = manifest_files(request.files)
        loop = asyncio.get_running_loop()
        artifact = await loop.run_in_executor(self._threads, self._artifacts.seal, staging_id, files)
        return pb.SealArtifactResponse(artifact=self._message(artifact))

    async def AbandonArtifact(self, request: pb.AbandonArtifactRequest, context: Context) -> pb.AbandonArtifactResponse:
        staging_id = check_id(request.staging_id, "staging_id")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._artifacts.store.abandon, staging_id)
        return pb.AbandonArtifactResponse()

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: Context) -> pb.GetArtifactResponse:
        artifact = await asyncio.to_thread(self._artifacts.get, request.digest)
        return pb.GetArtifactResponse(artifact=self._message(artifact))

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Context) -> pb.ListArtifactsResponse:
        kind = KIND_FROM_PROTO.get(request.kind)
        if kind is None and request.kind != artifact_pb2.ARTIFACT_KIND_UNSPECIFIED:
            raise InvalidInput(f"kind is {request.kind}, expected an ArtifactKind", field="kind")
        after = decode_page_token(request.page_token)
        page = await asyncio.to_thread(self._artifacts.list_page, kind, page_size(request.page_size), after)
        return pb.ListArtifactsResponse(
            artifacts=[self._message(artifact) for artifact in page.artifacts],
            next_page_token="" if page.next_key is None else encode_page_token(page.next_key),
        )

    async def PinVersion(self, request: pb.PinVersionRequest, context: Context) -> pb.PinVersionResponse:
        await asyncio.to_thread(self._pins.set, request.scenario, request.number, pinned=request.pinned)
        return pb.PinVersionResponse()

    async def PlanRetention(self, request: pb.PlanRetentionRequest, context: Context) -> pb.PlanRetentionResponse:
        planned = await asyncio.to_thread(self._sweeper.plan)
        disk = self._sweeper.disk()
        return pb.PlanRetentionResponse(
            decisions=[
                pb.RetentionDecision(
                    digest=decision.artifact.digest,
                    total_size=decision.artifact.total_size,
                    remove=decision.remove,
                    why=decision.why,
                )
                for decision in planned.decisions
            ],
            used_bytes=disk.capacity - disk.free,
            capacity_bytes=disk.capacity,
        )

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.ReadFileResponse]:
        stream = await asyncio.to_thread(self._artifacts.open_file, request.digest, request.path, request.offset)
        with stream:
            while chunk := await asyncio.to_thread(stream.read, CHUNK_BYTES):
                yield pb.ReadFileResponse(chunk=chunk)

    def _stage(self, staging_id: str, kind: Kind) -> Path:
        self._sweeper.ensure_room(staging_id)
        return self._artifacts.store.stage(staging_id, kind)

    def _message(self, artifact: Artifact) -> artifact_pb2.Artifact:
        return artifact_message(artifact, str(self._artifacts.store.files_of(artifact.digest)))
