"""Recorded heads are cut to K and checked: each kind of bad head is refused by sample and position."""

from dataclasses import replace

import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.rows import Column, Float32, Int32, Row, UInt8, validate_rows
from atoll.families.sampler_heads import HEAD_COLUMNS, HEAD_IDS, HEAD_LOG_PROBS, sampler_head_columns

from tests.families.rows import make_row

VOCAB = 50
IDS = np.asarray([[3, 9, 7], [1, 4, 2], [8, 5, 6]], dtype=np.int32)
"""The sampled ids of the row are 3, 4 and 5."""
LOG_PROBS = np.asarray([[-0.5, -1.5, -2.0], [-0.4, -1.5, -3.0], [-0.9, -1.3, -1.7]], dtype=np.float32)
MASK = np.asarray([1, 0, 1], dtype=np.uint8)


def row() -> Row:
    recorded = np.asarray([-0.5, 99.0, -1.3], dtype=np.float32)
    return replace(make_row("s1", mask=[1, 0, 1]), rollout_log_probs=recorded)


def check(
    ids: Int32 | None = IDS, log_probs: Float32 | None = LOG_PROBS, *, top_k: int = 3, mask: UInt8 = MASK
) -> dict[str, Column]:
    return sampler_head_columns(row(), mask, ids, log_probs, top_k=top_k, vocab_size=VOCAB)


def test_a_good_head_is_cut_to_its_first_ids() -> None:
    columns = check(top_k=2)
    assert columns[HEAD_IDS].tolist() == IDS[:, :2].tolist()
    assert columns[HEAD_LOG_PROBS].tolist() == LOG_PROBS[:, :2].tolist()
    validate_rows([replace(row(), columns=columns)], vocab_size=VOCAB, columns=HEAD_COLUMNS)


def changed(place: tuple[int, int], value: float) -> Float32:
    copy = LOG_PROBS.copy()
    copy[place] = value
    return copy


def test_anything_goes_under_the_mask_and_a_sampled_token_outside_its_head_is_not_checked() -> None:
    ids, log_probs = IDS.copy(), LOG_PROBS.copy()
    ids[1], log_probs[1] = -1, -np.inf
    check(ids, log_probs)
    log_probs[1] = np.nan
    check(ids, log_probs)
    check(np.where(IDS == 3, 40, IDS).astype(np.int32))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 1), -1, "token 0 is short"),
        ((2, 2), -1, "token 2 is short"),
        ((2, 0), VOCAB, "token 2 has an id outside the vocabulary of 50"),
        ((0, 1), 7, "token 0 holds an id twice"),
    ],
)
def test_bad_ids_are_refused(place: tuple[int, int], value: int, message: str) -> None:
    ids = IDS.copy()
    ids[place] = value
    refuse(message, ids, LOG_PROBS)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 2), np.nan, "token 0 has a log-prob that is not finite"),
        ((2, 2), -np.inf, "token 2 has a log-prob that is not finite"),
        ((0, 2), -1.0, "token 0 is not in descending order"),
        ((2, 0), -0.2, "token 2 has a probability mass above 1"),
        ((0, 0), -0.52, "token 0 disagrees with the recorded log-prob of the sampled token"),
    ],
)
def test_bad_log_probs_are_refused(place: tuple[int, int], value: float, message: str) -> None:
    refuse(message, IDS, changed(place, value))


def test_small_disagreements_and_a_mass_a_little_above_one_are_rounding() -> None:
    check(IDS, changed((0, 0), -0.5009))
    with pytest.raises(InvalidInput, match="disagrees"):
        check(IDS, changed((0, 0), -0.5011))
    flat = np.log(np.full((3, 3), 1.0009 / 3, dtype=np.float32))
    check(np.asarray([[20, 21, 22]] * 3, dtype=np.int32), flat)
    with pytest.raises(InvalidInput, match="mass above 1"):
        check(np.asarray([[20, 21, 22]] * 3, dtype=np.int32), np.log(np.full((3, 3), 1.0012 / 3, dtype=np.float32)))


@pytest.mark.parametrize(
    ("ids", "log_probs", "top_k", "message"),
    [
        (None, LOG_PROBS, 3, "no top-k was recorded"),
        (IDS, None, 3, "no top-k was recorded"),
        (IDS, LOG_PROBS, 4, r"a head of 4 ids for each of the 3 response tokens expected, got ids \[3, 3\]"),
        (IDS[:2], LOG_PROBS[:2], 3, r"got ids \[2, 3\]"),
        (IDS, LOG_PROBS[:, :2], 2, r"log-probs \[3, 2\]"),
    ],
)
def test_missing_and_short_heads_are_refused(
    ids: Int32 | None, log_probs: Float32 | None, top_k: int, message: str
) -> None:
    refuse(message, ids, log_probs, top_k=top_k)


def test_a_row_without_trained_tokens_has_nothing_to_check() -> None:
    check(np.full((3, 3), -1, dtype=np.int32), mask=np.zeros(3, dtype=np.uint8))


def refuse(message: str, ids: Int32 | None, log_probs: Float32 | None, *, top_k: int = 3) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        check(ids, log_probs, top_k=top_k)
    assert "sample s1" in caught.value.message
    assert caught.value.reason == errors_pb2.REASON_BATCH_REFUSED
