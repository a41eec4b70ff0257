"""Reads and writes the whole weights of a model that is spread over ranks, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from atoll.trainer.megatron.architecture import Architecture
from atoll.trainer.megatron.modules import ValueHead
from atoll.trainer.megatron.weights import (
    Cut,
    Entry,
    cut_shard,
    join_parts,
    merge_shards,
    split_parts,
    tied_output_entry,
    weight_table,
)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

Reader = Callable[[str], Tensor]
"""Hugging Face name -> the whole tensor"""


def local_shards(
    model: GPTModel, architecture: Architecture, padded_vocab: int, read: Reader
) -> Iterator[tuple[str, Tensor]]:
    """(name in ``model``, this rank's float32 shard) of each of its parameters in turn, a value head's left out."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    names = _names_by_table(model)
    table = [*weight_table(architecture), *([tied_output_entry()] if architecture.tied else [])]
    for entry in table:
        if entry.megatron in names:
            parts = [read(name).float() for name in entry.parts]
            whole = join_parts(entry, parts, architecture, padded_vocab)
            yield names[entry.megatron], cut_shard(entry, whole, size, rank)


@torch.no_grad()
def load_weights(model: GPTModel, architecture: Architecture, padded_vocab: int, read: Reader) -> None:
    """Overwrite every parameter of this rank; a value head starts afresh.

    Raises `ValueError` when the table and the model disagree.
    """
    parameters = dict(model.named_parameters())
    for name, shard in local_shards(model, architecture, padded_vocab, read):
        parameter = parameters.pop(name)
        if parameter.shape != shard.shape:
            raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(shard.shape)}")
        parameter.copy_(shard)
    if _has_value_head(model):
        model.output_layer.reset()
        parameters = {name: p for name, p in parameters.items() if not name.startswith("output_layer.")}
    if parameters:
        raise ValueError(f"the weight table misses {sorted(parameters)}: the model has more than a dense decoder")


def gather_weights(
    model: GPTModel, architecture: Architecture, pick: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor on the host) of every parameter, in the table's order, on every rank.

    A collective over the tensor-parallel and the pipeline-parallel group. ``pick`` chooses what to gather of a
    parameter, such as its gradient.
    """
    names = _names_by_table(model)
    parameters = dict(model.named_parameters())
    stage_of = _stages(names)
    for entry in weight_table(architecture):
        here = entry.megatron in names
        whole = _over_tensor_ranks(entry, pick(parameters[names[entry.megatron]]).detach()) if here else None
        whole = _from_stage(whole, stage_of[entry.megatron])
        yield from zip(entry.parts, (part.cpu() for part in split_parts(entry, whole, architecture)), strict=True)


def _over_tensor_ranks(entry: Entry, shard: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [shard.contiguous()]
    if group.size() > 1 and entry.cut is not Cut.WHOLE:
        shards = [torch.empty_like(shards[0]) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
    return merge_shards(entry, shards)


def _stages(names: Mapping[str, str]) -> dict[str, int]:
    """The first pipeline stage that has each parameter."""
    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[list[str]] = [list(names)]
    if group.size() > 1:
        gathered = [[] for _ in range(group.size())]
        dist.all_gather_object(gathered, list(names), group=group)
    return {name: stage for stage, found in reversed(list(enumerate(gathered))) for name in found}


def _from_stage(whole: Tensor | None, stage: int) -> Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        source = dist.get_global_rank(group, stage)
        mine = whole is not None and group.rank() == stage
        described = [(tuple(whole.shape), whole.dtype) if whole is not None and mine else None]
        dist.broadcast_object_list(described, source, group=group)
        if not mine:
            assert described[0] is not None
            shape, dtype = described[0]
            whole = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        assert whole is not None
        whole = whole.contiguous()
        dist.broadcast(whole, source, group=group)
    assert whole is not None
    return whole


def _names_by_table(model: GPTModel) -> dict[str, str]:
    """The table's names, which number layers globally -> this rank's."""
    names = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if not (parts[0] == "output_layer" and _has_value_head(model)):
            names[".".join(parts)] = name
    return names


def _has_value_head(model: GPTModel) -> bool:
    return bool(model.post_process) and isinstance(model.output_layer, ValueHead)
