"""Reads and writes the whole weights of a model that is spread over ranks, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from atoll.trainer.megatron.architecture import Architecture
from atoll.trainer.megatron.weights import Cut, cut_shard, join_parts, merge_shards, split_parts, weight_table
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor


def local_shards(
    architecture: Architecture, padded_vocab: int, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name, this rank's float32 shard) of each parameter in turn; ``read`` gets Hugging Face names."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for entry in weight_table(architecture):
        parts = [read(name).float() for name in entry.parts]
        whole = join_parts(entry, parts, architecture, padded_vocab)
        yield entry.megatron, cut_shard(entry, whole, size, rank)


@torch.no_grad()
def load_weights(model: GPTModel, architecture: Architecture, padded_vocab: int, read: Callable[[str], Tensor]) -> None:
    """Overwrite every parameter of this rank. Raises `ValueError` when the table and the model disagree."""
    parameters = dict(model.named_parameters())
    for name, shard in local_shards(architecture, padded_vocab, read):
        parameter = parameters.pop(name)
        if parameter.shape != shard.shape:
            raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(shard.shape)}")
        parameter.copy_(shard)
    if parameters:
        raise ValueError(f"the weight table misses {sorted(parameters)}: the model has more than a dense decoder")


def gather_weights(
    model: GPTModel, architecture: Architecture, pick: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor on the host) of every parameter, in the table's order, on every rank.

    A collective over the tensor-parallel group. ``pick`` chooses what to gather of a parameter, such as its gradient.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    parameters = dict(model.named_parameters())
    for entry in weight_table(architecture):
        shard = pick(parameters[entry.megatron]).detach().contiguous()
        shards = [shard]
        if group.size() > 1 and entry.cut is not Cut.WHOLE:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard, group=group)
        whole = merge_shards(entry, shards)
        yield from zip(entry.parts, (part.cpu() for part in split_parts(entry, whole, architecture)), strict=True)
