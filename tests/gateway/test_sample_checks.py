"""A sample that does not account for every token is refused before anything is stored."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InternalError
from atoll.families.rows import VersionSpan
from atoll.gateway.sample_checks import check_sample

from tests.gateway.store_world import new_sample

GOOD = new_sample("r1", prompt=3, response=4, top_k=2)
assert GOOD.top_k_ids is not None and GOOD.top_k_log_probs is not None
HOLE_IDS, HOLE_LOG_PROBS = GOOD.top_k_ids.copy(), GOOD.top_k_log_probs.copy()
HOLE_IDS[1, 1], HOLE_LOG_PROBS[1, 1] = -1, -np.inf


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def test_samples_that_add_up_pass() -> None:
    check_sample(GOOD)
    check_sample(new_sample("r2"))
    check_sample(new_sample("r3", response=0))
    check_sample(replace(GOOD, spans=(VersionSpan(0, 1, "1:4"), VersionSpan(1, 4, "1:5"))))
    check_sample(replace(GOOD, temperature=0.0, exact=False))
    masked = np.array([1, 0, 1, 1], dtype=np.uint8)
    check_sample(replace(GOOD, top_k_ids=HOLE_IDS, top_k_log_probs=HOLE_LOG_PROBS, loss_mask=masked))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_ids", {"prompt_ids": ints()}),
        ("prompt_ids", {"prompt_ids": ints(1, -2, 3)}),
        ("prompt_ids", {"prompt_ids": np.array([1, 2, 3], dtype=np.int64)}),
        ("response_ids", {"response_ids": ints(1, 2, 3, -1)}),
        ("response_ids", {"response_ids": np.zeros((4, 1), dtype=np.int32)}),
        ("response_ids", {"response_ids": ints(), "loss_mask": np.ones(0, np.uint8), "log_probs": floats()}),
        ("loss_mask", {"loss_mask": np.ones(3, dtype=np.uint8)}),
        ("loss_mask", {"loss_mask": np.full(4, 2, dtype=np.uint8)}),
        ("loss_mask", {"loss_mask": np.ones(4, dtype=bool)}),
        ("log_probs", {"log_probs": floats(-1, -1, -1)}),
        ("log_probs", {"log_probs": floats(-1, -1, np.nan, -1)}),
        ("log_probs", {"log_probs": floats(-1, -np.inf, -1, -1)}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": -1.0}),
        ("created_at", {"created_at": datetime(2026, 1, 1)}),
        ("top_k_ids", {"top_k_ids": None}),
        ("top_k_ids", {"top_k_ids": ints(1, 2, 3, 4)}),
        ("top_k_log_probs", {"top_k_log_probs": floats(-1, -2)}),
        ("top_k_ids", {"top_k_ids": HOLE_IDS}),
        ("top_k_ids", {"top_k_ids": HOLE_IDS, "top_k_log_probs": HOLE_LOG_PROBS}),
        ("top_k_log_probs", {"top_k_log_probs": np.full((4, 2), np.nan, dtype=np.float32)}),
        ("spans", {"spans": ()}),
        ("spans", {"spans": (VersionSpan(0, 3, "1:0"),)}),
        ("spans", {"spans": (VersionSpan(0, 5, "1:0"),)}),
        ("spans", {"spans": (VersionSpan(1, 4, "1:0"),)}),
        ("spans", {"spans": (VersionSpan(0, 2, "1:0"), VersionSpan(3, 4, "1:0"))}),
        ("spans", {"spans": (VersionSpan(0, 2, "1:0"), VersionSpan(1, 4, "1:0"))}),
        ("spans", {"spans": (VersionSpan(0, 0, "1:0"), VersionSpan(0, 4, "1:0"))}),
        ("spans", {"spans": (VersionSpan(0, 4, "default"),)}),
    ],
)
def test_a_sample_that_does_not_add_up_is_refused_by_its_field(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match=rf"sample r1 is not recorded: {field}") as refusal:
        check_sample(replace(GOOD, **change))
    assert refusal.value.reason == errors_pb2.REASON_ENGINE_PROTOCOL
