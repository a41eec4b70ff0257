"""Job records: what any trainer goes on from.

    RECORDED <--> RUNNING --> STAGED --CommitVersion--> COMMITTED
        \\___________\\___________\\--> DROPPED, REFUSED, FAILED, CANCELLED

Open phases follow each other in any order: a staged version whose parent is not the head any more runs again.
"""

from dataclasses import replace

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput, NotFound
from atoll.common.failpoints import reached
from atoll.common.names import check_id
from atoll.registry import tables
from atoll.registry.artifact_rows import check_artifacts
from atoll.registry.content_checks import check_metrics, check_sample_ids
from atoll.registry.database import Database
from atoll.registry.family_name import check_family
from atoll.registry.job_rows import find_record, insert_record, next_position, record_of, update_record
from atoll.registry.job_types import (
    OPEN_PHASES,
    JobBody,
    JobPhase,
    JobProgress,
    JobRecord,
    RollbackBody,
    StagedVersion,
    TrainingBody,
)
from atoll.registry.leases import check_fencing_token
from atoll.registry.manifest import check_digest
from atoll.registry.restoring import restorable
from atoll.registry.scenario_lock import find_scenario, lock_scenario
from atoll.registry.types import utc_now

_JOBS = tables.jobs
MAX_MESSAGE = 10_000


