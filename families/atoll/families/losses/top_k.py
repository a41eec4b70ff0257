"""The K most likely ids of every token, and log-probs at K ids, over a vocabulary that is split into shards.

Ids are ordered by (logit descending, id ascending) on every layout: logits in bfloat16 tie at the K-th place in most
rows, and the set must not depend on how the columns are split.
"""

import torch
import torch.distributed as dist
from atoll.families.losses.vocab import Columns, VocabShard, row_chunks, rows_of_a_chunk, statistics_at_ids
from torch import Tensor


@torch.no_grad()
def top_k_ids(
    logits: Tensor, k: int, shard: VocabShard, *, logit_rows: Tensor | None = None, chunk_rows: int | None = None
) -> Tensor:
    """int64 [T, K]: the ids of the K largest logits of every token, largest first, ties by the lower id.

    logits [S, V_local]; `logit_rows` int64 [T] selects the position of each token (None: S = T). A NaN logit counts
    as the smallest. The same on every rank of `shard.group`, which all take part.
    Raises: ValueError for K outside [1, V].
    """
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"top-k must be in [1, {shard.vocab_size}], the size of the vocabulary, got {k}")
    columns = Columns.of(logits, shard)
    total = len(logits) if logit_rows is None else len(logit_rows)
    ids = torch.empty(total, k, dtype=torch.int64, device=logits.device)
    for chunk in row_chunks(total, chunk_rows or rows_of_a_chunk(logits)):
        rows = logits[chunk] if logit_rows is None else logits[logit_rows[chunk]]
        own = _own_top_k(rows[:, : columns.count], min(k, logits.shape[1]), columns.first, shard)
        ids[chunk] = own[1] if shard.group is None else _merged(*own, k, shard)
    return ids


def _own_top_k(rows: Tensor, k: int, first: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Values and global ids [n, k] of this shard's best, in order; places that it cannot fill come last."""
    available = min(k, rows.shape[1])
    values = torch.full((len(rows), k), -torch.inf, dtype=torch.promote_types(rows.dtype, torch.float32))
    values = values.to(rows.device)
    # Beyond every real id, so that a real logit of -inf goes before an empty place.
    ids = torch.full((len(rows), k), shard.vocab_size, dtype=torch.int64, device=rows.device)
    if available == 0 or len(rows) == 0:
        return values, ids
    rows = rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # torch.topk breaks ties as it likes: take from it only the K-th value, then the lowest ids that have it.
    boundary = rows.topk(available, dim=-1).values[:, -1:]
    chosen = rows >= boundary
    if int(chosen.sum()) > available * len(rows):
        above = rows > boundary
        wanted = available - above.sum(-1, keepdim=True)
        ties = chosen & ~above
        chosen = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= wanted))
    places = chosen.nonzero()[:, 1].view(len(rows), available)
    found, order = rows.gather(1, places).sort(dim=-1, descending=True, stable=True)
    values[:, :available] = found.to(values.dtype)
    ids[:, :available] = places.gather(1, order) + first
    return values, ids


def _merged(values: Tensor, ids: Tensor, k: int, shard: VocabShard) -> Tensor:
    all_values = [torch.empty_like(values) for _ in range(shard.size)]
    all_ids = [torch.empty_like(ids) for _ in range(shard.size)]
    dist.all_gather(all_values, values.contiguous(), group=shard.group)
    dist.all_gather(all_ids, ids.contiguous(), group=shard.group)
    # Shards follow each other by id, so a stable sort keeps ties in the order of their ids; empty places have none.
    together, every = torch.cat(all_values, 1), torch.cat(all_ids, 1)
    by_id = every.sort(dim=-1, stable=True).indices
    together, every = together.gather(1, by_id), every.gather(1, by_id)
    order = together.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return every.gather(1, order)


def log_probs_at_top_ids(
    logits: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    *,
    logit_rows: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """log p at K ids of every token, float32 [T, K], differentiable.

    logits [S, V_local]; ids int64 [T, K] on any shard, repeated or not; temperatures float32 [T]. Collective over
    `shard.group`. A token whose incoming gradient is 0 gets gradient 0, whatever its logits hold.
    Raises: ValueError for shapes that do not fit and ids outside [0, V).
    """
    return statistics_at_ids(logits, ids, temperatures, shard, logit_rows, chunk_rows).log_probs
