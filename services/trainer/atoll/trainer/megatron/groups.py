"""Joins this process to the ranks of its worker group and lays out the parallel groups."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Row
from atoll.trainer.megatron.cpu import install_cpu_adapter
from atoll.trainer.megatron.packing import ContextPlace, PackedTokens, pack
from atoll.trainer.megatron.settings import MegatronSettings
from atoll.trainer.workers.group import WorkerPlace
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor


@dataclass(frozen=True)
class Membership:
    """Where this rank stands in the parallel groups.

    Example: the second of two context-parallel ranks: ``Membership(device, ContextPlace(2, 1), group, True, True)``
    """

    device: torch.device
    context: ContextPlace
    context_group: dist.ProcessGroup | None
    """None without context parallelism."""
    is_last_stage: bool
    """Whether losses are computed here."""
    speaks: bool
    """Whether this rank answers for its copy of the model."""

    def shard(self, vocab_size: int) -> VocabShard:
        """This rank's columns of the logits."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        if size == 1:
            return VocabShard(vocab_size)
        rank = parallel_state.get_tensor_model_parallel_rank()
        return VocabShard(vocab_size, parallel_state.get_tensor_model_parallel_group(), rank, size)

    def pack(self, rows: Sequence[Row]) -> PackedTokens:
        """Pack a micro-batch; an empty one becomes a single token that predicts nothing."""
        pairs = [(row.tokens, row.prompt_length) for row in rows]
        return pack(pairs or [(np.zeros(1, dtype=np.int32), 1)], self.device, self.context)

    def sum_over_data(self, values: Tensor) -> Tensor:
        """The sum over data-parallel ranks, whose rows differ; context-parallel ranks have the same rows."""
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.to(values.device)

    def from_last_stage(self, value: object) -> object:
        """The last pipeline stage's picklable value, on every stage of its column."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return value
        box = [value]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, source, group=group, device=self.device)
        return box[0]


def join_groups(place: WorkerPlace, settings: MegatronSettings, timeout_s: float) -> Membership:
    """Start torch.distributed (NCCL with CUDA, else gloo) and megatron's groups.

    A collective that waits longer than ``timeout_s`` seconds fails. Raises `ValueError` when the layout does not
    fill the group.
    """
    layout = settings.layout
    if layout.world_size != place.size:
        raise ValueError(f"parallel layout {layout}: expected {layout.world_size} ranks, got {place.size}")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        install_cpu_adapter()
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
    )
    # Every rank draws the same numbers: with dropout 0 only shared decisions may depend on them.
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(settings.seed)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    return Membership(
        device=device,
        context=ContextPlace(layout.context, parallel_state.get_context_parallel_rank()),
        context_group=parallel_state.get_context_parallel_group() if layout.context > 1 else None,
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        speaks=layout.speaks(place.rank),
    )
