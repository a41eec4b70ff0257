"""The sampler's head of every token, which score centering reads: checked and cut to K ids before the step."""

import numpy as np
import numpy.typing as npt
from atoll.families.refusals import sample_refused
from atoll.families.rows import Column, ColumnDtype, ColumnSpec, Float32, Int32, Row, UInt8

HEAD_IDS = "sampler_topk_ids"
"""int32 [R, K] the K most likely ids of the distribution that the engine sampled from, most likely first."""
HEAD_LOG_PROBS = "sampler_topk_log_probs"
"""float32 [R, K] their log-probs, of the same distribution as the row's `rollout_log_probs`."""
HEAD_COLUMNS = (
    ColumnSpec(HEAD_IDS, ColumnDtype.INT32, response_aligned=True),
    ColumnSpec(HEAD_LOG_PROBS, ColumnDtype.FLOAT32, response_aligned=True),
)

MAX_EXCESS_MASS = 1e-3
"""A head's probabilities, rounded by the engine, may add up to this much above 1."""
MAX_DISAGREEMENT = 1e-3
"""Between the head's entry for the sampled token and its recorded log-prob."""


def sampler_head_columns(
    row: Row, mask: UInt8, ids: Int32 | None, log_probs: Float32 | None, *, top_k: int, vocab_size: int
) -> dict[str, Column]:
    """The two columns of a row: the first `top_k` of what was recorded, checked on every trained token.

    mask [R] the effective mask; ids and log_probs [R, K'], K' >= top_k. Under the mask anything goes.
    Raises: InvalidInput naming the sample, the position and what is wrong with its head.
    """
    if ids is None or log_probs is None:
        raise _refused(row, f"no top-k was recorded; set the gateway's capture_top_k to at least {top_k}")
    length = row.response_length
    if ids.ndim != 2 or ids.shape != log_probs.shape or len(ids) != length or ids.shape[1] < top_k:
        raise _refused(
            row,
            f"a head of {top_k} ids for each of the {length} response tokens expected, got ids {list(ids.shape)} and "
            f"log-probs {list(log_probs.shape)}",
        )
    ids = np.ascontiguousarray(ids[:, :top_k], dtype=np.int32)
    log_probs = np.ascontiguousarray(log_probs[:, :top_k], dtype=np.float32)
    trained = np.flatnonzero(mask)
    _check_heads(row, trained, ids[trained], log_probs[trained], vocab_size)
    return {HEAD_IDS: ids, HEAD_LOG_PROBS: log_probs}


def _check_heads(row: Row, trained: Column, ids: Int32, log_probs: Float32, vocab_size: int) -> None:
    """Refuses the first bad head of [n, K]; `trained` holds their response positions."""

    def refuse_where(bad: npt.ArrayLike, problem: str) -> None:
        places = np.flatnonzero(bad)
        if len(places):
            raise _refused(row, f"the head of response token {trained[places[0]]} {problem}")

    finite = np.isfinite(log_probs)
    if not finite.all():
        refuse_where(~finite.all(-1), "has a log-prob that is not finite")
    lowest, highest = ids.min(-1, initial=0), ids.max(-1, initial=0)
    refuse_where(lowest < 0, "is short: it has fewer ids than the head needs, or a negative one")
    refuse_where(highest >= vocab_size, f"has an id outside the vocabulary of {vocab_size}")
    ordered = np.sort(ids, axis=-1)
    refuse_where((ordered[:, 1:] == ordered[:, :-1]).any(-1), "holds an id twice")
    refuse_where((log_probs[:, 1:] > log_probs[:, :-1]).any(-1), "is not in descending order")
    refuse_where(np.exp(log_probs).sum(-1) > 1 + MAX_EXCESS_MASS, "has a probability mass above 1")
    sampled = ids == row.response_tokens[trained][:, None]
    disagreement = np.abs(np.where(sampled, log_probs - row.rollout_log_probs[trained][:, None], 0)).max(-1, initial=0)
    refuse_where(
        disagreement > MAX_DISAGREEMENT,
        "disagrees with the recorded log-prob of the sampled token: its rows are shifted, or of another distribution",
    )


def _refused(row: Row, problem: str) -> Exception:
    return sample_refused(row.sample_id, f"score centering: {problem}", field=HEAD_IDS)
