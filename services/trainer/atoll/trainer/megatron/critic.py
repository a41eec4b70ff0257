"""The critic of a job on this rank: values of rows, and its clipped value loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.families.losses.policy_loss import LossResult
from atoll.families.losses.value_loss import value_loss
from atoll.families.policy_spec import CriticSpec
from atoll.families.rows import Row
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.objective import Objective
from atoll.trainer.megatron.passes import Places, read_rows
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.settings import MicroBatchLimit
from atoll.trainer.megatron.training import MicroBatches, PhaseClock, StepAt, take_step
from torch import Tensor


def critic_values(critic: RankModel, rows: Sequence[Row], member: Membership, limit: MicroBatchLimit) -> list[Tensor]:
    """float32 [R] of every row: values of the state before each response token, on the host; empty on a stage before
    the last. A collective over this copy of the model."""

    def read(_indices: Sequence[int], _places: Places, values: Tensor) -> Mapping[str, Tensor]:
        return {"values": values[:, 0].float()}

    found = read_rows(critic.responses, rows, read, member, limit)
    return [each["values"] for each in found] if member.is_last_stage else []


def train_critic(
    critic: RankModel,
    objective: Objective,
    spec: CriticSpec,
    steps: Sequence[MicroBatches],
    member: Membership,
    clock: PhaseClock,
) -> list[dict[str, float]]:
    """One optimizer step of the critic for each entry; returns their metrics. Raises `NotFinite` on every rank."""
    metrics = []
    for number, step in enumerate(steps):

        def loss_of(micro_batch: int, places: Places, values: Tensor, step: MicroBatches = step) -> LossResult:
            return value_loss(objective.batch(step[micro_batch], places), values[:, 0], spec.value_clip)

        with clock.phase("critic"):
            metrics.append(take_step(critic, step, loss_of, StepAt(number, spec.learning_rate), member, PhaseClock()))
    return metrics
