"""Reported samples for tests of the rows that families shape."""

from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
from atoll.families.rows import VersionSpan
from atoll.families.samples import ReportedSample, SampleView
from pydantic import JsonValue

from tests.families.rows import EPOCH, make_report


def reported(
    name: str,
    *,
    score: float | None = 1.0,
    versions: tuple[VersionSpan, ...] = (VersionSpan(0, 3, "1:3"),),
    log_probs: tuple[float, ...] = (-0.5, -0.5, -0.5),
    created_at: datetime = EPOCH,
    top_k: int = 0,
    metadata: dict[str, JsonValue] | None = None,
) -> ReportedSample:
    """A sample of prompt [1, 2] and response [3, 4, 5], created at the epoch, with a report about it."""
    report = replace(make_report(name, at=1, score=score), metadata=metadata or {})
    view = SampleView(
        sample_id=f"sample-of-{name}",
        tokens=np.arange(1, 6, dtype=np.int32),
        prompt_length=2,
        loss_mask=np.isfinite(log_probs).astype(np.uint8),
        log_probs=np.asarray(log_probs, dtype=np.float32),
        temperature=0.7,
        exact=True,
        versions=versions,
        created_at=created_at,
        top_k_ids=np.arange(3 * top_k, dtype=np.int32).reshape(3, top_k) if top_k else None,
        top_k_log_probs=np.full((3, top_k), -3.0, dtype=np.float32) if top_k else None,
    )
    return ReportedSample(view, report)


def later(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)
