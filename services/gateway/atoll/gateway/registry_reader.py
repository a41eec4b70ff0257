"""What the HTTP side reads in the registry: the model's tokenizer files, and the chain."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from atoll.api.registry.v1 import artifact_service_pb2 as artifacts
from atoll.api.registry.v1 import artifact_service_pb2_grpc, version_pb2, version_service_pb2_grpc
from atoll.api.registry.v1 import version_service_pb2 as versions
from atoll.common import pages, rpc_errors
from atoll.common.errors import InternalError
from atoll.common.renderer import TOKENIZER_FILES

CALL_SECONDS = 10.0
FILE_SECONDS = 60.0


@dataclass(frozen=True)
class ChainEntry:
    """A version as /atoll/scenarios/{s}/versions shows it.

    Example: ChainEntry(3, 2, "training", "1:3", "job-1a...", "grpo", "9f2c...", {"train/loss": 0.1}, created_at)
    """

    number: int
    parent: int | None
    operation: str
    weight_version: str
    job_id: str
    family: str
    model_digest: str
    metrics: Mapping[str, float]
    created_at: datetime


class RegistryReader:
    """Calls of one registry. Every method raises NotFound(SCENARIO_NOT_FOUND, VERSION_NOT_FOUND) or Unavailable."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._versions = version_service_pb2_grpc.VersionServiceStub(channel)
        self._artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(channel)

    async def version(self, scenario: str, number: int) -> ChainEntry:
        """One entry of the chain."""
        request = versions.GetVersionRequest(scenario=scenario, number=number)
        try:
            answer = await self._versions.GetVersion(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error) from None
        return _entry(answer.version)

    async def versions(self, scenario: str, page_size: int, page_token: str) -> tuple[list[ChainEntry], str]:
        """A page of the chain, newest first, and the token of the next page.

        Raises InvalidInput for a size or token that is not allowed.
        """
        # Bounded here too: a query parameter may be too large for the message.
        size = pages.page_size(page_size)
        request = versions.ListVersionsRequest(scenario=scenario, page_size=size, page_token=page_token)
        try:
            answer = await self._versions.ListVersions(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error) from None
        return [_entry(version) for version in answer.versions], answer.next_page_token

    async def tokenizer_files(self, scenario: str) -> dict[str, bytes]:
        """Content by name of TOKENIZER_FILES, as version 0 has them: a chain never changes its tokenizer.

        Raises InternalError when a file does not have the digest that its manifest tells.
        """
        digest = (await self.version(scenario, 0)).model_digest
        try:
            answer = await self._artifacts.GetArtifact(
                artifacts.GetArtifactRequest(digest=digest), timeout=CALL_SECONDS
            )
            present = {file.path: file.sha256 for file in answer.artifact.files if file.path in TOKENIZER_FILES}
            return {path: await self._file(digest, path, sha256) for path, sha256 in present.items()}
        except grpc.RpcError as error:
            raise rpc_errors.from_rpc_error(error) from None

    async def _file(self, digest: str, path: str, sha256: str) -> bytes:
        request = artifacts.ReadFileRequest(digest=digest, path=path)
        content = bytearray()
        async for piece in self._artifacts.ReadFile(request, timeout=FILE_SECONDS):
            content += piece.chunk
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise InternalError(f"{path} of artifact {digest} has sha256 {found}, its manifest says {sha256}")
        return bytes(content)


def _entry(version: version_pb2.Version) -> ChainEntry:
    return ChainEntry(
        number=version.number,
        parent=version.parent if version.HasField("parent") else None,
        operation=version_pb2.Operation.Name(version.operation).removeprefix("OPERATION_").lower(),
        weight_version=version.weight_version,
        job_id=version.job_id,
        family=version.family,
        model_digest=version.model_digest,
        metrics=dict(version.metrics),
        created_at=version.create_time.ToDatetime(tzinfo=UTC),
    )
