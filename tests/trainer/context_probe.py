"""One rank of a context-parallel group that runs the core attention alone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from atoll.trainer.megatron.modules import PackedCoreAttention
from atoll.trainer.megatron.packing import zigzag_positions
from atoll.trainer.workers.group import WorkerPlace
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

HEADS, KV_HEADS, WIDTH = 4, 2, 8


@dataclass(frozen=True)
class Groups:
    """The process groups the attention asks for."""

    cp: dist.ProcessGroup | None


def packed_inputs(lengths: list[int]) -> list[torch.Tensor]:
    """query, key, value and the output's gradient of rows of these lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (HEADS * WIDTH,)]
    return [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes]


class ContextRank:
    """Holds its zigzag share of every row."""

    def __init__(self, place: WorkerPlace) -> None:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        self._place = place

    def attend(self, lengths: list[int]) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
        """(places in the pack that this rank holds, output and gradients of query, key and value there)."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        held = torch.cat(
            [
                start + torch.as_tensor(zigzag_positions(length, self._place.size, self._place.rank))
                for start, length in zip(starts, lengths, strict=True)
            ]
        )
        query, key, value, gradient = (x[held].requires_grad_() for x in packed_inputs(lengths))
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * WIDTH,
            num_attention_heads=HEADS,
            num_query_groups=KV_HEADS,
            kv_channels=WIDTH,
            use_cpu_initialization=True,
        )
        attention = PackedCoreAttention(
            config, 1, AttnMaskType.causal, "self", pg_collection=Groups(cp=dist.group.WORLD)
        )
        boundaries = torch.tensor([*starts, sum(lengths)], dtype=torch.int32)
        longest = max(lengths)
        packed = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)
        output = attention(query, key, value, packed_seq_params=packed)
        output.backward(gradient.detach())
        found = [output.detach(), *(x.grad for x in (query, key, value))]
        return held.tolist(), [x.numpy() for x in found if x is not None]
