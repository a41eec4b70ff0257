"""What a loss sees of one micro-batch on one rank: response tokens of all its rows, concatenated.

Shapes: T response tokens of this micro-batch on this rank, B rows, S positions of the forward pass, V_local columns of
this rank's vocabulary shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from atoll.families.losses.vocab import VocabShard
from atoll.families.refusals import sample_refused
from atoll.families.rows import Column, ColumnDtype, ColumnOrigin, ColumnSpec
from atoll.families.steps import TrainRow
from torch import Tensor

_TORCH_DTYPE: Mapping[ColumnDtype, torch.dtype] = {
    ColumnDtype.UINT8: torch.uint8,
    ColumnDtype.INT32: torch.int32,
    ColumnDtype.INT64: torch.int64,
    ColumnDtype.FLOAT16: torch.float16,
    ColumnDtype.FLOAT32: torch.float32,
    ColumnDtype.FLOAT64: torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One micro-batch, aligned to response tokens. Example: rows of 3 and 2 response tokens have T = 5, B = 2."""

    sample_ids: tuple[str, ...]
    """[B]"""
    row_lengths: tuple[int, ...]
    """[B] tokens of each row in this batch; they add up to T."""
    row_of_token: Tensor
    """int64 [T]"""
    tokens: Tensor
    """int64 [T] the response ids y_t."""
    mask: Tensor
    """bool [T] the effective mask."""
    temperatures: Tensor
    """float32 [T]"""
    policy_weights: Tensor
    """float64 [T] weight of each token's policy (or divergence) term in the step's loss."""
    regularizer_weights: Tensor
    """float64 [T] of its entropy and KL terms."""
    metric_weights: Tensor
    """float64 [T] of its metrics."""
    rollout_log_probs: Tensor
    """float32 [T] log q(y_t); anything under the mask."""
    shard: VocabShard
    """How the logits' columns are split over the tensor-parallel group."""
    advantages: Tensor | None = None
    """float32 [T]"""
    old_log_probs: Tensor | None = None
    """float32 [T]; None where the current log-probs, detached, are the old ones."""
    ref_log_probs: Tensor | None = None
    """float32 [T]"""
    old_values: Tensor | None = None
    """float32 [T] the critic's values when the job started."""
    returns: Tensor | None = None
    """float32 [T]"""
    logit_rows: Tensor | None = None
    """int64 [T] the position of [S] that predicts each token; None: the logits are [T, V_local] already."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The family's response-aligned columns with `in_loss_batch`, each [T, ...]."""
    row_columns: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Its other columns with `in_loss_batch`: a tensor for each row, whole on every context-parallel rank."""
    context_group: dist.ProcessGroup | None = None
    """The context-parallel group, over which a row's tokens are split; None without context parallelism."""
    row_trained_tokens: Tensor | None = None
    """int64 [B] the sum of each row's whole effective mask, over all context-parallel ranks."""

    @property
    def total_tokens(self) -> int:
        """T."""
        return len(self.tokens)


def build_loss_batch(
    rows: Sequence[TrainRow],
    *,
    shard: VocabShard,
    device: torch.device | str = "cpu",
    positions: Sequence[npt.NDArray[np.int64]] | None = None,
    logit_rows: Tensor | None = None,
    old_log_probs: Sequence[Tensor] | None = None,
    ref_log_probs: Sequence[Tensor] | None = None,
    columns: Sequence[ColumnSpec] = (),
    context_group: dist.ProcessGroup | None = None,
) -> LossBatch:
    """Concatenates rows into the batch a loss sees. No rows give T = 0.

    `positions` holds, per row, the response positions (0..R-1) that lie on this context-parallel rank, in the order of
    its logits; None means all of them. `old_log_probs` and `ref_log_probs` are per row, already cut to `positions`.
    `columns` are those of `LossFamily.run_columns`; one of origin `worker` that no hook has filled yet is left out.
    Raises: InvalidInput when an id is outside [0, V), naming the sample.
    """
    cuts = [np.arange(item.row.response_length) for item in rows] if positions is None else positions
    lengths = [len(cut) for cut in cuts]

    def gather(of: Callable[[TrainRow], npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        pieces = [of(item)[cut] for item, cut in zip(rows, cuts, strict=True)]
        return _to_tensor(pieces, dtype, device)

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.repeat(np.asarray(values), lengths), dtype=dtype, device=device)

    def concatenate(pieces: Sequence[Tensor] | None) -> Tensor | None:
        if pieces is None:
            return None
        for item, piece, length in zip(rows, pieces, lengths, strict=True):
            if len(piece) != length:
                raise ValueError(f"sample {item.row.sample_id}: {length} log-probs expected, got {len(piece)}")
        return torch.cat([torch.zeros(0), *pieces]).to(device=device, dtype=torch.float32)

    columns = [spec for spec in columns if spec.in_loss_batch and not _is_unfilled(spec, rows)]
    for item in rows:
        _refuse_ids_outside(item, shard.vocab_size)

    def optional(of: Callable[[TrainRow], Column | None]) -> Tensor | None:
        if not all(of(item) is not None for item in rows):
            return None
        pieces = [value[cut] for value, cut in zip(map(of, rows), cuts, strict=True) if value is not None]
        return _to_tensor(pieces, torch.float32, device)

    return LossBatch(
        sample_ids=tuple(item.row.sample_id for item in rows),
        row_lengths=tuple(lengths),
        row_of_token=spread(range(len(rows)), torch.int64),
        tokens=gather(lambda item: item.row.response_tokens, torch.int64),
        mask=gather(lambda item: item.mask, torch.bool),
        temperatures=spread([item.row.temperature for item in rows], torch.float32),
        policy_weights=spread([item.weights.policy for item in rows], torch.float64),
        regularizer_weights=spread([item.weights.regularizer for item in rows], torch.float64),
        metric_weights=spread([item.weights.metric for item in rows], torch.float64),
        rollout_log_probs=gather(lambda item: item.row.rollout_log_probs, torch.float32),
        shard=shard,
        advantages=optional(lambda item: item.advantages),
        old_log_probs=concatenate(old_log_probs),
        ref_log_probs=concatenate(ref_log_probs),
        old_values=optional(lambda item: item.values),
        returns=optional(lambda item: item.returns),
        logit_rows=logit_rows,
        columns={
            spec.name: gather(_column(spec.name), _TORCH_DTYPE[spec.dtype]) for spec in columns if spec.response_aligned
        },
        row_columns={
            spec.name: tuple(torch.as_tensor(item.columns[spec.name], device=device) for item in rows)
            for spec in columns
            if not spec.response_aligned
        },
        context_group=context_group,
        row_trained_tokens=torch.as_tensor([int(item.mask.sum()) for item in rows], dtype=torch.int64, device=device),
    )


def _is_unfilled(spec: ColumnSpec, rows: Sequence[TrainRow]) -> bool:
    return spec.origin is ColumnOrigin.WORKER and not any(spec.name in item.columns for item in rows)


def _column(name: str) -> Callable[[TrainRow], Column]:
    return lambda item: item.columns[name]


def _to_tensor(pieces: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if not pieces:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.as_tensor(np.concatenate(pieces), dtype=dtype, device=device)


def _refuse_ids_outside(item: TrainRow, vocab_size: int) -> None:
    ids = item.row.response_tokens
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise sample_refused(
            item.row.sample_id,
            f"token ids must be in [0, {vocab_size}), got {ids.min()}..{ids.max()}",
            field="tokens",
        )
