"""Packs rows end to end into the one sequence that a micro-batch is, or into this rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from atoll.families.rows import Int32
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContextPlace:
    """A rank of a context-parallel group. Example: ``ContextPlace(size=2, rank=1)``"""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class PackedTokens:
    """Rows of P_i prompt and R_i response tokens: the t of them that this context-parallel rank holds.

    n of the places held predict a response token.
    """

    ids: Tensor
    """int64 [1, t]"""
    positions: Tensor
    """int64 [1, t], from 0 in each row"""
    boundaries: PackedSeqParams
    """Of the whole rows, which are padded to a multiple of twice the context-parallel size."""
    predictors: Tensor
    """int64 [n]: the place among the t whose logits predict each response token, row after row"""
    response_positions: tuple[Int64, ...]
    """By row: which of its response tokens, 0 to R_i - 1, are predicted here, in the order of ``predictors``"""


def zigzag_positions(length: int, size: int, rank: int) -> Int64:
    """Positions that a context-parallel rank holds: chunks ``rank`` and ``2 size - 1 - rank`` of 2 ``size`` equal ones.

    Returns int64 [length / size]. Each rank gets an early and a late chunk, so causal work is even. ``length`` must be
    a multiple of 2 ``size``.
    """
    chunk = length // (2 * size)
    late = 2 * size - 1 - rank
    return np.concatenate(
        [np.arange(rank * chunk, (rank + 1) * chunk), np.arange(late * chunk, (late + 1) * chunk)], dtype=np.int64
    )


def pack(rows: Sequence[tuple[Int32, int]], device: torch.device, context: ContextPlace | None = None) -> PackedTokens:
    """Pack (tokens [P+R], P) pairs; P is at least 1."""
    place = context or ContextPlace()
    lengths = [_padded(len(tokens), place.size) for tokens, _ in rows]
    held = [_held(length, place) for length in lengths]
    ids, predictors, response_positions = [], [], []
    start = 0
    for (tokens, prompt), length, here in zip(rows, lengths, held, strict=True):
        # Padding comes after every real token of its row, so causal attention never sees it.
        ids.append(np.pad(tokens, (0, length - len(tokens)))[here])
        predicts = (here >= prompt - 1) & (here < len(tokens) - 1)
        predictors.append(start + np.flatnonzero(predicts))
        response_positions.append(here[predicts] - (prompt - 1))
        start += len(here)
    cumulative = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    # The longest row, never the total: RoPE takes the total to mean that positions run on from row to row.
    longest = max(lengths)
    return PackedTokens(
        ids=torch.as_tensor(np.concatenate(ids), dtype=torch.int64, device=device)[None],
        positions=torch.as_tensor(np.concatenate(held), dtype=torch.int64, device=device)[None],
        boundaries=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        predictors=torch.as_tensor(np.concatenate(predictors), dtype=torch.int64, device=device),
        response_positions=tuple(response_positions),
    )


def _padded(length: int, size: int) -> int:
    multiple = 2 * size if size > 1 else 1
    return -(-length // multiple) * multiple


def _held(length: int, place: ContextPlace) -> Int64:
    return zigzag_positions(length, place.size, place.rank) if place.size > 1 else np.arange(length, dtype=np.int64)
