"""Rows: what no loss may see is refused, with the sample and the field."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.rows import Column, ColumnDtype, ColumnOrigin, ColumnSpec, VersionSpan, validate_rows

from tests.families.rows import make_row

GOOD = make_row("s1")
COLUMNS = (
    ColumnSpec("action_mask", ColumnDtype.UINT8, response_aligned=True),
    ColumnSpec("teacher_tokens", ColumnDtype.INT32),
    ColumnSpec("base_log_probs", ColumnDtype.FLOAT32, ColumnOrigin.DRIVER, response_aligned=True),
)
FILLED: dict[str, Column] = {"action_mask": np.ones(3, dtype=np.uint8), "teacher_tokens": np.ones(9, dtype=np.int32)}


def test_a_row_knows_its_response() -> None:
    assert GOOD.response_length == 3
    assert GOOD.response_tokens.tolist() == [3, 4, 5]


def test_good_rows_pass() -> None:
    under_mask = replace(
        make_row("s2", mask=[1, 0, 1]), rollout_log_probs=np.asarray([-1, math.nan, -1], dtype=np.float32)
    )
    validate_rows([GOOD, under_mask], vocab_size=6)
    validate_rows([replace(GOOD, columns=FILLED)], vocab_size=6, columns=COLUMNS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": np.asarray([1, 2, 3, 4, 6], dtype=np.int32)}, "tokens"),
        ({"tokens": np.asarray([1, 2, -1, 4, 5], dtype=np.int32)}, "tokens"),
        ({"tokens": np.asarray([1, 2, 3, 4, 5], dtype=np.int64)}, "tokens"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 5}, "prompt_length"),
        ({"loss_mask": np.ones(2, dtype=np.uint8)}, "loss_mask"),
        ({"loss_mask": np.asarray([1, 2, 1], dtype=np.uint8)}, "loss_mask"),
        ({"rollout_log_probs": np.zeros(4, dtype=np.float32)}, "rollout_log_probs"),
        ({"rollout_log_probs": np.asarray([0, math.nan, 0], dtype=np.float32)}, "rollout_log_probs"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"exact": False}, "exact"),
        ({"reward": math.inf}, "reward"),
        ({"versions": (VersionSpan(0, 2, "1:3"),)}, "versions"),
        ({"versions": (VersionSpan(0, 1, "1:3"), VersionSpan(2, 3, "1:4"))}, "versions"),
        ({"columns": FILLED}, "columns"),
    ],
)
def test_a_bad_row_is_refused_by_sample_and_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match="sample s1: ") as caught:
        validate_rows([replace(GOOD, **changes)], vocab_size=6)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({}, "columns"),
        ({**FILLED, "other": np.ones(3)}, "columns"),
        ({**FILLED, "action_mask": np.ones(3, dtype=np.int32)}, "action_mask"),
        ({**FILLED, "action_mask": np.ones(4, dtype=np.uint8)}, "action_mask"),
    ],
)
def test_extra_columns_must_be_those_declared(columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match="sample s1: ") as caught:
        validate_rows([replace(GOOD, columns=columns)], vocab_size=6, columns=COLUMNS)
    assert caught.value.field == field


def test_an_empty_batch_and_a_repeated_sample_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no rows"):
        validate_rows([], vocab_size=6)
    with pytest.raises(InvalidInput, match="s1: it is in the batch twice"):
        validate_rows([GOOD, GOOD], vocab_size=6)
