"""What TTT-Discover (arXiv 2601.16175) declares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np
from atoll.families.aggregation import Aggregation
from atoll.families.batching import BatchingRule
from atoll.families.driver import WorkerGroups
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.grid import Grid
from atoll.families.options import FamilyOptions
from atoll.families.refusals import option_refused
from atoll.families.rewards import rewards_by_group
from atoll.families.rows import Batch, Float32, Row
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.signal import FamilyState, StepScheduling, StepSignal
from atoll.families.steps import RowWeights, TrainStep, aggregate
from atoll.families.tttd.entropic import entropic_advantages, is_constant
from pydantic import Field, model_validator


class TttdOptions(FamilyOptions):
    """Options of tttd. Example: `{"groups_per_step": 8, "rollouts_per_group": 64, "kl_coef": 0.1}`."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in the grid of a step; a batch is one grid."""
    rollouts_per_group: int = Field(default=8, ge=1)
    """K: rollouts in a group."""
    groups_per_optimizer_step: int | None = Field(default=None, ge=1)
    """Groups in one optimizer step; none: all of the grid in one."""
    kl_coef: float = Field(default=0.1, ge=0)
    """Weight of the centred KL to the frozen base in the advantages; 0: off."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """Upper bound of an advantage; 0: none."""
    loss_aggregation: Literal["token_sum"] = "token_sum"
    """Only token_sum: the loss is a sum over tokens."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.rollouts_per_group == 2 and self.advantage_clip == 0:
            raise ValueError(
                "rollouts_per_group 2 is refused with advantage_clip 0: the better of two has an advantage of up to "
                "1e7; set advantage_clip above 0 or take another number of rollouts"
            )
        return self


class TttdFamily(LossFamily[TttdOptions]):
    """-sum_t exp(l - lq) A_t with entropic advantages; remembers the best reward."""

    name: ClassVar[str] = "tttd"
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.REQUIRED
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.LOSS, HookChannel.ADVANTAGE})
    Options: ClassVar[type[FamilyOptions]] = TttdOptions

    @property
    def requires_rollout_log_probs(self) -> bool:
        return True

    @property
    def batching(self) -> BatchingRule:
        options = self.options
        return Grid(options.groups_per_step, options.rollouts_per_group, one_version=True)

    def configure_backend(self, run: RunSettings) -> BackendNeeds:
        """The base is the run's frozen reference model."""
        return BackendNeeds(reference_log_probs=self.options.kl_coef > 0)

    def validate_specific_args(self, run: RunSettings, source: str) -> None:
        """Refuses the KL where there is no base to take it to, besides what every family refuses."""
        if self.options.kl_coef > 0 and not run.has_reference:
            raise option_refused(
                f"{source}: tttd: kl_coef {self.options.kl_coef:g} is refused: only 0 is allowed in a run without a "
                "reference model, which is the base; give one or set kl_coef to 0",
                field="kl_coef",
            )
        super().validate_specific_args(run, source)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Per generated token the advantage of its rollout, forced tokens included; 0 where nothing was recorded."""
        groups = rewards_by_group(batch.rows)
        advantage_of: dict[str, float] = {}
        for rewards in groups.values():
            values = entropic_advantages(list(rewards.values()), clip=self.options.advantage_clip)
            advantage_of |= dict(zip(rewards, values.tolist(), strict=True))
        constant = sum(is_constant(list(rewards.values())) for rewards in groups.values())
        every = {rollout: reward for rewards in groups.values() for rollout, reward in rewards.items()}
        best = max(every, key=lambda rollout: every[rollout])
        kept = state.get("best_reward")
        if isinstance(kept, int | float) and kept >= every[best]:
            best_reward, new_state = float(kept), state
        else:
            best_reward, new_state = every[best], {**state, "best_reward": every[best], "best_rollout": best}
        metrics = {
            "constant_group_rate": constant / len(groups),
            "dropped_groups": float(len(_dropped_groups(groups))),
            "reward_max": max(every.values()),
            "best_reward": best_reward,
            "advantage_max": max(advantage_of.values()),
        }
        return StepSignal(
            tuple(_of_generated_tokens(row, advantage_of[row.rollout_id]) for row in batch.rows), metrics, new_state
        )

    def schedule_steps(self, batch: Batch) -> StepScheduling:
        """Groups of equal rewards are consumed untrained, the first one excepted where there are no others."""
        dropped = _dropped_groups(rewards_by_group(batch.rows))
        per_step = self.options.groups_per_optimizer_step or self.options.groups_per_step
        return StepScheduling.by_groups(batch.rows, per_step, without=dropped)

    def row_weights(self, rows: Sequence[Row], trained_tokens: Sequence[int]) -> Sequence[RowWeights]:
        """Every token counts 1 in the loss, whatever the size of the step; metrics are `sample_mean`."""
        return [replace(weights, policy=1.0) for weights in aggregate(Aggregation(), rows, trained_tokens)]

    def train(self, workers: WorkerGroups, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """The advantages gain the KL term before the first step, where it is on; then the actor."""
        return super().train(workers, steps) if self.options.kl_coef else workers.train_actor(steps)


def _dropped_groups(groups: Mapping[str, Mapping[str, float]]) -> frozenset[str]:
    constant = [name for name, rewards in groups.items() if is_constant(list(rewards.values()))]
    return frozenset(constant[1:] if len(constant) == len(groups) else constant)


def _of_generated_tokens(row: Row, advantage: float) -> Float32:
    """Tool and user tokens have no recorded log-prob."""
    generated = np.isfinite(row.rollout_log_probs)
    return np.where(generated, np.float32(advantage), np.float32(0)).astype(np.float32)
