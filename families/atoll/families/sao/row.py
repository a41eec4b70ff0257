"""The columns that sao adds to a row, and what they tell about the age of the samples."""

from collections.abc import Mapping
from datetime import datetime

import numpy as np
from atoll.common.weight_version import WeightVersion
from atoll.families.driver import JobContext
from atoll.families.refusals import sample_refused
from atoll.families.rows import Batch, Column, Row

ACTION_MASK = "action_mask"
"""uint8 [R] 1 on tokens that the model generated, 0 on observations: tokens that have no recorded log-prob."""
PRODUCER = "producer_version"
"""int64 [2] incarnation and number of the oldest weight version that generated a token."""
CREATED_AT = "created_at"
"""float64 [] seconds since 1970."""


def row_columns(row: Row, created_at: datetime) -> Mapping[str, Column]:
    """The columns of one row. Raises: InvalidInput when the sample names no weight version."""
    if not row.versions:
        raise sample_refused(row.sample_id, "it names no weight version that produced it", field="versions")
    oldest = min(WeightVersion.parse(span.weight_version) for span in row.versions)
    return {
        **row.columns,
        ACTION_MASK: np.isfinite(row.rollout_log_probs).astype(np.uint8),
        PRODUCER: np.asarray([oldest.incarnation, oldest.number], dtype=np.int64),
        CREATED_AT: np.asarray(created_at.timestamp(), dtype=np.float64),
    }


def rollout_ages(batch: Batch, context: JobContext) -> Mapping[str, float]:
    """policy_lag in versions behind the head and queue_age_s in seconds, each as mean and maximum."""
    head = WeightVersion.parse(context.head_weight_version)
    lags = [max(0, head.number - int(row.columns[PRODUCER][1])) for row in batch.rows]
    started = context.started_at.timestamp()
    ages = [max(0.0, started - float(row.columns[CREATED_AT])) for row in batch.rows]
    return {
        "policy_lag_mean": float(np.mean(lags)),
        "policy_lag_max": float(max(lags)),
        "queue_age_s_mean": float(np.mean(ages)),
        "queue_age_s_max": max(ages),
    }
