"""The version chain: append-only, one head, and this module its only writer after version 0."""

from collections.abc import Iterator, Sequence
from itertools import islice

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput, NotFound
from atoll.common.failpoints import reached
from atoll.common.names import check_id
from atoll.common.weight_version import WeightVersion
from atoll.registry import tables
from atoll.registry.artifact_rows import check_artifacts
from atoll.registry.content_checks import check_metrics, check_sample_ids
from atoll.registry.database import Database
from atoll.registry.family_name import check_family
from atoll.registry.job_endings import committable_record, end_record
from atoll.registry.leases import check_fencing_token
from atoll.registry.manifest import check_digest
from atoll.registry.restoring import check_restoring
from atoll.registry.scenario_lock import find_scenario, lock_scenario
from atoll.registry.types import Operation, Version, VersionContent, utc_now
from atoll.registry.version_rows import insert_version, select_versions

_SCENARIOS = tables.scenarios
_VERSIONS = tables.versions
_CONSUMED = tables.consumed_samples
_IDS_PER_QUERY = 500
_SHOWN = 5


class Chain:
    """Commits and reads versions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def commit(self, content: VersionContent, fencing_token: int = 0) -> Version:
        """Appends a version when its parent is the head; the same content under the same job id returns the first
        answer, for ever and under any token. A rollback or a recovery begins the next incarnation.

        Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND, ARTIFACT_NOT_FOUND, VERSION_NOT_FOUND),
        Conflict(PARENT_NOT_HEAD, FENCED, JOB_COMMITTED_DIFFERENTLY, JOB_ID_REUSED, SAMPLE_ALREADY_CONSUMED,
        NOT_RESTORABLE), AtollError(STORAGE_FULL) and Unavailable.
        """
        job_id = _check(content)
        with self._database.write() as connection:
            position = lock_scenario(connection, content.scenario)
            for committed in select_versions(connection, content.scenario, _VERSIONS.c.job_id == job_id):
                return _replayed(committed, content)
            check_fencing_token(connection, content.scenario, fencing_token)
            record = committable_record(connection, content)
            if position.head != content.parent:
                raise Conflict(
                    f"expected_parent is {content.parent}, the head of scenario {content.scenario} is "
                    f"{position.head}: another version was committed; train again from the head",
                    reason=errors_pb2.REASON_PARENT_NOT_HEAD,
                    field="expected_parent",
                )
            if content.operation is Operation.TRAINING:
                check_artifacts(connection, content.model_digest, content.checkpoint_digest)
                _check_samples(connection, content)
                incarnation = position.incarnation
            else:
                check_restoring(connection, content, position)
                incarnation = position.incarnation + 1
            number = position.head + 1
            version = Version(
                content=content,
                number=number,
                weight_version=WeightVersion(incarnation, number),
                revision=position.revision + 1,
                created_at=utc_now(),
                fencing_token=fencing_token,
            )
            insert_version(connection, version)
            end_record(connection, record, version)
            connection.execute(
                _SCENARIOS.update()
                .where(_SCENARIOS.c.scenario_id == content.scenario)
                .values(head=number, incarnation=incarnation, revision=version.revision)
            )
        reached("registry.committed")
        return version

    def get(self, scenario: str, *, number: int | None = None, job_id: str | None = None) -> Version:
        """One version: by number, by job id, or the head. Raises NotFound(SCENARIO_NOT_FOUND, VERSION_NOT_FOUND)."""
        with self._database.read() as connection:
            head = find_scenario(connection, scenario).head
            if job_id is not None:
                condition, what = _VERSIONS.c.job_id == job_id, f"job {job_id!r} has committed nothing"
            else:
                wanted = head if number is None else number
                condition, what = _VERSIONS.c.number == wanted, f"there is no version {wanted}"
            found = select_versions(connection, scenario, condition)
        if not found:
            raise NotFound(
                f"scenario {scenario}: {what}; the head is version {head}",
                reason=errors_pb2.REASON_VERSION_NOT_FOUND,
                field="number" if job_id is None else "job_id",
            )
        return found[0]

    def list_page(self, scenario: str, limit: int, before: int | None) -> tuple[Version, ...]:
        """At most `limit` versions with numbers below `before`, newest first. Raises NotFound(SCENARIO_NOT_FOUND)."""
        older = sa.true() if before is None else _VERSIONS.c.number < before
        with self._database.read() as connection:
            find_scenario(connection, scenario)
            return select_versions(connection, scenario, older, order=_VERSIONS.c.number.desc(), limit=limit)

    def check_revision(self, scenario: str, revision: int) -> None:
        """Raises unless a watch can begin after `revision`: InvalidInput, NotFound(SCENARIO_NOT_FOUND),
        Conflict(REVISION_COMPACTED) for one that this chain has not reached, e.g. after a restored backup."""
        if revision < 0:
            raise InvalidInput(f"from_revision is {revision}, expected 0 or more", field="from_revision")
        with self._database.read() as connection:
            newest = find_scenario(connection, scenario).revision
        if revision > newest:
            raise Conflict(
                f"from_revision is {revision}, scenario {scenario} is at {newest}: list the versions and watch from "
                "what you find",
                reason=errors_pb2.REASON_REVISION_COMPACTED,
                field="from_revision",
            )

    def since(self, scenario: str, revision: int, limit: int) -> tuple[Version, ...]:
        """At most `limit` versions with a revision above this one, oldest first. None is ever skipped: a revision is
        given out under the scenario's row lock, so they become visible in order."""
        with self._database.read() as connection:
            newer = _VERSIONS.c.revision > revision
            return select_versions(connection, scenario, newer, order=_VERSIONS.c.revision.asc(), limit=limit)


