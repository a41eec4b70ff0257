"""The commit's side of a job record: checked and ended in the transaction that appends the version."""

from dataclasses import replace

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict
from atoll.registry.job_rows import find_record, insert_record, next_position, update_record
from atoll.registry.job_types import JobBody, JobPhase, JobProgress, JobRecord, RollbackBody, TrainingBody
from atoll.registry.types import Operation, Version, VersionContent


def committable_record(connection: sa.Connection, content: VersionContent) -> JobRecord | None:
    """The record of the job that wants to commit, None when nobody wrote one.

    Raises Conflict(JOB_ID_REUSED) when the job has ended without a version, or was recorded to do something else.
    """
    known = find_record(connection, content.scenario, content.job_id or "")
    if known is None:
        return None
    if not known.progress.phase.is_open:
        raise _reused(known, f"has ended as {known.progress.phase} ({known.progress.message}) and never runs again")
    body = known.body
    if isinstance(body, RollbackBody):
        if (content.operation, content.restores) != (Operation.ROLLBACK, body.version):
            raise _reused(known, f"was recorded as a rollback to version {body.version}")
    elif content.operation is not Operation.TRAINING:
        raise _reused(known, f"was recorded as training, not as a {content.operation}")
    elif content.family != body.family or set(content.consumed_sample_ids) != set(body.sample_ids):
        raise _reused(known, "was recorded with another family or other samples")
    return known


def end_record(connection: sa.Connection, known: JobRecord | None, version: Version) -> None:
    """Marks the job committed; one without a record gets it, so that every committed job has one."""
    content, now = version.content, version.created_at
    progress = JobProgress(JobPhase.COMMITTED, attempt=1 if known is None else known.progress.attempt)
    if known is not None:
        ended = replace(
            known, progress=progress, version=version.number, fencing_token=version.fencing_token, updated_at=now
        )
        update_record(connection, ended)
        return
    body: JobBody
    if content.restores is not None:
        body = RollbackBody(content.restores)
    else:
        body = TrainingBody(content.family, None, content.consumed_sample_ids)
    position = next_position(connection, content.scenario)
    record = JobRecord(
        scenario=content.scenario,
        job_id=content.job_id or "",
        body=body,
        progress=progress,
        position=position,
        version=version.number,
        fencing_token=version.fencing_token,
        created_at=now,
        updated_at=now,
    )
    insert_record(connection, record)


def _reused(known: JobRecord, why: str) -> Conflict:
    return Conflict(
        f"job {known.job_id} {why}: GetJobRecord tells more",
        reason=errors_pb2.REASON_JOB_ID_REUSED,
        field="job_id",
    )
