"""The one function that a worker calls: the loss of a family for one micro-batch, whichever way it is made."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from atoll.families.catalog import AnyFamily
from atoll.families.family import LossType
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import ObjectiveHooks, resolve_hooks
from atoll.families.losses.policy_loss import LossResult, PgPrimitive, policy_loss
from atoll.families.losses.reducer import Reducer, TokenShares
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.rows import Float32
from atoll.families.run_settings import HookArgs, RunSettings
from atoll.families.steps import TrainRow
from torch import Tensor


class LossFunction:
    """A family's loss with its hooks resolved. Make it once, when the worker starts.

    Raises at construction: BadConfiguration for missing or wrong hooks.
    """

    def __init__(self, family: AnyFamily, run: RunSettings) -> None:
        self.hooks: ObjectiveHooks = resolve_hooks(type(family))
        self._family = family
        self._args = HookArgs(family.options, run)
        self._spec = family.policy_loss_spec()
        # A custom loss adds the correction itself: only it knows its advantages.
        self._centering = ScoreCentering.of_run(run, family.policy_gradient_weight(run))

    def __call__(self, batch: LossBatch, logits: Tensor) -> LossResult:
        """This micro-batch's part of the step's loss, for logits [S, V_local]."""
        if self._family.loss_type is LossType.POLICY_LOSS:
            shares = self._shares(batch)
            return policy_loss(self._spec, batch, logits, self._primitive(), self._centering, shares)
        if self.hooks.loss is None:
            raise ValueError(f"loss family {self._family.name} has no custom_loss_function")
        reduce = Reducer(batch)
        loss, metrics = self.hooks.loss(self._args, batch, logits, reduce)
        return LossResult(loss, {**metrics, "loss": loss.detach()}, reduce.bad_rows)

    def advantages(self, data: RolloutData) -> list[TrainRow]:
        """Runs `custom_advantage_function` over this rank's rows of a whole job.

        Returns the same rows with advantages, and with values and returns where there is a critic. A collective over
        the data-parallel ranks. Raises: ValueError when the hook leaves rows unfilled.
        """
        if self.hooks.advantage is None:
            raise ValueError(f"loss family {self._family.name} has no custom_advantage_function")
        self.hooks.advantage(self._args, data)
        advantages = _host_rows(data.rows, "advantages", data.advantages)
        values = None if data.values is None else _host_rows(data.rows, "values", data.values)
        returns = None if data.returns is None else _host_rows(data.rows, "returns", data.returns)
        return [
            replace(
                item,
                advantages=advantages[number],
                values=None if values is None else values[number],
                returns=None if returns is None else returns[number],
            )
            for number, item in enumerate(data.rows)
        ]

    def _primitive(self) -> PgPrimitive | None:
        hook = self.hooks.pg_loss
        if hook is None:
            return None
        return lambda ppo_kl, log_probs, advantages: hook(self._args, ppo_kl, log_probs, advantages)

    def _shares(self, batch: LossBatch) -> TokenShares | None:
        hook = self.hooks.reducer
        return None if hook is None else lambda losses: hook(self._args, batch, losses)


def _host_rows(rows: Sequence[TrainRow], name: str, tensors: Sequence[Tensor] | None) -> list[Float32]:
    if tensors is None or len(tensors) != len(rows):
        got = "none" if tensors is None else f"those of {len(tensors)}"
        raise ValueError(f"custom_advantage_function must fill {name} of {len(rows)} rows, got {got}")
    for item, tensor in zip(rows, tensors, strict=True):
        if tensor.shape != (item.row.response_length,):
            raise ValueError(
                f"sample {item.row.sample_id}: {name} must be [{item.row.response_length}], got {tuple(tensor.shape)}"
            )
    return [tensor.detach().to("cpu", torch.float32).numpy() for tensor in tensors]
