"""A job's calls on this rank, in the order a family makes them: advantages, then steps of the actor."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.families.losses.actor import RolloutData
from atoll.families.losses.policy_loss import LossResult
from atoll.families.rows import Float32
from atoll.families.steps import TrainRow
from atoll.trainer.megatron.actor import MegatronActor
from atoll.trainer.megatron.critic import critic_values
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.objective import Objective
from atoll.trainer.megatron.passes import Places, response_log_probs
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.settings import MicroBatchLimit
from atoll.trainer.megatron.training import MicroBatches, PhaseClock, StepAt, take_step
from atoll.trainer.megatron.weight_sets import WeightSets
from torch import Tensor

REFERENCE = "reference model"
"""The weight set of the run's reference model. No family's set has a name with a space."""

Computed = tuple[Float32, Float32 | None, Float32 | None]
"""Advantages, values and returns of a row, each [R]."""
LogProbs = list[list[list[Tensor]]]
"""By optimizer step, micro-batch and row: float32 [R] on the host."""


def compute_advantages(
    model: RankModel,
    critic: RankModel | None,
    sets: WeightSets,
    objective: Objective,
    rows: Sequence[TrainRow],
    member: Membership,
    limit: MicroBatchLimit,
) -> list[Computed]:
    """What `custom_advantage_function` makes of this rank's rows; empty on a pipeline stage before the last.

    A collective over all ranks.
    """
    plain = [item.row for item in rows]
    values = None if critic is None else critic_values(critic, plain, member, limit)
    reference = None
    if objective.needs.reference_log_probs:
        with sets.in_place(REFERENCE, model):
            reference = response_log_probs(model.responses, plain, model.shard, member, limit)
    if not member.is_last_stage:
        return []
    data = RolloutData(rows, values=values, ref_log_probs=reference, sum_over_ranks=member.sum_over_data)
    computed = []
    for item in objective.function.advantages(data):
        assert item.advantages is not None  # the hook's result was checked
        computed.append((item.advantages, item.values, item.returns))
    return computed


def train_actor(
    model: RankModel,
    sets: WeightSets,
    objective: Objective,
    actor: MegatronActor,
    steps: Sequence[MicroBatches],
    learning_rates: Sequence[float],
    member: Membership,
    limit: MicroBatchLimit,
    clock: PhaseClock,
) -> list[dict[str, float]]:
    """One optimizer step for each entry; returns their metrics. Raises `NotFinite` on every rank."""

    def log_probs() -> LogProbs:
        rows = [item.row for step in steps for micro_batch in step for item in micro_batch]
        found = iter(response_log_probs(model.responses, rows, model.shard, member, limit))
        if not member.is_last_stage:
            return []
        return [[[next(found) for _ in micro_batch] for micro_batch in step] for step in steps]

    old: LogProbs | None = None
    ref: LogProbs | None = None
    # Before a job's only step the current log-probs are the old ones: the loss takes them from its own forward.
    if objective.needs.old_log_probs and len(steps) > 1:
        with clock.phase("old_log_probs"):
            old = log_probs()
    if objective.needs.reference_log_probs:
        with clock.phase("reference_log_probs"), sets.in_place(REFERENCE, model):
            ref = log_probs()
    metrics = []
    for number, (step, rate) in enumerate(zip(steps, learning_rates, strict=True)):
        with clock.phase("pre_train"):
            prepared = actor.prepare_step(step)

        def loss_of(
            micro_batch: int, places: Places, logits: Tensor, number: int = number, rows: MicroBatches = prepared
        ) -> LossResult:
            before = None if old is None else old[number][micro_batch]
            compared = None if ref is None else ref[number][micro_batch]
            return objective.loss(rows[micro_batch], places, logits, before, compared)

        metrics.append(take_step(model, prepared, loss_of, StepAt(number, rate), member, clock))
        actor.step_taken()
    return metrics
