"""Packs rows end to end into the one sequence that a micro-batch is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll.families.rows import Int32
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class PackedTokens:
    """Rows of P_i prompt and R_i response tokens. t = sum (P_i + R_i), n = sum R_i."""

    ids: Tensor
    """int64 [1, t]"""
    positions: Tensor
    """int64 [1, t], from 0 in each row"""
    boundaries: PackedSeqParams
    predictors: Tensor
    """int64 [n]: the place in the pack whose logits predict each response token, row after row"""
    response_lengths: tuple[int, ...]
    """R_i"""


def pack(rows: Sequence[tuple[Int32, int]], device: torch.device) -> PackedTokens:
    """Pack (tokens [P+R], P) pairs; P is at least 1."""
    lengths = [len(tokens) for tokens, _ in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    predictors = [
        np.arange(start + prompt - 1, start + length - 1)
        for start, length, (_, prompt) in zip(starts[:-1], lengths, rows, strict=True)
    ]
    cumulative = torch.tensor(starts, dtype=torch.int32, device=device)
    # The longest row, never the total: RoPE takes the total to mean that positions run on from row to row.
    longest = max(lengths)
    return PackedTokens(
        ids=torch.as_tensor(np.concatenate([tokens for tokens, _ in rows]), dtype=torch.int64, device=device)[None],
        positions=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        boundaries=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        predictors=torch.as_tensor(np.concatenate(predictors), dtype=torch.int64, device=device),
        response_lengths=tuple(length - prompt for length, (_, prompt) in zip(lengths, rows, strict=True)),
    )