class JobRecords:
    """Writes and finds job records."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, scenario: str, job_id: str, body: JobBody, progress: JobProgress, fencing_token: int) -> JobRecord:
        """Writes a record and returns it as it stands; one that has ended stays as it is.

        Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND, VERSION_NOT_FOUND, ARTIFACT_NOT_FOUND), Conflict(FENCED,
        JOB_ID_REUSED, NOT_RESTORABLE), AtollError(STORAGE_FULL) and Unavailable.
        """
        check_id(scenario, "record.scenario")
        check_id(job_id, "record.job_id")
        _check_body(body)
        _check_progress(progress)
        with self._database.write() as connection:
            head = lock_scenario(connection, scenario).head
            check_fencing_token(connection, scenario, fencing_token)
            known = find_record(connection, scenario, job_id)
            if known is not None:
                _check_same_body(known, body)
                same = (known.progress, known.fencing_token) == (progress, fencing_token)
                if same or not known.progress.phase.is_open:
                    return known
                _check_attempt(known.progress, progress)
            elif isinstance(body, RollbackBody) and progress.phase.is_open:
                restorable(connection, scenario, body.version, head, "record.body.rollback.version")
            if progress.staged is not None:
                _check_staged(connection, progress.staged, head)
            now = utc_now()
            if known is None:
                position = next_position(connection, scenario)
                record = JobRecord(scenario, job_id, body, progress, position, None, fencing_token, now, now)
                insert_record(connection, record)
            else:
                record = replace(known, progress=progress, fencing_token=fencing_token, updated_at=now)
                update_record(connection, record)
        reached(f"registry.recorded_{progress.phase.value}")
        return record

    def get(self, scenario: str, job_id: str) -> JobRecord:
        """Raises NotFound(SCENARIO_NOT_FOUND, JOB_NOT_FOUND)."""
        with self._database.read() as connection:
            find_scenario(connection, scenario)
            record = find_record(connection, scenario, job_id)
        if record is None:
            raise NotFound(
                f"scenario {scenario} has no record of a job {job_id[:80]!r}",
                reason=errors_pb2.REASON_JOB_NOT_FOUND,
                field="job_id",
            )
        return record

    def list_page(self, scenario: str, *, open_only: bool, limit: int, after: int | None) -> tuple[JobRecord, ...]:
        """At most `limit` records: newest first, or the open ones in the order of running. after: the position of the
        last one seen. Raises NotFound(SCENARIO_NOT_FOUND)."""
        query = sa.select(_JOBS).where(_JOBS.c.scenario_id == scenario).limit(limit)
        if open_only:
            query = query.where(_JOBS.c.phase.in_(OPEN_PHASES)).order_by(_JOBS.c.position)
        else:
            query = query.order_by(_JOBS.c.position.desc())
        if after is not None:
            query = query.where(_JOBS.c.position > after if open_only else _JOBS.c.position < after)
        with self._database.read() as connection:
            find_scenario(connection, scenario)
            return tuple(record_of(row) for row in connection.execute(query))


def _check_body(body: JobBody) -> None:
    if isinstance(body, RollbackBody):
        if body.version < 0:
            field = "record.body.rollback.version"
            raise InvalidInput(f"{field} is {body.version}, expected 0 or more", field=field)
        return
    check_family(body.family)
    check_sample_ids(body.sample_ids, "record.body.training.sample_ids")


def _check_progress(progress: JobProgress) -> None:
    phase = progress.phase
    if phase is JobPhase.COMMITTED:
        raise InvalidInput("record.phase is committed, which only CommitVersion sets", field="record.phase")
    least = 1 if phase is JobPhase.RUNNING else 0
    if progress.attempt < least:
        raise InvalidInput(
            f"record.attempt is {progress.attempt} in the phase {phase}, expected {least} or more: it counts how often "
            "the steps were begun",
            field="record.attempt",
        )
    if not phase.is_open and progress.reason == errors_pb2.REASON_UNSPECIFIED:
        raise InvalidInput(f"record.reason is unset, expected why the job is {phase}", field="record.reason")
    if (progress.staged is not None) != (phase is JobPhase.STAGED):
        state = "unset" if progress.staged is None else "set"
        raise InvalidInput(
            f"record.staged is {state} in the phase {phase}; it belongs to the phase staged and to no other",
            field="record.staged",
        )
    if len(progress.message) > MAX_MESSAGE or "\0" in progress.message:
        raise InvalidInput(
            f"record.message has {len(progress.message)} characters, expected at most {MAX_MESSAGE}, none of them NUL",
            field="record.message",
        )
    check_sample_ids(progress.rejected_sample_ids, "record.rejected_sample_ids")
    staged = progress.staged
    if staged is not None:
        check_digest(staged.model_digest, "record.staged.model_digest")
        if staged.checkpoint_digest is not None:
            check_digest(staged.checkpoint_digest, "record.staged.checkpoint_digest")
        check_metrics(staged.metrics, "record.staged.metrics")


def _check_same_body(known: JobRecord, body: JobBody) -> None:
    first = known.body
    if isinstance(first, TrainingBody) and isinstance(body, TrainingBody):
        if first.options is None:  # the commit that made the record did not tell
            first = replace(first, options=body.options)
        pairs = {
            "family": (first.family, body.family),
            "options": (first.options, body.options),
            "sample_ids": (first.sample_ids, body.sample_ids),
        }
        differing = [name for name, (one, other) in pairs.items() if one != other]
    else:
        differing = [] if first == body else ["body"]
    if differing:
        raise Conflict(
            f"job {known.job_id} was recorded with another {', '.join(differing)}; a job's body never changes: take "
            "another id",
            reason=errors_pb2.REASON_JOB_ID_REUSED,
            field="record.body",
        )


def _check_attempt(before: JobProgress, after: JobProgress) -> None:
    stopped = before.phase is JobPhase.RUNNING and after.phase is JobPhase.RECORDED
    least = before.attempt - 1 if stopped else before.attempt
    if after.attempt < least:
        raise InvalidInput(
            f"record.attempt is {after.attempt}, the record says {before.attempt}; it falls only when a trainer that "
            "stops in good order takes back the attempt that runs, from running to recorded",
            field="record.attempt",
        )


def _check_staged(connection: sa.Connection, staged: StagedVersion, head: int) -> None:
    if not 0 <= staged.parent <= head:
        raise InvalidInput(
            f"record.staged.parent is {staged.parent}, expected a version of the chain, 0..{head}",
            field="record.staged.parent",
        )
    check_artifacts(connection, staged.model_digest, staged.checkpoint_digest, "record.staged.")
