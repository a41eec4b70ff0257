"""Refuses a sample that does not add up, before anything is stored."""

import math
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InternalError, InvalidInput
from atoll.common.weight_version import WeightVersion
from atoll.families.rows import Float32, Int32, UInt8
from atoll.gateway.records import NewSample

Refuse = Callable[[str, str], NoReturn]
Shaped = Callable[[str, Int32 | UInt8 | Float32, type[np.generic], tuple[int, ...]], None]


def check_sample(sample: NewSample) -> None:
    """Checks that tensors, spans and numbers account for every response token.

    Raises InternalError(ENGINE_PROTOCOL) naming the receipt, the field, what was expected and what came.
    """
    prompt, response = len(sample.prompt_ids), len(sample.response_ids)

    def refuse(name: str, problem: str) -> NoReturn:
        raise InternalError(
            f"sample {sample.receipt} is not recorded: {name} {problem}; the engine's answer does not account for "
            "what was asked",
            reason=errors_pb2.REASON_ENGINE_PROTOCOL,
        )

    def shaped(name: str, array: Int32 | UInt8 | Float32, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            refuse(name, f"must be {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}")

    if prompt < 1:
        refuse("prompt_ids", "must hold at least one token, got none")
    if response < 1 and not sample.aborted:
        refuse("response_ids", "must hold at least one token unless the client went away, got none")
    shaped("prompt_ids", sample.prompt_ids, np.int32, (prompt,))
    shaped("response_ids", sample.response_ids, np.int32, (response,))
    shaped("loss_mask", sample.loss_mask, np.uint8, (response,))
    shaped("log_probs", sample.log_probs, np.float32, (response,))
    for name, ids in (("prompt_ids", sample.prompt_ids), ("response_ids", sample.response_ids)):
        if len(ids) and int(ids.min()) < 0:
            refuse(name, f"must not be negative, got {int(ids.min())}")
    if response and int(sample.loss_mask.max()) > 1:
        refuse("loss_mask", f"must hold 0 and 1 only, got {int(sample.loss_mask.max())}")
    if not np.isfinite(sample.log_probs).all():
        where = int(np.flatnonzero(~np.isfinite(sample.log_probs))[0])
        refuse("log_probs", f"must be finite, got {sample.log_probs[where]} at response token {where}")
    if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
        refuse("temperature", f"must be a number from 0 up, got {sample.temperature}")
    if sample.created_at.tzinfo is None:
        refuse("created_at", "must carry a time zone")
    _check_candidates(sample, refuse, shaped)
    _check_spans(sample, refuse)


def _check_candidates(sample: NewSample, refuse: Refuse, shaped: Shaped) -> None:
    ids, log_probs = sample.top_k_ids, sample.top_k_log_probs
    if ids is None or log_probs is None:
        if (ids is None) != (log_probs is None):
            refuse("top_k_ids", "and top_k_log_probs come together or not at all")
        return
    if ids.ndim != 2 or ids.shape[1] < 1:
        refuse("top_k_ids", f"must be [R, K] with K >= 1, got {list(ids.shape)}")
    shape = (len(sample.response_ids), ids.shape[1])
    shaped("top_k_ids", ids, np.int32, shape)
    shaped("top_k_log_probs", log_probs, np.float32, shape)
    empty = ids == -1
    if bool((ids < -1).any()) or not np.array_equal(empty, np.isneginf(log_probs)):
        refuse("top_k_ids", "must be -1 exactly where top_k_log_probs is -inf, and not negative elsewhere")
    if not np.isfinite(log_probs[~empty]).all():
        refuse("top_k_log_probs", "must be finite where a candidate was captured")
    if bool((empty.any(axis=1) & (sample.loss_mask == 1)).any()):
        refuse("top_k_ids", "must hold a candidate in every place of a token that the loss mask keeps")


def _check_spans(sample: NewSample, refuse: Refuse) -> None:
    reached = 0
    for span in sample.spans:
        if span.start != reached or span.end <= span.start:
            refuse("spans", f"must go on at {reached}, got [{span.start}, {span.end})")
        try:
            WeightVersion.parse(span.weight_version)
        except InvalidInput as error:
            refuse("spans", f"name a version that cannot be read: {error.message}")
        reached = span.end
    if reached != len(sample.response_ids):
        refuse("spans", f"must cover all {len(sample.response_ids)} response tokens, end at {reached}")
