"""The registry's types as protobuf messages."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from atoll.api.registry.v1 import artifact_pb2, scenario_pb2, version_pb2
from atoll.common.names import artifact_name, scenario_name, version_name
from atoll.common.structs import struct_from, timestamp_from
from atoll.registry.types import Artifact, Kind, ManifestFile, Operation, Scenario, Version
from google.protobuf.message import Message

KIND_TO_PROTO: dict[Kind, artifact_pb2.ArtifactKind.ValueType] = {
    Kind.MODEL: artifact_pb2.ARTIFACT_KIND_MODEL,
    Kind.CHECKPOINT: artifact_pb2.ARTIFACT_KIND_CHECKPOINT,
}
KIND_FROM_PROTO = {value: kind for kind, value in KIND_TO_PROTO.items()}

OPERATION_TO_PROTO: dict[Operation, version_pb2.Operation.ValueType] = {
    Operation.CREATION: version_pb2.OPERATION_CREATION,
    Operation.TRAINING: version_pb2.OPERATION_TRAINING,
    Operation.ROLLBACK: version_pb2.OPERATION_ROLLBACK,
    Operation.RECOVERY: version_pb2.OPERATION_RECOVERY,
}
OPERATION_FROM_PROTO = {value: operation for operation, value in OPERATION_TO_PROTO.items()}

PAGE_BYTES = 3 << 20
"""A page stays below the 4 MiB that a gRPC client accepts by default."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def scenario_message(scenario: Scenario) -> scenario_pb2.Scenario:
    definition = scenario.definition
    return scenario_pb2.Scenario(
        name=scenario_name(definition.scenario_id),
        scenario_id=definition.scenario_id,
        family=definition.family,
        options=struct_from(definition.options),
        base_model=definition.base_model,
        max_staleness=definition.max_staleness,
        head=scenario.head,
        create_time=timestamp_from(scenario.created_at),
    )


def version_message(version: Version) -> version_pb2.Version:
    content = version.content
    return version_pb2.Version(
        name=version_name(content.scenario, version.number),
        scenario=content.scenario,
        number=version.number,
        parent=content.parent,
        operation=OPERATION_TO_PROTO[content.operation],
        weight_version=str(version.weight_version),
        job_id=content.job_id or "",
        family=content.family,
        model_digest=content.model_digest,
        checkpoint_digest=content.checkpoint_digest or "",
        consumed_sample_ids=content.consumed_sample_ids,
        metrics=content.metrics,
        family_state=struct_from(content.family_state),
        create_time=timestamp_from(version.created_at),
        revision=version.revision,
        restores=content.restores,
        durable=content.is_durable,
        fencing_token=version.fencing_token,
    )


def artifact_message(artifact: Artifact, location: str) -> artifact_pb2.Artifact:
    return artifact_pb2.Artifact(
        name=artifact_name(artifact.digest),
        digest=artifact.digest,
        kind=KIND_TO_PROTO[artifact.kind],
        location=location,
        files=[artifact_pb2.ManifestFile(path=f.path, size=f.size, sha256=f.sha256) for f in artifact.files],
        total_size=artifact.total_size,
        create_time=timestamp_from(artifact.sealed_at),
        removed=artifact.removed_at is not None,
    )


def manifest_files(files: Sequence[artifact_pb2.ManifestFile]) -> tuple[ManifestFile, ...]:
    return tuple(ManifestFile(file.path, file.size, file.sha256) for file in files)


def fit_page(items: Sequence[T], to_message: Callable[[T], M]) -> list[M]:
    """The messages of the first items that fit one answer; at least one when there is any."""
    messages: list[M] = []
    size = 0
    for item in items:
        message = to_message(item)
        size += message.ByteSize()
        if messages and size > PAGE_BYTES:
            break
        messages.append(message)
    return messages
