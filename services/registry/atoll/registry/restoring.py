"""What a rollback or a recovery may bring back."""

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput, NotFound
from atoll.registry import tables
from atoll.registry.artifact_rows import check_artifacts, is_there
from atoll.registry.scenario_lock import Position
from atoll.registry.types import Operation, Version, VersionContent
from atoll.registry.version_rows import select_versions

_VERSIONS = tables.versions


def restorable(connection: sa.Connection, scenario: str, number: int, head: int, field: str) -> Version:
    """The version, durable and with all its bytes, which are locked against retention.

    Raises NotFound(VERSION_NOT_FOUND) and Conflict(NOT_RESTORABLE).
    """
    target = durable_version(connection, scenario, number, head, field)
    try:
        check_artifacts(connection, target.content.model_digest, target.content.checkpoint_digest)
    except NotFound as error:
        raise not_restorable(scenario, number, error.message, field) from None
    return target


def durable_version(connection: sa.Connection, scenario: str, number: int, head: int, field: str) -> Version:
    """The version, whatever became of its bytes. Raises NotFound(VERSION_NOT_FOUND) and Conflict(NOT_RESTORABLE)."""
    found = select_versions(connection, scenario, _VERSIONS.c.number == number)
    if not found:
        raise NotFound(
            f"scenario {scenario}: there is no version {number} to restore; the head is version {head}",
            reason=errors_pb2.REASON_VERSION_NOT_FOUND,
            field=field,
        )
    if not found[0].content.is_durable:
        raise not_restorable(scenario, number, "it is a live version, without a checkpoint", field)
    return found[0]


def check_restoring(connection: sa.Connection, content: VersionContent, position: Position) -> None:
    """Checks that a rollback or a recovery commits the bytes that it says it restores. Locks them.

    A rollback's digests are its target's. A recovery's checkpoint is its target's; its model is the head's when that is
    there, else the target's. Raises InvalidInput, NotFound(VERSION_NOT_FOUND), Conflict(NOT_RESTORABLE).
    """
    if content.restores is None:
        return
    number = content.restores
    target = durable_version(connection, content.scenario, number, position.head, "restores").content
    model = target.model_digest
    if content.operation is Operation.RECOVERY:
        (head,) = select_versions(connection, content.scenario, _VERSIONS.c.number == position.head)
        if is_there(connection, head.content.model_digest):
            model = head.content.model_digest
    for field, given, expected in (
        ("model_digest", content.model_digest, model),
        ("checkpoint_digest", content.checkpoint_digest or "", target.checkpoint_digest or ""),
    ):
        if given != expected:
            raise InvalidInput(
                f"{field} is {given!r}, expected {expected!r}: that is what a {content.operation} of version {number} "
                f"restores now",
                field=field,
            )
    try:
        check_artifacts(connection, content.model_digest, content.checkpoint_digest)
    except NotFound as error:
        raise not_restorable(content.scenario, number, error.message, "restores") from None


def not_restorable(scenario: str, number: int, why: str, field: str) -> Conflict:
    # What a missing artifact advises, to make it, is for those who write one.
    fact = why.partition(";")[0]
    return Conflict(
        f"version {number} of scenario {scenario} cannot be restored: {fact}; choose version 0 or one whose checkpoint "
        "is kept: ATOLL_REGISTRY_KEEP_CHECKPOINTS says how many are, PlanRetention which",
        reason=errors_pb2.REASON_NOT_RESTORABLE,
        field=field,
    )
