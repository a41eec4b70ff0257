"""Forward-only passes: rows go through the model, a function reads their logits, and every rank gets whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from atoll.families.losses.vocab import VocabShard, log_probs_at_ids
from atoll.families.rows import Row
from atoll.trainer.megatron.forward import ResponseModel
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.packing import Int64
from atoll.trainer.megatron.row_plan import cut_rows
from atoll.trainer.megatron.settings import MicroBatchLimit
from torch import Tensor

Places = Sequence[Int64]
"""By row of a micro-batch: the response positions that this rank's logits predict."""
ReadLogits = Callable[[Sequence[int], Places, Tensor], Mapping[str, Tensor]]
"""(indices of the micro-batch's rows, their places, logits [n, V_local]) -> tensors [n, ...] by name"""


def read_rows(
    responses: ResponseModel, rows: Sequence[Row], read: ReadLogits, member: Membership, limit: MicroBatchLimit
) -> list[Mapping[str, Tensor]]:
    """For each row, what ``read`` found as [R, ...] on the host, put together over the context-parallel group.

    Without gradients. A collective over this copy of the model, whose ranks have the same rows. On a pipeline stage
    before the last ``read`` is not called and the mappings are empty.
    """
    if not rows:
        return []
    cuts = cut_rows(range(len(rows)), [len(row.tokens) for row in rows], limit)
    packs = [member.pack([rows[i] for i in indices]) for indices in cuts]

    def of_logits(number: int, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        kept = read(cuts[number], packs[number].response_positions, logits)
        return logits.new_zeros(()), {name: tensor.detach() for name, tensor in kept.items()}

    found: list[Mapping[str, Tensor]] = []
    for indices, packed, kept in zip(cuts, packs, responses.run(packs, of_logits, backward=False), strict=True):
        lengths = [rows[i].response_length for i in indices]
        whole = {name: _whole(kept[name], packed.response_positions, lengths, member) for name in sorted(kept)}
        split = {name: torch.split(tensor, lengths) for name, tensor in whole.items()}
        found += [{name: pieces[i] for name, pieces in split.items()} for i in range(len(indices))]
    return found


def response_log_probs(
    responses: ResponseModel, rows: Sequence[Row], shard: VocabShard, member: Membership, limit: MicroBatchLimit
) -> list[Tensor]:
    """float32 [R] of every row, at its temperature, on the host; empty on a stage before the last. See `read_rows`."""

    def read(indices: Sequence[int], places: Places, logits: Tensor) -> Mapping[str, Tensor]:
        ids = np.concatenate([rows[i].response_tokens[at] for i, at in zip(indices, places, strict=True)])
        temperatures = np.repeat([rows[i].temperature for i in indices], [len(at) for at in places])
        log_probs = log_probs_at_ids(
            logits,
            torch.as_tensor(ids, dtype=torch.int64, device=logits.device),
            torch.as_tensor(temperatures, dtype=torch.float32, device=logits.device),
            shard,
        )
        return {"log_probs": log_probs.float()}

    found = read_rows(responses, rows, read, member, limit)
    return [each["log_probs"] for each in found] if member.is_last_stage else []


def _whole(piece: Tensor, places: Places, lengths: Sequence[int], member: Membership) -> Tensor:
    """[sum of R, ...] on the host of what the context-parallel ranks hold between them."""
    if member.context_group is None:
        return piece.cpu()
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    at = np.concatenate([start + place for start, place in zip(starts, places, strict=True)])
    # gloo adds up no booleans. Each place has one owner and zeros from the others, so the sum is what the owner had.
    numbers = piece.to(torch.uint8) if piece.dtype is torch.bool else piece
    whole = numbers.new_zeros(sum(lengths), *piece.shape[1:])
    whole[torch.as_tensor(at, dtype=torch.int64, device=piece.device)] = numbers
    dist.all_reduce(whole, group=member.context_group)
    return whole.to(piece.dtype).cpu()
