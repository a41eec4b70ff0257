"""Leases, job records, pins, what a version restores and the token it was committed under."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("versions", sa.Column("restores", sa.BigInteger, nullable=True))
    op.add_column("versions", sa.Column("fencing_token", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "leases",
        sa.Column("scenario_id", sa.String(63), sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
        sa.Column("role", sa.String(63), primary_key=True),
        sa.Column("holder", sa.String(63), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    jobs = op.create_table(
        "jobs",
        sa.Column("scenario_id", sa.String(63), sa.ForeignKey("scenarios.scenario_id"), primary_key=True),
        sa.Column("job_id", sa.String(63), primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("family", sa.Text, nullable=True),
        sa.Column("options", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("sample_ids", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("rollback_to", sa.BigInteger, nullable=True),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("staged_parent", sa.BigInteger, nullable=True),
        sa.Column("staged_model", sa.String(64), sa.ForeignKey("artifacts.digest"), nullable=True),
        sa.Column("staged_checkpoint", sa.String(64), sa.ForeignKey("artifacts.digest"), nullable=True),
        sa.Column("staged_metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("staged_family_state", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reason", sa.String(63), nullable=True),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("rejected_sample_ids", sa.JSON, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=True),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("scenario_id", "position", name="one_job_per_position"),
    )
    op.create_index("jobs_by_phase", "jobs", ["phase", "scenario_id", "position"])
    op.create_table(
        "pins",
        sa.Column("scenario_id", sa.String(63), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.ForeignKeyConstraint(["scenario_id", "number"], ["versions.scenario_id", "versions.number"]),
    )
    _record_committed_jobs(jobs)


def _record_committed_jobs(jobs: sa.Table) -> None:
    """Every committed job has a record, also those of the release before."""
    versions = sa.table(
        "versions",
        *(sa.column(name) for name in ("scenario_id", "number", "job_id", "family", "created_at")),
    )
    consumed = sa.table(
        "consumed_samples", *(sa.column(name) for name in ("scenario_id", "number", "sample_id", "position"))
    )
    connection = op.get_bind()
    for row in connection.execute(sa.select(versions).where(versions.c.job_id.is_not(None))).all():
        samples = (
            sa.select(consumed.c.sample_id)
            .where(consumed.c.scenario_id == row.scenario_id, consumed.c.number == row.number)
            .order_by(consumed.c.position)
        )
        connection.execute(
            jobs.insert().values(
                scenario_id=row.scenario_id,
                job_id=row.job_id,
                position=row.number,
                family=row.family,
                sample_ids=list(connection.execute(samples).scalars()),
                phase="committed",
                attempt=1,
                message="",
                rejected_sample_ids=[],
                version=row.number,
                fencing_token=0,
                created_at=row.created_at,
                updated_at=row.created_at,
            )
        )
