"""What tests say to a registry over the wire."""

from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest
from atoll.api.registry.v1 import artifact_pb2, artifact_service_pb2, version_pb2, version_service_pb2
from atoll.common.errors import AtollError
from atoll.common.rpc_errors import from_rpc_error

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO, manifest_of

MODEL, CHECKPOINT = artifact_pb2.ARTIFACT_KIND_MODEL, artifact_pb2.ARTIFACT_KIND_CHECKPOINT


async def refusal(call: Awaitable[object]) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def seal_files(
    client: Client, staging_id: str, contents: dict[str, bytes], kind: int = MODEL
) -> artifact_pb2.Artifact:
    """What a trainer does: stage, write into the shared directory, seal."""
    staged = await client.artifacts.StageArtifact(
        artifact_service_pb2.StageArtifactRequest(request_id=staging_id, kind=kind)  # type: ignore[arg-type]
    )
    for name, data in contents.items():
        path = Path(staged.location, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    request = artifact_service_pb2.SealArtifactRequest(staging_id=staged.staging_id, files=files_of(contents))
    return (await client.artifacts.SealArtifact(request)).artifact


def files_of(contents: dict[str, bytes]) -> list[artifact_pb2.ManifestFile]:
    return [artifact_pb2.ManifestFile(path=f.path, size=f.size, sha256=f.sha256) for f in manifest_of(contents)]


def commit_request(parent: int, model: str, checkpoint: str = "") -> version_service_pb2.CommitVersionRequest:
    request = version_service_pb2.CommitVersionRequest(
        scenario=SCENARIO,
        job_id=f"job-{parent + 1}",
        expected_parent=parent,
        operation=version_pb2.OPERATION_TRAINING,
        family="grpo",
        model_digest=model,
        checkpoint_digest=checkpoint,
        consumed_sample_ids=[f"s-{parent}"],
        metrics={"train/loss": 0.5},
    )
    request.family_state.update({"steps": parent, "deep": {"list": [1.5, None, True, "x"]}})
    return request
