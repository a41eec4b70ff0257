"""AdamW through megatron-core's optimizer: gradient sums over ranks, global clipping, a rate given for every step."""

from __future__ import annotations

import math

import torch
from atoll.trainer.megatron.settings import AdamW
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)


def wrap_for_data_parallel(model: GPTModel) -> DistributedDataParallel:
    """Give the model gradient buffers in float32 that are *summed* over data-parallel ranks."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    # Megatron would divide by the number of trained tokens here; the rows' weights have done so already.
    model.config.finalize_model_grads_func = lambda chunks, tokens=None, **rest: finalize_model_grads(chunks, **rest)
    return wrapped


class StepOptimizer:
    """AdamW (Loshchilov and Hutter, 2019) over a wrapped model; weight decay only on matrices."""

    def __init__(self, model: DistributedDataParallel, settings: AdamW) -> None:
        self._settings = settings
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            # Clipping to infinity changes nothing and still computes the norm, which is always reported.
            clip_grad=settings.clip_grad or math.inf,
            params_dtype=torch.float32,
        )
        self._model = model
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            config, [model], config_overrides=get_standard_config_overrides(config)
        )
        self.reset()

    def reset(self) -> None:
        """Forget all moments, as before the first step. The state exists from here on, so it can always be saved."""
        for group in self.megatron.param_groups:
            for parameter in group["params"]:
                self._inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def load(self, state: dict[str, dict[str, object]]) -> None:
        """Take a state that megatron's ``sharded_state_dict`` loaded."""
        state["state"].setdefault("common_step", torch.tensor(0.0))  # a count of 0 is left out when it is stored
        self.megatron.load_state_dict(state)

    def steps_taken(self) -> int:
        """Optimizer steps that the present moments have seen."""
        return max((int(state["step"]) for state in self._inner.state.values()), default=0)

    def zero_gradients(self) -> None:
        """Call before the first micro-batch of a step."""
        self._model.zero_grad_buffer()
        self.megatron.zero_grad()

    def gradients_finite(self) -> bool:
        """Whether this rank's gradients, summed over data-parallel ranks, hold no NaN and no infinity."""
        # One pass without a temporary: a sum is finite only if all of its terms are.
        return bool(torch.stack([p.main_grad.sum() for p in self._model.parameters()]).isfinite().all())

    def step(self, learning_rate: float) -> float:
        """Take one step at this rate; returns the gradient norm over all ranks, before clipping."""
        for group in self.megatron.param_groups:
            group["lr"] = learning_rate
            # Also what a checkpoint brought along: the run's own settings win.
            group["betas"] = (self._settings.beta1, self._settings.beta2)
            group["eps"] = self._settings.epsilon
            # Megatron leaves the decay multiplier of norms and biases to its scheduler, which is not used here.
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        _, norm, _ = self.megatron.step()
        return float(norm)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self.megatron.optimizer
        return inner