def _check(content: VersionContent) -> str:
    """What can be said without the database; returns the job id."""
    check_id(content.scenario, "scenario")
    job_id = check_id(content.job_id or "", "job_id")
    if content.operation is Operation.CREATION:
        raise InvalidInput(
            "operation is creation, which only CreateScenario appends; expected training, rollback or recovery",
            field="operation",
        )
    if content.parent is None or content.parent < 0:
        raise InvalidInput(f"expected_parent is {content.parent}, expected 0 or more", field="expected_parent")
    check_family(content.family)
    check_digest(content.model_digest, "model_digest")
    if content.checkpoint_digest is not None:
        check_digest(content.checkpoint_digest, "checkpoint_digest")
    check_sample_ids(content.consumed_sample_ids, "consumed_sample_ids")
    check_metrics(content.metrics, "metrics")
    if content.operation is Operation.TRAINING:
        if content.restores is not None:
            raise InvalidInput(
                f"restores is {content.restores}, which belongs to a rollback or a recovery", field="restores"
            )
        return job_id
    if content.restores is None or content.restores < 0:
        raise InvalidInput(
            f"restores is {content.restores}, expected the number of the version that this {content.operation} brings "
            "back",
            field="restores",
        )
    if content.consumed_sample_ids:
        raise InvalidInput(
            f"consumed_sample_ids has {len(content.consumed_sample_ids)} ids, a {content.operation} consumes none",
            field="consumed_sample_ids",
        )
    return job_id


def _replayed(committed: Version, content: VersionContent) -> Version:
    if committed.content == content:
        return committed
    first, second = committed.content, content
    pairs = {
        "expected_parent": (first.parent, second.parent),
        "operation": (first.operation, second.operation),
        "family": (first.family, second.family),
        "model_digest": (first.model_digest, second.model_digest),
        "checkpoint_digest": (first.checkpoint_digest, second.checkpoint_digest),
        "consumed_sample_ids": (first.consumed_sample_ids, second.consumed_sample_ids),
        "metrics": (first.metrics, second.metrics),
        "family_state": (first.family_state, second.family_state),
        "restores": (first.restores, second.restores),
    }
    differing = [name for name, (one, other) in pairs.items() if one != other]
    raise Conflict(
        f"job {content.job_id} was committed as version {committed.number} with another {', '.join(differing)}; adopt "
        "that version: GetVersion(job_id)",
        reason=errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY,
        field="job_id",
    )


def _check_samples(connection: sa.Connection, content: VersionContent) -> None:
    taken: dict[str, int] = {}
    for ids in _chunks(content.consumed_sample_ids):
        query = sa.select(_CONSUMED.c.sample_id, _CONSUMED.c.number).where(
            _CONSUMED.c.scenario_id == content.scenario, _CONSUMED.c.sample_id.in_(ids)
        )
        taken |= {row.sample_id: row.number for row in connection.execute(query)}
    if taken:
        shown = ", ".join(f"{sample} (version {number})" for sample, number in sorted(taken.items())[:_SHOWN])
        more = f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        raise Conflict(
            f"samples are consumed already: {shown}{more}; a sample is trained once per chain",
            reason=errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED,
            field="consumed_sample_ids",
            sample_ids=tuple(sorted(taken)),
        )


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    iterator = iter(ids)
    while chunk := tuple(islice(iterator, _IDS_PER_QUERY)):
        yield chunk
