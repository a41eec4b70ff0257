"""Versions as rows, both ways."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from atoll.common.weight_version import WeightVersion
from atoll.registry import tables
from atoll.registry.types import Operation, Version, VersionContent

_VERSIONS = tables.versions
_CONSUMED = tables.consumed_samples


def insert_version(connection: sa.Connection, version: Version) -> None:
    """Appends a version with its consumed samples; the unique constraints are the last guard of the chain."""
    content = version.content
    connection.execute(
        _VERSIONS.insert().values(
            scenario_id=content.scenario,
            number=version.number,
            parent=content.parent,
            operation=content.operation,
            incarnation=version.weight_version.incarnation,
            job_id=content.job_id,
            family=content.family,
            model_digest=content.model_digest,
            checkpoint_digest=content.checkpoint_digest,
            metrics=dict(content.metrics),
            family_state=dict(content.family_state),
            revision=version.revision,
            created_at=version.created_at,
            restores=content.restores,
            fencing_token=version.fencing_token,
        )
    )
    rows = [
        {"scenario_id": content.scenario, "sample_id": sample_id, "number": version.number, "position": position}
        for position, sample_id in enumerate(content.consumed_sample_ids)
    ]
    if rows:
        connection.execute(_CONSUMED.insert(), rows)


def select_versions(
    connection: sa.Connection,
    scenario: str,
    *conditions: sa.ColumnElement[bool],
    order: sa.ColumnElement[int] | None = None,
    limit: int | None = None,
) -> tuple[Version, ...]:
    """The scenario's versions that meet the conditions, with their consumed samples, oldest first by default."""
    query = sa.select(_VERSIONS).where(_VERSIONS.c.scenario_id == scenario, *conditions)
    query = query.order_by(_VERSIONS.c.number if order is None else order)
    rows = connection.execute(query if limit is None else query.limit(limit)).all()
    if not rows:
        return ()
    numbers = [row.number for row in rows]
    consumed: dict[int, list[str]] = defaultdict(list)
    # A range instead of a list of numbers: a page of versions is nearly always contiguous.
    samples = (
        sa.select(_CONSUMED.c.number, _CONSUMED.c.sample_id)
        .where(_CONSUMED.c.scenario_id == scenario, _CONSUMED.c.number.between(min(numbers), max(numbers)))
        .order_by(_CONSUMED.c.number, _CONSUMED.c.position)
    )
    for number, sample_id in connection.execute(samples):
        consumed[number].append(sample_id)
    return tuple(_version(row, consumed[row.number]) for row in rows)


def _version(row: sa.Row[tuple[object, ...]], consumed: Sequence[str]) -> Version:
    values = row._mapping
    created_at: datetime = values["created_at"]
    content = VersionContent(
        scenario=values["scenario_id"],
        job_id=values["job_id"],
        parent=values["parent"],
        operation=Operation(values["operation"]),
        family=values["family"],
        model_digest=values["model_digest"],
        checkpoint_digest=values["checkpoint_digest"],
        consumed_sample_ids=tuple(consumed),
        metrics={name: float(value) for name, value in values["metrics"].items()},
        family_state=values["family_state"],
        restores=values["restores"],
    )
    weight_version = WeightVersion(values["incarnation"], values["number"])
    return Version(content, values["number"], weight_version, values["revision"], created_at, values["fencing_token"])
