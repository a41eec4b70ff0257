"""Reads from the database what retention decides on."""

from collections.abc import Iterator, Mapping

import sqlalchemy as sa
from atoll.registry import tables
from atoll.registry.job_rows import record_of
from atoll.registry.job_types import OPEN_PHASES, RollbackBody
from atoll.registry.retention import Facts, StoredArtifact, VersionBytes
from atoll.registry.types import Operation

REWARD = "reward/mean"
STALE = "staleness/samples_admitted_stale"

_VERSIONS = tables.versions
_ARTIFACTS = tables.artifacts
_SCENARIOS = tables.scenarios
_JOBS = tables.jobs
_PINS = tables.pins

Key = tuple[str, int]


def read_facts(connection: sa.Connection, free: int) -> Facts:
    """free: bytes of the filesystem. Reads as many versions as have bytes, not the chain."""
    query = sa.select(_ARTIFACTS.c.digest, _ARTIFACTS.c.total_size, _ARTIFACTS.c.sealed_at)
    stored = connection.execute(query.where(_ARTIFACTS.c.removed_at.is_(None)))
    artifacts = [StoredArtifact(row.digest, row.total_size, row.sealed_at) for row in stored]
    return Facts(_versions(connection), artifacts, dict(_needed(connection)), free)


def own_reward(metrics: Mapping[str, float], max_staleness: int) -> float | None:
    """The mean reward of the samples that a version produced, read from the metrics of the job that was trained from
    it; None when that batch held samples of older versions too, or had no reward.

    Honest rather than complete: a job that says nothing about staleness counts only where none is allowed.
    """
    stale = metrics.get(STALE, 0.0 if max_staleness == 0 else 1.0)
    return metrics.get(REWARD) if stale == 0 else None


def _has_bytes(versions: sa.FromClause) -> sa.ColumnElement[bool]:
    stored = sa.select(_ARTIFACTS.c.digest).where(_ARTIFACTS.c.removed_at.is_(None))
    return versions.c.model_digest.in_(stored) | versions.c.checkpoint_digest.in_(stored)


def _versions(connection: sa.Connection) -> list[VersionBytes]:
    rewards = _rewards(connection)
    pins: set[Key] = {(row.scenario_id, row.number) for row in connection.execute(sa.select(_PINS))}
    query = (
        sa.select(
            _VERSIONS.c.scenario_id,
            _VERSIONS.c.number,
            _VERSIONS.c.operation,
            _VERSIONS.c.model_digest,
            _VERSIONS.c.checkpoint_digest,
            _VERSIONS.c.created_at,
        )
        .join(_SCENARIOS, _SCENARIOS.c.scenario_id == _VERSIONS.c.scenario_id)
        .where(_has_bytes(_VERSIONS) | (_VERSIONS.c.number == _SCENARIOS.c.head))
    )
    return [
        VersionBytes(
            row.scenario_id,
            row.number,
            row.checkpoint_digest is not None or row.operation != Operation.TRAINING,
            row.model_digest,
            row.checkpoint_digest,
            row.created_at,
            (row.scenario_id, row.number) in pins,
            rewards.get((row.scenario_id, row.number)),
        )
        for row in connection.execute(query)
    ]


def _rewards(connection: sa.Connection) -> dict[Key, float]:
    child = _VERSIONS.alias("child")
    query = (
        sa.select(_VERSIONS.c.scenario_id, _VERSIONS.c.number, child.c.metrics, _SCENARIOS.c.max_staleness)
        .join(_SCENARIOS, _SCENARIOS.c.scenario_id == _VERSIONS.c.scenario_id)
        .join(child, (child.c.scenario_id == _VERSIONS.c.scenario_id) & (child.c.number == _VERSIONS.c.number + 1))
        .where(_has_bytes(_VERSIONS), child.c.operation == Operation.TRAINING)
    )
    rewards: dict[Key, float] = {}
    for row in connection.execute(query):
        reward = own_reward(row.metrics, row.max_staleness)
        if reward is not None:
            rewards[row.scenario_id, row.number] = reward
    return rewards


def _needed(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    """Digests that open jobs need, with the reason."""
    for row in connection.execute(sa.select(_JOBS).where(_JOBS.c.phase.in_(OPEN_PHASES))).all():
        record = record_of(row)
        job = f"{record.job_id} of {record.scenario}"
        staged = record.progress.staged
        if staged is not None:
            yield from (
                (digest, f"staged by {job}") for digest in (staged.model_digest, staged.checkpoint_digest or "")
            )
            yield from _digests(connection, record.scenario, staged.parent, f"trained from by {job}")
        if isinstance(record.body, RollbackBody):
            yield from _digests(connection, record.scenario, record.body.version, f"to be brought back by {job}")


def _digests(connection: sa.Connection, scenario: str, number: int, why: str) -> Iterator[tuple[str, str]]:
    query = sa.select(_VERSIONS.c.model_digest, _VERSIONS.c.checkpoint_digest)
    row = connection.execute(
        query.where(_VERSIONS.c.scenario_id == scenario, _VERSIONS.c.number == number)
    ).one_or_none()
    if row is not None:
        yield from ((digest, why) for digest in (row.model_digest, row.checkpoint_digest) if digest is not None)
