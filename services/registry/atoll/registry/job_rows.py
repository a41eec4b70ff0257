"""Job records as rows, both ways."""

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.registry import tables
from atoll.registry.job_types import (
    JobBody,
    JobPhase,
    JobProgress,
    JobRecord,
    RollbackBody,
    StagedVersion,
    TrainingBody,
)

_JOBS = tables.jobs
Values = dict[str, object]


def insert_record(connection: sa.Connection, record: JobRecord) -> None:
    """Appends a record."""
    body = record.body
    training: Values = {}
    if isinstance(body, TrainingBody):
        options = None if body.options is None else dict(body.options)
        training = {"family": body.family, "options": options, "sample_ids": list(body.sample_ids)}
    connection.execute(
        _JOBS.insert().values(
            scenario_id=record.scenario,
            job_id=record.job_id,
            position=record.position,
            rollback_to=body.version if isinstance(body, RollbackBody) else None,
            created_at=record.created_at,
            **training,
            **_changing(record),
        )
    )


def update_record(connection: sa.Connection, record: JobRecord) -> None:
    """Writes what may change of a record: everything but its body, its position and when it was made."""
    mine = (_JOBS.c.scenario_id == record.scenario) & (_JOBS.c.job_id == record.job_id)
    connection.execute(_JOBS.update().where(mine).values(**_changing(record)))


def find_record(connection: sa.Connection, scenario: str, job_id: str) -> JobRecord | None:
    query = sa.select(_JOBS).where(_JOBS.c.scenario_id == scenario, _JOBS.c.job_id == job_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else record_of(row)


def next_position(connection: sa.Connection, scenario: str) -> int:
    """Call it under the scenario's lock."""
    query = sa.select(sa.func.max(_JOBS.c.position)).where(_JOBS.c.scenario_id == scenario)
    newest: int | None = connection.execute(query).scalar_one()
    return 1 if newest is None else newest + 1


def record_of(row: sa.Row[tuple[object, ...]]) -> JobRecord:
    values = row._mapping
    body: JobBody
    if values["rollback_to"] is not None:
        body = RollbackBody(values["rollback_to"])
    else:
        body = TrainingBody(values["family"], values["options"], tuple(values["sample_ids"]))
    staged = None
    if values["staged_model"] is not None:
        staged = StagedVersion(
            parent=values["staged_parent"],
            model_digest=values["staged_model"],
            checkpoint_digest=values["staged_checkpoint"],
            metrics={name: float(value) for name, value in values["staged_metrics"].items()},
            family_state=values["staged_family_state"],
        )
    reason = errors_pb2.REASON_UNSPECIFIED if values["reason"] is None else Reason.Value(values["reason"])
    progress = JobProgress(
        phase=JobPhase(values["phase"]),
        attempt=values["attempt"],
        staged=staged,
        reason=reason,
        message=values["message"],
        rejected_sample_ids=tuple(values["rejected_sample_ids"]),
    )
    return JobRecord(
        scenario=values["scenario_id"],
        job_id=values["job_id"],
        body=body,
        progress=progress,
        position=values["position"],
        version=values["version"],
        fencing_token=values["fencing_token"],
        created_at=values["created_at"],
        updated_at=values["updated_at"],
    )


def _changing(record: JobRecord) -> Values:
    progress, staged = record.progress, record.progress.staged
    has_reason = progress.reason != errors_pb2.REASON_UNSPECIFIED
    return {
        "phase": progress.phase,
        "attempt": progress.attempt,
        "staged_parent": None if staged is None else staged.parent,
        "staged_model": None if staged is None else staged.model_digest,
        "staged_checkpoint": None if staged is None else staged.checkpoint_digest,
        "staged_metrics": None if staged is None else dict(staged.metrics),
        "staged_family_state": None if staged is None else dict(staged.family_state),
        "reason": Reason.Name(progress.reason) if has_reason else None,
        "message": progress.message,
        "rejected_sample_ids": list(progress.rejected_sample_ids),
        "version": record.version,
        "fencing_token": record.fencing_token,
        "updated_at": record.updated_at,
    }
