"""Runs micro-batches through megatron-core's schedule: response logits to a function, with or without backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from atoll.trainer.megatron.packing import PackedTokens
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

LossOfLogits = Callable[[int, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(micro-batch number, logits [n, V_local]) -> (partial loss of this micro-batch, what to keep)"""


class ResponseModel:
    """A wrapped model whose output layer sees only the places that predict response tokens.

    Prompts are never projected onto the vocabulary: that saves their share of the logits' memory and time.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._predictors: Tensor | None = None
        self._is_last_stage = bool(model.module.post_process)
        if self._is_last_stage:
            model.module.output_layer.register_forward_pre_hook(self._keep_predictors)

    def run(
        self, micro_batches: Sequence[PackedTokens], of_logits: LossOfLogits, *, backward: bool
    ) -> list[Mapping[str, Tensor]]:
        """What ``of_logits`` kept of each micro-batch, in order. With ``backward``, gradients are added up.

        On a pipeline stage before the last ``of_logits`` is not called and nothing is kept. A collective over this
        rank's copy of the model; with ``backward``, at its end over all copies.
        """
        packs = iter(enumerate(micro_batches))

        def forward_step(
            data: Iterator[tuple[int, PackedTokens]], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Mapping[str, Tensor]]]]:
            number, pack = next(data)
            self._predictors = pack.predictors
            output = model(pack.ids, pack.positions, None, packed_seq_params=pack.boundaries)

            def loss_function(output: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
                loss, kept = of_logits(number, output[0])
                return loss, torch.zeros((), dtype=torch.int, device=output.device), kept

            return output, loss_function

        run_schedule = get_forward_backward_func()
        with torch.set_grad_enabled(backward):
            kept: list[Mapping[str, Tensor]] = run_schedule(
                forward_step_func=forward_step,
                data_iterator=packs,
                model=[self._model],
                num_microbatches=len(micro_batches),
                seq_length=max(pack.ids.shape[1] for pack in micro_batches),
                micro_batch_size=1,
                forward_only=not backward,
            )
        return kept if self._is_last_stage else [{} for _ in micro_batches]

    def _keep_predictors(self, _layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs  # hidden [t, 1, h]
        if self._predictors is None:
            raise RuntimeError("the output layer ran outside ResponseModel.run")
        return (hidden.index_select(0, self._predictors), *rest)
