"""The gateway's tables, declared once; a test compares them with what the migrations build.

A sample is never written again after it was recorded: where it stands is a row of `sample_claims`, and a sample
without one is PENDING. The primary key of that table is what keeps a sample out of two batches, whoever forms them.
Times are microseconds since 1970 in UTC.
"""

import json

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)


class SampledText(TypeDecorator[str]):
    """What a model said, in which every character may come up. PostgreSQL has no text with NUL: there it is JSON."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return json.dumps(value) if dialect.name == "postgresql" and value is not None else value

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return json.loads(value) if dialect.name == "postgresql" and value is not None else value


METADATA = MetaData()

ID = String(63)
# SQLite numbers rows by itself only for a column of exactly this type.
POSITION = BigInteger().with_variant(Integer, "sqlite")

NO_JOB = ""
"""job_id of what was settled without a job. A report whose job_id is NULL is pending."""

keys = Table(
    "keys",
    METADATA,
    Column("name", String(32), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""Secrets of the deployment that all gateways on this database share."""

scenario_locks = Table("scenario_locks", METADATA, Column("scenario", ID, primary_key=True))
"""One row per scenario, locked while its reports, batches and claims change; SQLite locks the whole file anyway."""

samples = Table(
    "samples",
    METADATA,
    Column("position", POSITION, primary_key=True),
    Column("scenario", ID, nullable=False),
    Column("receipt", ID, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("prompt_length", Integer, nullable=False),
    Column("response_length", Integer, nullable=False),
    Column("top_k", Integer, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("exact", Boolean, nullable=False),
    Column("aborted", Boolean, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("spans", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("text", SampledText, nullable=False),
    # After those of every reading, so that SQLite finds them without walking its overflow pages.
    Column("tensors", LargeBinary, nullable=False),
    Column("conversation", String(64), nullable=True),
    UniqueConstraint("receipt", name="samples_receipt"),
    Index("samples_scenario", "scenario", "position"),
    Index("samples_conversation", "scenario", "conversation"),
)

sample_claims = Table(
    "sample_claims",
    METADATA,
    Column("receipt", ID, ForeignKey("samples.receipt"), primary_key=True),
    Column("scenario", ID, nullable=False),
    Column("state", String(16), nullable=False),
    Column("job_id", ID, nullable=False),
    Column("reason", Text, nullable=False),
    Column("code", String(63), nullable=False, server_default=""),
    Index("sample_claims_job", "job_id"),
    Index("sample_claims_state", "scenario", "state"),
)

reports = Table(
    "reports",
    METADATA,
    Column("position", POSITION, primary_key=True),
    Column("report_id", ID, nullable=False),
    Column("scenario", ID, nullable=False),
    Column("score", Float, nullable=True),
    Column("feedback", JSON, nullable=True),
    Column("metadata", JSON, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("job_id", ID, nullable=True),
    UniqueConstraint("report_id", name="reports_report_id"),
    Index(
        "reports_pending",
        "scenario",
        sqlite_where=text("job_id IS NULL"),
        postgresql_where=text("job_id IS NULL"),
    ),
    Index("reports_job", "job_id"),
)

report_receipts = Table(
    "report_receipts",
    METADATA,
    Column("receipt", ID, ForeignKey("samples.receipt"), primary_key=True),
    Column("report_id", ID, ForeignKey("reports.report_id"), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("weight_version", String(63), nullable=False),
    # Receipts of a report with the same number are turns of one row.
    Column("trajectory", Integer, nullable=False, server_default="0"),
    Index("report_receipts_report", "report_id"),
)

batches = Table(
    "batches",
    METADATA,
    Column("position", POSITION, primary_key=True),
    Column("job_id", ID, nullable=False),
    Column("scenario", ID, nullable=False),
    Column("family", Text, nullable=False),
    Column("options", JSON, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("version", BigInteger, nullable=True),
    Column("settled_us", BigInteger, nullable=True),
    Column("code", String(63), nullable=False, server_default=""),
    UniqueConstraint("job_id", name="batches_job_id"),
    Index("batches_state", "state", "scenario", "position"),
)

batch_rows = Table(
    "batch_rows",
    METADATA,
    Column("job_id", ID, ForeignKey("batches.job_id"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("receipt", ID, ForeignKey("samples.receipt"), nullable=False),
    Column("report_id", ID, ForeignKey("reports.report_id"), nullable=False),
)

request_answers = Table(
    "request_answers",
    METADATA,
    Column("scenario", ID, primary_key=True),
    Column("method", String(32), primary_key=True),
    Column("request_id", String(64), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("report_id", ID, nullable=False),
    Column("job_id", ID, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("code", String(63), nullable=False, server_default=""),
    Column("reason", Text, nullable=False, server_default=""),
    Index("request_answers_created", "created_us"),
)
"""First answers by the caller's request id."""
