"""The registry's tables. Migrations build them; a test compares the two."""

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UtcMicroseconds(sa.types.TypeDecorator[datetime]):
    """An aware datetime stored as microseconds since 1970: exact, ordered, and the same on every database."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (value - _EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _EPOCH + timedelta(microseconds=value)


metadata = sa.MetaData()

scenarios = sa.Table(
    "scenarios",
    metadata,
    sa.Column("scenario_id", sa.String(63), primary_key=True),
    sa.Column("family", sa.Text, nullable=False),
    sa.Column("options", sa.JSON, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("max_staleness", sa.Integer, nullable=False),
    # The chain's counters live here so that one row lock orders every commit of a scenario.
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("head", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcMicroseconds, nullable=False),
)

artifacts = sa.Table(
    "artifacts",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("total_size", sa.BigInteger, nullable=False),
    sa.Column("sealed_at", UtcMicroseconds, nullable=False, index=True),
    sa.Column("removed_at", UtcMicroseconds, nullable=True),
)

artifact_files = sa.Table(
    "artifact_files",
    metadata,
    sa.Column("digest", sa.ForeignKey("artifacts.digest"), primary_key=True),
    sa.Column("path", sa.String(1024), primary_key=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("scenario_id", sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.BigInteger, nullable=True),
    sa.Column("operation", sa.String(16), nullable=False),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("job_id", sa.String(63), nullable=True),
    sa.Column("family", sa.Text, nullable=False),
    sa.Column("model_digest", sa.ForeignKey("artifacts.digest"), nullable=False, index=True),
    sa.Column("checkpoint_digest", sa.ForeignKey("artifacts.digest"), nullable=True, index=True),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("family_state", sa.JSON, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcMicroseconds, nullable=False),
    sa.Column("restores", sa.BigInteger, nullable=True),
    sa.Column("fencing_token", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("scenario_id", "job_id", name="one_version_per_job"),
    sa.UniqueConstraint("scenario_id", "revision", name="one_version_per_revision"),
)

consumed_samples = sa.Table(
    "consumed_samples",
    metadata,
    # The primary key is the promise that no sample is consumed by two versions of a scenario.
    sa.Column("scenario_id", sa.String(63), primary_key=True),
    sa.Column("sample_id", sa.String(63), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.ForeignKeyConstraint(["scenario_id", "number"], ["versions.scenario_id", "versions.number"]),
    sa.Index("consumed_samples_by_version", "scenario_id", "number"),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("scenario_id", sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
    sa.Column("role", sa.String(63), primary_key=True),
    sa.Column("holder", sa.String(63), nullable=False),
    sa.Column("address", sa.String(255), nullable=False),
    # Never falls: the row stays when the lease lapses.
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("expires_at", UtcMicroseconds, nullable=False),
)

_Json = sa.JSON(none_as_null=True)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("scenario_id", sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
    sa.Column("job_id", sa.String(63), primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    # The body: a training job's family, options (unknown when a commit made the record) and samples, or what a
    # rollback brings back.
    sa.Column("family", sa.Text, nullable=True),
    sa.Column("options", _Json, nullable=True),
    sa.Column("sample_ids", _Json, nullable=True),
    sa.Column("rollback_to", sa.BigInteger, nullable=True),
    sa.Column("phase", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("staged_parent", sa.BigInteger, nullable=True),
    sa.Column("staged_model", sa.ForeignKey("artifacts.digest"), nullable=True),
    sa.Column("staged_checkpoint", sa.ForeignKey("artifacts.digest"), nullable=True),
    sa.Column("staged_metrics", _Json, nullable=True),
    sa.Column("staged_family_state", _Json, nullable=True),
    sa.Column("reason", sa.String(63), nullable=True),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("rejected_sample_ids", sa.JSON, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=True),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcMicroseconds, nullable=False),
    sa.Column("updated_at", UtcMicroseconds, nullable=False),
    sa.UniqueConstraint("scenario_id", "position", name="one_job_per_position"),
    sa.Index("jobs_by_phase", "phase", "scenario_id", "position"),
)

pins = sa.Table(
    "pins",
    metadata,
    sa.Column("scenario_id", sa.String(63), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.ForeignKeyConstraint(["scenario_id", "number"], ["versions.scenario_id", "versions.number"]),
)
