"""Log-probs over a vocabulary that is split over a tensor-parallel group, with exact gradients.

For logits x and temperature T of a position, z = x / T in float32 and p = softmax(z) over the V columns of the model's
configuration; padded columns are selected away. No rank ever holds a row of all V columns, and no more than one chunk
of rows is held in float32: backward computes it again.

    d logsumexp / dz_u = p_u        d log p(y) / dz_u = [u = y] - p_u        dH / dz_u = -p_u (log p_u + H)

The sum over v that these share with the other shards lies in logsumexp and H, which forward saved: so backward needs
no communication, and autograd is not asked to differentiate through a collective.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""Elements of one chunk: 64 MiB in float32, large enough to keep a GPU busy, small beside the logits."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """How the columns of the logits are split. Rank r of n holds columns [r * V_local, (r + 1) * V_local).

    Example: V = 1100 padded to 1280 over two ranks: `VocabShard(1100, group, rank=1, size=2)`, V_local = 640.
    """

    vocab_size: int
    """V of the model's configuration: columns from V on are padding."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None without tensor parallelism."""
    rank: int = 0
    size: int = 1


class TokenStatistics(NamedTuple):
    """Per token [T], float32, differentiable."""

    log_sum_exp: Tensor
    log_probs: Tensor
    entropy: Tensor


def token_statistics(
    logits: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    *,
    logit_rows: Tensor | None = None,
    chunk_rows: int | None = None,
) -> TokenStatistics:
    """Log-sum-exp, log-prob at the id and entropy of every token, in one pass over the logits.

    logits [S, V_local] of any float type; ids int64 [T] on any shard; temperatures float32 [T]; `logit_rows` int64 [T]
    selects the position of each token (None: S = T). Collective over `shard.group`: every rank of it calls with the
    same tokens. A token whose incoming gradient is 0 gets gradient 0, whatever its logits hold.
    Raises: ValueError for shapes that do not fit and ids outside [0, V).
    """
    found = statistics_at_ids(logits, ids[:, None], temperatures, shard, logit_rows, chunk_rows, with_entropy=True)
    return found._replace(log_probs=found.log_probs[:, 0])


def statistics_at_ids(
    logits: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    logit_rows: Tensor | None,
    chunk_rows: int | None = None,
    *,
    with_entropy: bool = False,
) -> TokenStatistics:
    """`token_statistics` for ids [T, K], so that the log-probs are [T, K]. The entropy costs a third: without it, 0."""
    check_inputs(logits, ids, temperatures, shard, logit_rows)
    rows_of_chunk = chunk_rows or rows_of_a_chunk(logits)
    outputs: tuple[Tensor, Tensor, Tensor] = _StatisticsAtIds.apply(  # type: ignore[no-untyped-call]
        logits, ids, temperatures, logit_rows, shard, rows_of_chunk, with_entropy
    )
    return TokenStatistics(*outputs)


def log_sum_exp(logits: Tensor, temperatures: Tensor, shard: VocabShard, *, logit_rows: Tensor | None = None) -> Tensor:
    """log sum_v exp(z_v) [T], like `token_statistics`."""
    none = torch.zeros(len(temperatures), 0, dtype=torch.int64, device=logits.device)
    return statistics_at_ids(logits, none, temperatures, shard, logit_rows).log_sum_exp


def log_probs_at_ids(
    logits: Tensor, ids: Tensor, temperatures: Tensor, shard: VocabShard, *, logit_rows: Tensor | None = None
) -> Tensor:
    """log p(ids) [T], like `token_statistics`."""
    return statistics_at_ids(logits, ids[:, None], temperatures, shard, logit_rows).log_probs[:, 0]


def entropy(logits: Tensor, temperatures: Tensor, shard: VocabShard, *, logit_rows: Tensor | None = None) -> Tensor:
    """-sum_v p_v log p_v [T], like `token_statistics`."""
    none = torch.zeros(len(temperatures), 0, dtype=torch.int64, device=logits.device)
    return statistics_at_ids(logits, none, temperatures, shard, logit_rows, with_entropy=True).entropy


