"""Codes of settlements, trajectories of several receipts, conversations that later requests extend."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    place = "strpos" if is_postgresql else "instr"
    for table in ("sample_claims", "batches"):
        op.add_column(table, sa.Column("code", sa.String(63), nullable=False, server_default=""))
        # A reason has always begun with its code.
        op.execute(f"UPDATE {table} SET code = substr(reason, 1, {place}(reason, ': ') - 1) WHERE reason LIKE '%: %'")
    op.add_column("request_answers", sa.Column("code", sa.String(63), nullable=False, server_default=""))
    op.add_column("request_answers", sa.Column("reason", sa.Text(), nullable=False, server_default=""))
    op.add_column("report_receipts", sa.Column("trajectory", sa.Integer(), nullable=False, server_default="0"))
    # What was reported before is read as it was: a row for every receipt.
    op.execute("UPDATE report_receipts SET trajectory = ordinal")
    op.add_column("samples", sa.Column("conversation", sa.String(64), nullable=True))
    op.create_index("samples_conversation", "samples", ["scenario", "conversation"])
    if is_postgresql:
        # From here on JSON, which can hold every character (tables.SampledText).
        op.execute("UPDATE samples SET text = to_json(text)::text")
