"""Artifacts that a transaction is about to refer to: there, of the right kind, and not removed meanwhile."""

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput, NotFound
from atoll.registry import tables
from atoll.registry.types import Kind

_ARTIFACTS = tables.artifacts


def check_artifacts(
    connection: sa.Connection, model_digest: str, checkpoint_digest: str | None, prefix: str = ""
) -> None:
    """Raises unless the artifacts are sealed, there, and of the right kind; locks them, so that retention cannot remove
    them before the caller's transaction is visible to it. prefix: of the field names, e.g. "record.staged.".

    Raises InvalidInput and NotFound(ARTIFACT_NOT_FOUND).
    """
    wanted = {f"{prefix}model_digest": (model_digest, Kind.MODEL)}
    if checkpoint_digest is not None:
        wanted[f"{prefix}checkpoint_digest"] = (checkpoint_digest, Kind.CHECKPOINT)
    digests = sorted({digest for digest, _ in wanted.values()})
    query = sa.select(_ARTIFACTS).where(_ARTIFACTS.c.digest.in_(digests))
    rows = {row.digest: row for row in connection.execute(query.order_by(_ARTIFACTS.c.digest).with_for_update())}
    for field, (digest, kind) in wanted.items():
        row = rows.get(digest)
        if row is None:
            raise artifact_not_found(digest, "it was never sealed", field)
        if row.removed_at is not None:
            raise artifact_not_found(digest, f"retention removed it at {row.removed_at.isoformat()}", field)
        if row.kind != kind:
            raise InvalidInput(f"{field} is {digest}, a {row.kind} artifact, expected a {kind}", field=field)


def is_there(connection: sa.Connection, digest: str) -> bool:
    """Whether the artifact's bytes are there."""
    query = sa.select(_ARTIFACTS.c.removed_at).where(_ARTIFACTS.c.digest == digest)
    row = connection.execute(query).one_or_none()
    return row is not None and row.removed_at is None


def artifact_not_found(digest: str, why: str, field: str) -> NotFound:
    return NotFound(
        f"no artifact {digest}: {why}; stage and seal its files (again)",
        reason=errors_pb2.REASON_ARTIFACT_NOT_FOUND,
        field=field,
    )