class _StatisticsAtIds(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        ids: Tensor,
        temperatures: Tensor,
        logit_rows: Tensor | None,
        shard: VocabShard,
        chunk_rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = Columns.of(logits, shard)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lse, entropies = torch.zeros(2, len(ids), dtype=dtype, device=logits.device)
        log_probs = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        for chunk in row_chunks(len(ids), chunk_rows):
            z = columns.scaled(logits, temperatures, logit_rows, chunk)
            top = z.amax(-1) if columns.count else torch.full_like(lse[chunk], -torch.inf)
            all_reduce(top, dist.ReduceOp.MAX, shard)
            z -= top[:, None]
            local, owned = columns.local_ids(ids[chunk])
            targets = z.gather(1, local).masked_fill(~owned, 0) if columns.count else torch.zeros_like(log_probs[chunk])
            weights = z.exp_()
            spread = torch.special.entr(weights).sum(-1) if with_entropy else torch.zeros_like(top)
            sums = torch.cat([torch.stack([weights.sum(-1), spread], 1), targets], 1)
            all_reduce(sums, dist.ReduceOp.SUM, shard)
            log_total = sums[:, 0].log()
            lse[chunk] = top + log_total
            log_probs[chunk] = sums[:, 2:] - log_total[:, None]
            if with_entropy:
                entropies[chunk] = log_total + sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(logits, ids, temperatures, logit_rows, lse, entropies)  # type: ignore[arg-type]
        ctx.columns, ctx.chunk_rows = columns, chunk_rows  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return lse, log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_lse: Tensor | None, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, ids, temperatures, logit_rows, lse, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        columns: Columns = ctx.columns  # type: ignore[attr-defined]
        grad_logits = torch.zeros_like(logits)
        of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        of_log_probs = torch.zeros(ids.shape, dtype=lse.dtype, device=lse.device)
        of_log_probs = of_log_probs if grad_log_probs is None else grad_log_probs
        of_entropy = torch.zeros_like(lse) if grad_entropy is None else grad_entropy
        for chunk in row_chunks(len(ids), ctx.chunk_rows):  # type: ignore[attr-defined]
            if not columns.count:
                break
            log_p = columns.scaled(logits, temperatures, logit_rows, chunk).sub_(lse[chunk, None])
            # Without an entropy log p is not needed again: a chunk less of memory.
            grad = log_p.exp_() if grad_entropy is None else log_p.exp()
            factor = (of_lse[chunk] - of_log_probs[chunk].sum(-1))[:, None]
            if grad_entropy is not None:
                # A column of logit -inf has p = 0 and no gradient; -inf would make 0 * inf of it.
                log_p.clamp_(min=torch.finfo(log_p.dtype).min / 4)
                factor = factor - of_entropy[chunk, None] * (log_p + entropies[chunk, None])
            grad *= factor
            local, owned = columns.local_ids(ids[chunk])
            grad.scatter_add_(1, local, of_log_probs[chunk] * owned)
            idle = (of_lse[chunk] == 0) & (of_log_probs[chunk] == 0).all(-1) & (of_entropy[chunk] == 0)
            columns.add_gradient(grad_logits, grad, idle, temperatures, logit_rows, chunk)
        return grad_logits, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of this shard that are tokens: the first `count`; the rest is padding."""

    first: int
    count: int

    @classmethod
    def of(cls, logits: Tensor, shard: VocabShard) -> "Columns":
        first = shard.rank * logits.shape[1]
        return cls(first, min(max(shard.vocab_size - first, 0), logits.shape[1]))

    def scaled(self, logits: Tensor, temperatures: Tensor, logit_rows: Tensor | None, chunk: slice) -> Tensor:
        """z = x / T [chunk, count], a new tensor in float32 (float64 logits stay float64)."""
        rows = logits[chunk] if logit_rows is None else logits[logit_rows[chunk]]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return rows[:, : self.count].to(dtype, copy=True).div_(temperatures[chunk, None])

    def add_gradient(
        self,
        grad_logits: Tensor,
        grad: Tensor,
        idle: Tensor,
        temperatures: Tensor,
        logit_rows: Tensor | None,
        chunk: slice,
    ) -> None:
        """Adds dL/dz [chunk, count] to dL/dx [S, V_local] and overwrites it; `idle` bool [chunk] marks tokens without
        a gradient."""
        grad = grad.div_(temperatures[chunk, None]).masked_fill_(idle[:, None], 0).to(grad_logits.dtype)
        own = grad_logits[:, : self.count]
        if logit_rows is None:
            own[chunk] = grad
        else:
            own.index_add_(0, logit_rows[chunk], grad)

    def local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the ids, 0 where another shard owns them, and whether this one does."""
        local = ids - self.first
        owned = (local >= 0) & (local < self.count)
        return local.masked_fill(~owned, 0), owned


def rows_of_a_chunk(logits: Tensor) -> int:
    """How many rows of these logits make a chunk."""
    return max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))


def row_chunks(total: int, size: int) -> Iterator[slice]:
    """[0, total) in slices of `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, shard: VocabShard) -> None:
    """Reduces in place over the shards; nothing to do without a group."""
    if shard.group is not None:
        dist.all_reduce(values, operation, group=shard.group)


def check_inputs(
    logits: Tensor, ids: Tensor, temperatures: Tensor, shard: VocabShard, logit_rows: Tensor | None
) -> None:
    """Refuses ids [T, ...] outside [0, V) and shapes that do not fit together. Raises: ValueError."""
    tokens = len(ids)
    if logits.ndim != 2 or len(temperatures) != tokens or len(logits if logit_rows is None else logit_rows) != tokens:
        raise ValueError(
            f"expected logits [S, V_local] and one temperature and one row for each of the {tokens} ids, got logits "
            f"{tuple(logits.shape)}, temperatures {tuple(temperatures.shape)}, "
            f"rows {None if logit_rows is None else tuple(logit_rows.shape)}"
        )
    if logits.shape[1] * shard.size < shard.vocab_size:
        raise ValueError(
            f"{shard.size} shards of {logits.shape[1]} columns do not hold the vocabulary of {shard.vocab_size}"
        )
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= shard.vocab_size):
        raise ValueError(f"ids must be in [0, {shard.vocab_size}), got {int(ids.min())}..{int(ids.max())}")
