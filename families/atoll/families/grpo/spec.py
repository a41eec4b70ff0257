"""What GRPO (Group Relative Policy Optimization, arXiv 2402.03300) declares. It needs no objective hooks."""

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from atoll.families.aggregation import Aggregation, AggregationOptions
from atoll.families.batching import BatchingRule
from atoll.families.family import AdvantageSource, LossFamily, LossType
from atoll.families.group_ready import GroupReady
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import KlKind, OldPolicy, PolicyLossSpec
from atoll.families.rewards import rewards_by_group
from atoll.families.rows import Batch
from atoll.families.signal import FamilyState, StepScheduling, StepSignal
from pydantic import Field, model_validator

STD_EPSILON = 1e-6


class GrpoOptions(AggregationOptions):
    """Options of grpo. Example: `{"groups_per_step": 8, "n_samples_per_prompt": 8, "eps_clip_high": 0.28}`."""

    groups_per_step: int = Field(default=4, ge=1)
    """Groups in a batch."""
    n_samples_per_prompt: int = Field(default=4, ge=1)
    """Rollouts in a group."""
    groups_per_optimizer_step: int | None = Field(default=None, ge=1)
    """Groups in one optimizer step; none: all of the batch in one."""
    normalize_std: bool = True
    """Divide by the group's sample standard deviation, after subtracting its mean."""
    use_rollout_log_probs: bool = False
    """Take the ratio against the recorded log-probs, not against recomputed ones."""
    use_tis: bool = False
    """Multiply the policy term by min(exp(l_old - lq), tis_cap)."""
    tis_cap: float = Field(default=2.0, gt=0)
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    eps_clip_high: float | None = Field(default=None, gt=0)
    """None: eps_clip."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip; none: off."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    kl_loss_type: KlKind = KlKind.LOW_VAR_KL
    entropy_coef: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.use_tis and self.use_rollout_log_probs:
            raise ValueError(
                "use_tis corrects recomputed log-probs and is refused with use_rollout_log_probs; turn one off"
            )
        per_step = self.groups_per_optimizer_step
        if per_step is not None and self.groups_per_step % per_step:
            raise ValueError(f"groups_per_optimizer_step {per_step} must divide groups_per_step {self.groups_per_step}")
        return self


class GrpoFamily(LossFamily[GrpoOptions]):
    """A = (r - mean) / (std + 1e-6) within each group; the stock policy loss."""

    name: ClassVar[str] = "grpo"
    loss_type: ClassVar[LossType] = LossType.POLICY_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.REQUIRED
    Options: ClassVar[type[FamilyOptions]] = GrpoOptions

    @property
    def batching(self) -> BatchingRule:
        return GroupReady(self.options.groups_per_step, self.options.n_samples_per_prompt)

    def policy_loss_spec(self) -> PolicyLossSpec:
        options = self.options
        return PolicyLossSpec(
            eps_clip=options.eps_clip,
            eps_clip_high=options.eps_clip if options.eps_clip_high is None else options.eps_clip_high,
            eps_clip_c=options.eps_clip_c,
            old_policy=OldPolicy.ROLLOUT if options.use_rollout_log_probs else OldPolicy.RECOMPUTED,
            tis_cap=options.tis_cap if options.use_tis else None,
            kl_coef=options.kl_loss_coef,
            kl_kind=options.kl_loss_type,
            entropy_coef=options.entropy_coef,
        )

    def aggregation(self) -> Aggregation:
        return self.options.aggregation(group_size=self.options.n_samples_per_prompt)

    def schedule_steps(self, batch: Batch) -> StepScheduling:
        per_step = self.options.groups_per_optimizer_step
        return StepScheduling.whole(batch.rows) if per_step is None else StepScheduling.by_groups(batch.rows, per_step)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Per token, the group-relative advantage of its rollout. Metrics: spread of rewards, constant groups."""
        groups = rewards_by_group(batch.rows)
        advantage_of: dict[str, float] = {}
        for rewards in groups.values():
            values = group_advantages(list(rewards.values()), normalize_std=self.options.normalize_std)
            advantage_of |= dict(zip(rewards, values.tolist(), strict=True))
        advantages = tuple(
            np.full(row.response_length, advantage_of[row.rollout_id], dtype=np.float32) for row in batch.rows
        )
        every = np.asarray([reward for rewards in groups.values() for reward in rewards.values()], dtype=np.float64)
        constant = sum(len(set(rewards.values())) == 1 for rewards in groups.values())
        metrics = {
            "reward_std": float(every.std()),
            "constant_group_rate": constant / len(groups),
        }
        return StepSignal(advantages, metrics, state)


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> npt.NDArray[np.float64]:
    """Advantages [n] of one group in float64; exactly 0 for a single rollout or equal rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return np.zeros_like(values)
    centred: npt.NDArray[np.float64] = values - values.mean()
    return centred / (values.std(ddof=1) + STD_EPSILON) if normalize_std else centred
