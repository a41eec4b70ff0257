"""Layers that take the place of megatron-core's where its own refuse packed rows, GQA or sequence parallel."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from atoll.trainer.megatron.packing import zigzag_positions
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm (Zhang and Sennrich, 2019), marked so that sequence parallel sums its gradient over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _GatherOverContext(torch.autograd.Function):
    """[s_local, ...] on every context rank -> [cp, s_local, ...]; the gradient is summed back to its owner."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(pieces, x, group=group)
        return torch.stack(pieces)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient[group.rank()], None


class ValueHead(torch.nn.Linear):
    """A critic's output layer: one value of every position [t, 1, h] -> [t, 1, 1], whole on every tensor-parallel rank.

    It is called like megatron-core's output layer, whose place it takes.
    """

    def __init__(self, hidden_size: int, *, zero_init: bool) -> None:
        super().__init__(hidden_size, 1)
        self._zero_init = zero_init
        self.reset()

    def reset(self) -> None:
        """As before the first step."""
        with torch.no_grad():
            self.bias.zero_()
            if self._zero_init:
                self.weight.zero_()
            else:
                # Of the shape alone, so that every rank and every restart draws the same.
                generator = torch.Generator().manual_seed(self.in_features)
                self.weight.copy_(torch.randn(self.weight.shape, generator=generator) / math.sqrt(self.in_features))

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """hidden [t, 1, h] -> values [t, 1, 1]; the other arguments are those of an output layer and unused."""
        return super().forward(hidden), None


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention through torch's scaled_dot_product_attention over packed rows (``thd``), with grouped queries.

    Under context parallel each row is held in zigzag order and keys and values are gathered over the group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self._context: dist.ProcessGroup = groups.cp
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d]; t runs over all packed rows."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("attention expected packed rows (qkv_format 'thd'), got an unpacked batch")
        boundaries: Tensor = packed_seq_params.cu_seqlens_q
        lengths = ((boundaries[1:] - boundaries[:-1]) // self._context.size()).tolist()
        rows = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        out = torch.cat([self._attend_row(q, k, v) for q, k, v in rows])
        return out.reshape(out.size(0), -1)

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if self._context.size() > 1:
            size, length = self._context.size(), q.size(0) * self._context.size()
            held = [torch.as_tensor(zigzag_positions(length, size, rank)) for rank in range(size)]
            order = torch.argsort(torch.cat(held)).to(q.device)
            k, v = (
                _GatherOverContext.apply(x, self._context).flatten(0, 1).index_select(0, order)  # type: ignore[no-untyped-call]
                for x in (k, v)
            )
            mask = (torch.arange(length)[None, :] <= held[self._context.rank()][:, None]).to(q.device)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, t, d]
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
