"""Scenarios, versions, consumed samples, artifacts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "scenarios",
        sa.Column("scenario_id", sa.String(63), primary_key=True),
        sa.Column("family", sa.Text, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("max_staleness", sa.Integer, nullable=False),
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("head", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("total_size", sa.BigInteger, nullable=False),
        sa.Column("sealed_at", sa.BigInteger, nullable=False),
        sa.Column("removed_at", sa.BigInteger, nullable=True),
    )
    op.create_index("ix_artifacts_sealed_at", "artifacts", ["sealed_at"])
    op.create_table(
        "artifact_files",
        sa.Column("digest", sa.String(64), sa.ForeignKey("artifacts.digest"), primary_key=True),
        sa.Column("path", sa.String(1024), primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("scenario_id", sa.String(63), sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.BigInteger, nullable=True),
        sa.Column("operation", sa.String(16), nullable=False),
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("job_id", sa.String(63), nullable=True),
        sa.Column("family", sa.Text, nullable=False),
        sa.Column("model_digest", sa.String(64), sa.ForeignKey("artifacts.digest"), nullable=False),
        sa.Column("checkpoint_digest", sa.String(64), sa.ForeignKey("artifacts.digest"), nullable=True),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("family_state", sa.JSON, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("scenario_id", "job_id", name="one_version_per_job"),
        sa.UniqueConstraint("scenario_id", "revision", name="one_version_per_revision"),
    )
    op.create_index("ix_versions_model_digest", "versions", ["model_digest"])
    op.create_index("ix_versions_checkpoint_digest", "versions", ["checkpoint_digest"])
    op.create_table(
        "consumed_samples",
        sa.Column("scenario_id", sa.String(63), primary_key=True),
        sa.Column("sample_id", sa.String(63), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.ForeignKeyConstraint(["scenario_id", "number"], ["versions.scenario_id", "versions.number"]),
    )
    op.create_index("consumed_samples_by_version", "consumed_samples", ["scenario_id", "number"])
