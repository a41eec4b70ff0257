"""Small rows and reports for the torch-free tests."""

from datetime import UTC, datetime, timedelta

import numpy as np
from atoll.families.batching import ReportView
from atoll.families.rows import Batch, Row, VersionSpan
from pydantic import JsonValue

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def make_row(
    sample_id: str,
    *,
    rollout: str | None = None,
    group: str = "g",
    length: int = 3,
    mask: list[int] | None = None,
    reward: float = 0.0,
) -> Row:
    """A row of 2 prompt and `length` response tokens with ids 1, 2, 3, ..."""
    return Row(
        sample_id=sample_id,
        rollout_id=rollout or sample_id,
        group_id=group,
        tokens=np.arange(1, length + 3, dtype=np.int32),
        prompt_length=2,
        loss_mask=np.asarray([1] * length if mask is None else mask, dtype=np.uint8),
        rollout_log_probs=np.full(length, -0.5, dtype=np.float32),
        temperature=0.7,
        reward=reward,
        versions=(VersionSpan(0, length, "1:3"),),
    )


def make_batch(*rows: Row) -> Batch:
    return Batch("job-1", 1, rows)


def make_report(
    report_id: str,
    *,
    at: int = 0,
    group: JsonValue = "g",
    score: float | None = 1.0,
    receipts: tuple[str, ...] | None = None,
) -> ReportView:
    """A report that became durable `at` seconds after the epoch."""
    return ReportView(
        report_id=report_id,
        receipts=(f"sample-of-{report_id}",) if receipts is None else receipts,
        score=score,
        created_at=EPOCH + timedelta(seconds=at),
        metadata={} if group is None else {"group": group},
        weight_versions=("1:3",),
    )
