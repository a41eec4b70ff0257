"""Samples, reports, batches."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("settled_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("position"),
        sa.UniqueConstraint("job_id", name="batches_job_id"),
    )
    op.create_index("batches_state", "batches", ["state", "scenario", "position"])
    op.create_table(
        "keys",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "reports",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("report_id", sa.String(length=63), nullable=False),
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("feedback", sa.JSON(), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=True),
        sa.PrimaryKeyConstraint("position"),
        sa.UniqueConstraint("report_id", name="reports_report_id"),
    )
    op.create_index("reports_job", "reports", ["job_id"])
    op.create_index(
        "reports_pending",
        "reports",
        ["scenario"],
        sqlite_where=sa.text("job_id IS NULL"),
        postgresql_where=sa.text("job_id IS NULL"),
    )
    op.create_table(
        "request_answers",
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.Column("method", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("report_id", sa.String(length=63), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scenario", "method", "request_id"),
    )
    op.create_index("request_answers_created", "request_answers", ["created_us"])
    op.create_table(
        "samples",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.Column("receipt", sa.String(length=63), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("prompt_length", sa.Integer(), nullable=False),
        sa.Column("response_length", sa.Integer(), nullable=False),
        sa.Column("top_k", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("exact", sa.Boolean(), nullable=False),
        sa.Column("aborted", sa.Boolean(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("spans", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("tensors", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("position"),
        sa.UniqueConstraint("receipt", name="samples_receipt"),
    )
    op.create_index("samples_scenario", "samples", ["scenario", "position"])
    op.create_table(
        "scenario_locks",
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.PrimaryKeyConstraint("scenario"),
    )
    op.create_table(
        "batch_rows",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("receipt", sa.String(length=63), nullable=False),
        sa.Column("report_id", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["batches.job_id"],
        ),
        sa.ForeignKeyConstraint(
            ["receipt"],
            ["samples.receipt"],
        ),
        sa.ForeignKeyConstraint(
            ["report_id"],
            ["reports.report_id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "ordinal"),
    )
    op.create_table(
        "report_receipts",
        sa.Column("receipt", sa.String(length=63), nullable=False),
        sa.Column("report_id", sa.String(length=63), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("weight_version", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(
            ["receipt"],
            ["samples.receipt"],
        ),
        sa.ForeignKeyConstraint(
            ["report_id"],
            ["reports.report_id"],
        ),
        sa.PrimaryKeyConstraint("receipt"),
    )
    op.create_index("report_receipts_report", "report_receipts", ["report_id"])
    op.create_table(
        "sample_claims",
        sa.Column("receipt", sa.String(length=63), nullable=False),
        sa.Column("scenario", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["receipt"],
            ["samples.receipt"],
        ),
        sa.PrimaryKeyConstraint("receipt"),
    )
    op.create_index("sample_claims_job", "sample_claims", ["job_id"])
    op.create_index("sample_claims_state", "sample_claims", ["scenario", "state"])
