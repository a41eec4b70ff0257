"""The table between Hugging Face and Megatron weights of dense Llama, Qwen2 and Qwen3, and the tensor-parallel cuts.

One Megatron tensor stands for one or more Hugging Face tensors (``parts``):

* ``linear_qkv`` interleaves by key/value group: the group's query heads, its key head, its value head;
* ``linear_fc1`` is [gate; up], and each half is cut apart, so a rank holds [gate shard; up shard];
* the embedding and the output layer have padding rows from ``vocab_size`` on, which are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from atoll.trainer.megatron.architecture import Architecture
from torch import Tensor


class Cut(Enum):
    """How a Megatron tensor is split over tensor-parallel ranks."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    GATE_UP = "gate_up"
    """Rows, the gate half and the up half apart."""


class Join(Enum):
    """How the Hugging Face parts make up the whole Megatron tensor."""

    SAME = "same"
    VOCABULARY = "vocabulary"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor.

    Example: ``Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Join.SAME, Cut.WHOLE)``
    """

    megatron: str
    """Name with the layer's global number."""
    parts: tuple[str, ...]
    join: Join
    cut: Cut


def weight_table(architecture: Architecture) -> list[Entry]:
    """Every parameter of the model, in layer order. A tied output layer is the embedding and has no entry."""
    table = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Join.VOCABULARY, Cut.ROWS)]
    for layer in range(architecture.layers):
        table += _layer_entries(architecture, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    table.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Join.SAME, Cut.WHOLE))
    if not architecture.tied:
        table.append(Entry("output_layer.weight", ("lm_head.weight",), Join.VOCABULARY, Cut.ROWS))
    return table


def tied_output_entry() -> Entry:
    """The output layer of a tied model where it is a parameter of its own: on a last stage without the embedding."""
    return Entry("output_layer.weight", ("model.embed_tokens.weight",), Join.VOCABULARY, Cut.ROWS)


def _layer_entries(architecture: Architecture, ours: str, theirs: str) -> list[Entry]:
    def same(megatron: str, name: str, cut: Cut = Cut.WHOLE) -> Entry:
        return Entry(f"{ours}{megatron}.weight", (f"{theirs}{name}.weight",), Join.SAME, cut)

    def qkv(kind: str) -> Entry:
        parts = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
        return Entry(f"{ours}self_attention.linear_qkv.{kind}", parts, Join.QKV, Cut.ROWS)

    gate_up = tuple(f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up"))
    entries = [
        same("input_layernorm", "input_layernorm"),
        qkv("weight"),
        same("self_attention.linear_proj", "self_attn.o_proj", Cut.COLUMNS),
        same("pre_mlp_layernorm", "post_attention_layernorm"),
        Entry(f"{ours}mlp.linear_fc1.weight", gate_up, Join.GATE_UP, Cut.GATE_UP),
        same("mlp.linear_fc2", "mlp.down_proj", Cut.COLUMNS),
    ]
    if architecture.qkv_bias:
        entries.append(qkv("bias"))
    if architecture.qk_norm:
        entries += [same(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm") for x in "qk"]
    return entries


def join_parts(entry: Entry, parts: Sequence[Tensor], architecture: Architecture, padded_vocab: int) -> Tensor:
    """Hugging Face tensors -> the whole Megatron tensor."""
    if entry.join is Join.SAME:
        return parts[0]
    if entry.join is Join.GATE_UP:
        return torch.cat(tuple(parts))
    if entry.join is Join.VOCABULARY:
        weight = parts[0]
        padding = weight.new_zeros(padded_vocab - weight.shape[0], weight.shape[1])
        return torch.cat([weight, padding])
    groups, head = architecture.kv_heads, architecture.head_dim
    rest = parts[0].shape[1:]
    grouped = [part.reshape(groups, -1, head, *rest) for part in parts]  # [groups, heads of the group, head, ...]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def split_parts(entry: Entry, whole: Tensor, architecture: Architecture) -> list[Tensor]:
    """The whole Megatron tensor -> Hugging Face tensors, in the order of ``entry.parts``. Inverse of `join_parts`."""
    if entry.join is Join.SAME:
        return [whole]
    if entry.join is Join.GATE_UP:
        return list(whole.chunk(2))
    if entry.join is Join.VOCABULARY:
        return [whole[: architecture.vocab_size]]
    groups, head = architecture.kv_heads, architecture.head_dim
    per_group = architecture.heads // groups
    rest = whole.shape[1:]
    grouped = whole.reshape(groups, per_group + 2, head, *rest)
    return [part.reshape(-1, *rest) for part in torch.split(grouped, [per_group, 1, 1], dim=1)]


def cut_shard(entry: Entry, whole: Tensor, size: int, rank: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel ``rank`` of ``size`` holds."""
    if entry.cut is Cut.WHOLE:
        return whole
    if entry.cut is Cut.ROWS:
        return whole.chunk(size, 0)[rank]
    if entry.cut is Cut.COLUMNS:
        return whole.chunk(size, 1)[rank]
    gate, up = whole.chunk(2)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def merge_shards(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """Inverse of `cut_shard`, shards in rank order."""
    if entry.cut is Cut.WHOLE:
        return shards[0]
    if entry.cut is Cut.ROWS:
        return torch.cat(tuple(shards), 0)
    if entry.cut is Cut.COLUMNS:
        return torch.cat(tuple(shards), 1)
    halves = [shard.chunk(2) for shard in shards]
    return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
