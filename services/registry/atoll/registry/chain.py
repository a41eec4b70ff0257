"""The version chain: append-only, one head, and this module its only writer after version 0."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.common.names import check_id
from atoll.common.weight_version import WeightVersion
from atoll.registry import tables
from atoll.registry.artifacts import artifact_not_found
from atoll.registry.database import Database
from atoll.registry.family_name import check_family
from atoll.registry.manifest import check_digest
from atoll.registry.types import Kind, Operation, Version, VersionContent, utc_now
from atoll.registry.version_rows import insert_version, select_versions

_SCENARIOS = tables.scenarios
_VERSIONS = tables.versions
_CONSUMED = tables.consumed_samples
_ARTIFACTS = tables.artifacts
_IDS_PER_QUERY = 500
_SHOWN = 5


class Chain:
    """Commits and reads versions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def commit(self, content: VersionContent) -> Version:
        """Appends a version when its parent is the head; the same content under the same job id returns the first
        answer, for ever.

        Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND, ARTIFACT_NOT_FOUND), Conflict(PARENT_NOT_HEAD,
        JOB_COMMITTED_DIFFERENTLY, SAMPLE_ALREADY_CONSUMED), AtollError(UNSUPPORTED, STORAGE_FULL) and Unavailable.
        """
        job_id = _check(content)
        with self._database.write() as connection:
            query = sa.select(_SCENARIOS).where(_SCENARIOS.c.scenario_id == content.scenario).with_for_update()
            scenario = connection.execute(query).one_or_none()
            if scenario is None:
                raise scenario_not_found(content.scenario)
            for committed in select_versions(connection, content.scenario, _VERSIONS.c.job_id == job_id):
                return _replayed(committed, content)
            if scenario.head != content.parent:
                raise Conflict(
                    f"expected_parent is {content.parent}, the head of scenario {content.scenario} is "
                    f"{scenario.head}: another version was committed; train again from the head",
                    reason=errors_pb2.REASON_PARENT_NOT_HEAD,
                    field="expected_parent",
                )
            check_artifacts(connection, content)
            _check_samples(connection, content)
            number = scenario.head + 1
            version = Version(
                content=content,
                number=number,
                weight_version=WeightVersion(scenario.incarnation, number),
                revision=scenario.revision + 1,
                created_at=utc_now(),
            )
            insert_version(connection, version)
            connection.execute(
                _SCENARIOS.update()
                .where(_SCENARIOS.c.scenario_id == content.scenario)
                .values(head=number, revision=version.revision)
            )
        return version

    def get(self, scenario: str, *, number: int | None = None, job_id: str | None = None) -> Version:
        """One version: by number, by job id, or the head. Raises NotFound(SCENARIO_NOT_FOUND, VERSION_NOT_FOUND)."""
        with self._database.read() as connection:
            head = _position(connection, scenario).head
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
            _position(connection, scenario)
            return select_versions(connection, scenario, older, order=_VERSIONS.c.number.desc(), limit=limit)

    def check_revision(self, scenario: str, revision: int) -> None:
        """Raises unless a watch can begin after `revision`: InvalidInput, NotFound(SCENARIO_NOT_FOUND),
        Conflict(REVISION_COMPACTED) for one that this chain has not reached, e.g. after a restored backup."""
        if revision < 0:
            raise InvalidInput(f"from_revision is {revision}, expected 0 or more", field="from_revision")
        with self._database.read() as connection:
            newest = _position(connection, scenario).revision
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


def scenario_not_found(scenario: str) -> NotFound:
    return NotFound(
        f"no scenario {scenario[:80]!r}; create it first",
        reason=errors_pb2.REASON_SCENARIO_NOT_FOUND,
        field="scenario",
    )


@dataclass(frozen=True)
class _Position:
    """Where a chain is. Example: _Position(head=3, revision=4)."""

    head: int
    revision: int


def _position(connection: sa.Connection, scenario: str) -> _Position:
    query = sa.select(_SCENARIOS.c.head, _SCENARIOS.c.revision).where(_SCENARIOS.c.scenario_id == scenario)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise scenario_not_found(scenario)
    return _Position(row.head, row.revision)


def _check(content: VersionContent) -> str:
    """What can be said without the database; returns the job id."""
    check_id(content.scenario, "scenario")
    job_id = check_id(content.job_id or "", "job_id")
    if content.operation in (Operation.ROLLBACK, Operation.RECOVERY):
        raise AtollError(
            f"operation is {content.operation}, which this registry does not commit yet; expected training",
            reason=errors_pb2.REASON_UNSUPPORTED,
            field="operation",
        )
    if content.operation is not Operation.TRAINING:
        raise InvalidInput(
            f"operation is {content.operation}, which only CreateScenario appends; expected training", field="operation"
        )
    if content.parent is None or content.parent < 0:
        raise InvalidInput(f"expected_parent is {content.parent}, expected 0 or more", field="expected_parent")
    check_family(content.family)
    check_digest(content.model_digest, "model_digest")
    if content.checkpoint_digest is not None:
        check_digest(content.checkpoint_digest, "checkpoint_digest")
    seen: set[str] = set()
    for index, sample_id in enumerate(content.consumed_sample_ids):
        check_id(sample_id, f"consumed_sample_ids[{index}]")
        if sample_id in seen:
            raise InvalidInput(f"consumed_sample_ids names {sample_id!r} twice", field=f"consumed_sample_ids[{index}]")
        seen.add(sample_id)
    for name, value in content.metrics.items():
        if not name or not math.isfinite(value):
            raise InvalidInput(f"metrics[{name!r}] is {value}, expected a finite number under a name", field="metrics")
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
    }
    differing = [name for name, (one, other) in pairs.items() if one != other]
    raise Conflict(
        f"job {content.job_id} was committed as version {committed.number} with another {', '.join(differing)}; adopt "
        "that version: GetVersion(job_id)",
        reason=errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY,
        field="job_id",
    )


def check_artifacts(connection: sa.Connection, content: VersionContent) -> None:
    """Raises unless the artifacts are sealed, there, and of the right kind; locks them, so that retention cannot remove
    them before the caller's transaction is visible to it."""
    wanted = {"model_digest": (content.model_digest, Kind.MODEL)}
    if content.checkpoint_digest is not None:
        wanted["checkpoint_digest"] = (content.checkpoint_digest, Kind.CHECKPOINT)
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
        )


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    iterator = iter(ids)
    while chunk := tuple(islice(iterator, _IDS_PER_QUERY)):
        yield chunk
