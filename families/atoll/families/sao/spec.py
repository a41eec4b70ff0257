"""What SAO (Single-Rollout Asynchronous Optimization, arXiv 2607.07508) declares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
from atoll.families.aggregation import Aggregation, AggregationOptions
from atoll.families.batching import BatchingRule
from atoll.families.critic import critic_steps, explained_variance
from atoll.families.driver import JobContext, WorkerGroups
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import CriticSpec, OldPolicy, PolicyGradientWeight, PolicyLossSpec
from atoll.families.rows import Batch, Column, ColumnDtype, ColumnOrigin, ColumnSpec, Row, UInt8
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.sao.row import ACTION_MASK, CREATED_AT, PRODUCER, rollout_ages, row_columns
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.singleton import Singleton
from atoll.families.steps import TrainStep, check_computed
from pydantic import Field, model_validator

CRITIC_ONLY = "critic_only"


class SaoOptions(AggregationOptions):
    """Options of sao. Example, the paper's for reasoning: `{"eps_clip": 0.3, "eps_clip_high": 5.0}`."""

    batch_size: int = Field(default=1, ge=1)
    """Reports in a batch, which is one optimizer step of the actor."""
    eps_clip: float = Field(default=0.3, gt=0, lt=1)
    """A token is trained where its ratio is above 1 - eps_clip ..."""
    eps_clip_high: float = Field(gt=0)
    """... and below 1 + eps_clip_high. Has no default: the paper takes 5.0 for reasoning, 3.0 for coding."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """lambda of the actor's advantages."""
    length_adaptive_lambda: bool = False
    """Take 1 - 1 / (alpha n) for the actor's lambda, n the response's length."""
    length_adaptive_alpha: float = Field(default=1.5, gt=0)
    critic_lambda: float = Field(default=1.0, ge=0, le=1)
    """lambda of the critic's targets, whatever the actor's is."""
    critic_lr: float = Field(default=1e-5, gt=0)
    value_clip: float = Field(default=0.2, gt=0)
    critic_steps_per_actor: int = Field(default=2, ge=1)
    """Critic updates of a job; the actor's follows them."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """Jobs, from the scenario's first on, that train the critic and leave the actor as it is."""
    normalize_advantages: bool = False
    """Only false is allowed: the advantages of one rollout have no spread to divide by."""
    kl_coef: float = 0.0
    """Only 0 is allowed: the loss has no KL term."""

    @model_validator(mode="after")
    def _without_other_terms(self) -> Self:
        if self.normalize_advantages:
            raise ValueError("normalize_advantages true is refused: only false is allowed; leave it out")
        if self.kl_coef != 0:
            raise ValueError(
                f"kl_coef {self.kl_coef:g} is refused: only 0 is allowed, sao has no KL term; leave it out"
            )
        if self.length_adaptive_lambda and self.gae_lambda != 1:
            raise ValueError(f"gae_lambda {self.gae_lambda:g} is refused with length_adaptive_lambda; leave one out")
        return self


class SaoFamily(LossFamily[SaoOptions]):
    """-sg[f(r)] A l with r = exp(l - lq) and f(r) = r strictly inside the clip range, else 0."""

    name: ClassVar[str] = "sao"
    loss_type: ClassVar[LossType] = LossType.POLICY_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.COMPUTED
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.PG_LOSS, HookChannel.ADVANTAGE})
    uses_pg_loss_primitive: ClassVar[bool] = True
    Options: ClassVar[type[FamilyOptions]] = SaoOptions
    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec(ACTION_MASK, ColumnDtype.UINT8, response_aligned=True),
        ColumnSpec(PRODUCER, ColumnDtype.INT64, in_loss_batch=False),
        ColumnSpec(CREATED_AT, ColumnDtype.FLOAT64, in_loss_batch=False),
        ColumnSpec(CRITIC_ONLY, ColumnDtype.UINT8, ColumnOrigin.DRIVER, in_loss_batch=False, logged=True),
    )
    critic_value_head_zero_init: ClassVar[bool] = True
    critic_value_mask_key: ClassVar[str | None] = ACTION_MASK

    @property
    def batching(self) -> BatchingRule:
        return Singleton(batch_size=self.options.batch_size)

    def shape_sample_row(self, item: ReportedSample, context: RowContext) -> Row:
        """The default row with which tokens were generated, by which weights, and when."""
        row = super().shape_sample_row(item, context)
        return replace(row, columns=row_columns(row, item.sample.created_at))

    def effective_mask(self, row: Row) -> UInt8:
        """Generated tokens that the loss mask keeps."""
        return row.loss_mask & row.columns[ACTION_MASK].astype(np.uint8)

    def build_rollout_data(self, batch: Batch, signal: StepSignal) -> Sequence[Mapping[str, Column]]:
        """Whether this job trains the critic alone."""
        critic_only = np.asarray(signal.metrics[CRITIC_ONLY], dtype=np.uint8)
        return [{CRITIC_ONLY: critic_only} for _ in batch.rows]

    def configure_backend(self, run: RunSettings) -> BackendNeeds:
        options = self.options
        critic = CriticSpec(
            options.critic_lr, options.value_clip, value_head_zero_init=self.critic_value_head_zero_init
        )
        return replace(super().configure_backend(run), critic=critic)

    def policy_loss_spec(self) -> PolicyLossSpec:
        options = self.options
        return PolicyLossSpec(options.eps_clip, options.eps_clip_high, old_policy=OldPolicy.ROLLOUT)

    def aggregation(self) -> Aggregation:
        """Of the actor's loss; the critic's is always `sample_mean`. A report is a prompt group of its own."""
        return self.options.aggregation(group_size=1)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Counts the scenario's jobs; advantages need the critic, so the workers compute them."""
        jobs = state.get("jobs", 0)
        jobs = jobs if isinstance(jobs, int) else 0
        critic_only = float(jobs < self.options.num_critic_only_steps)
        return StepSignal(None, {CRITIC_ONLY: critic_only}, {**state, "jobs": jobs + 1})

    def train(self, workers: WorkerGroups, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """Values and advantages once, with the critic as the job found it; then the critic, then the actor."""
        steps = workers.compute_advantages(steps)
        check_computed(steps)
        of_critic = critic_steps(steps, self.critic_value_mask_key)
        metrics: list[Mapping[str, float]] = []
        for _ in range(self.options.critic_steps_per_actor):
            metrics += [_of_critic(each) for each in workers.train_critic(of_critic)]
        explained = explained_variance(of_critic)
        if explained is not None:
            metrics.append({"critic/explained_variance": explained})
        if not any(item.columns[CRITIC_ONLY] for step in steps for item in step.rows):
            metrics += workers.train_actor(steps)
        return metrics

    def rollout_metrics(self, batch: Batch, context: JobContext) -> Mapping[str, float]:
        """How old the samples are, and the share of their response tokens that is trained."""
        trained = sum(int(self.effective_mask(row).sum()) for row in batch.rows)
        rate = trained / sum(row.response_length for row in batch.rows)
        return {**rollout_ages(batch, context), "effective_token_rate": rate}

    def policy_gradient_weight(self, run: RunSettings) -> PolicyGradientWeight:
        return PolicyGradientWeight.masked(1 - self.options.eps_clip, 1 + self.options.eps_clip_high)


def _of_critic(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return {f"critic/{name}": value for name, value in metrics.items()}
