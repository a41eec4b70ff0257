"""The loss-family contract: everything a family says about itself, in the order the pipeline asks.

```
options -> batching -> shape_sample_row -> configure_backend -> prepare_rollout -> prepare -> schedule_steps
        -> effective_mask, row_weights, build_rollout_data -> train (hooks of objective.py) -> rollout_metrics
```

A family is a class; an instance is a family with its options. Gateway, driver and workers each make their own from
the family's reference and the same options.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Generic, Self, cast

from atoll.families.aggregation import Aggregation
from atoll.families.batching import BatchingRule
from atoll.families.driver import JobContext, WorkerGroups
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import OldPolicy, PolicyGradientWeight, PolicyLossSpec
from atoll.families.refusals import option_refused, report_refused
from atoll.families.rows import Batch, Column, ColumnSpec, Row, UInt8
from atoll.families.run_settings import BackendNeeds, OptionsT_co, RunSettings
from atoll.families.sampler_heads import HEAD_COLUMNS
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.signal import FamilyState, StepScheduling, StepSignal
from atoll.families.steps import RowWeights, TrainStep, aggregate, check_computed
from pydantic import JsonValue


class LossType(StrEnum):
    """Which loss the workers run."""

    POLICY_LOSS = "policy_loss"
    """The stock policy loss, whose per-token primitive a family may replace."""
    CUSTOM_LOSS = "custom_loss"
    """The family's own `custom_loss_function`."""


class AdvantageSource(StrEnum):
    """Where advantages come from."""

    REQUIRED = "required"
    """`prepare` returns them; `custom_advantage_function`, where there is one, may change them."""
    FORBIDDEN = "forbidden"
    """There are none: `prepare` must not return any."""
    COMPUTED = "computed"
    """The workers compute them with `custom_advantage_function`."""


class HookChannel(StrEnum):
    """Where a torch function of `objective.py` is plugged in. The function is named `<family><suffix>`."""

    LOSS = "custom_loss_function"
    PG_LOSS = "custom_pg_loss_function"
    REDUCER = "custom_reducer"
    """What each token adds to the stock policy loss, in place of `loss_aggregation`."""
    ADVANTAGE = "custom_advantage_function"
    ACTOR_INIT = "actor_init_hook"
    ACTOR_PRE_TRAIN = "actor_pre_train_hook"


class LossFamily(ABC, Generic[OptionsT_co]):
    """Base of every loss family. Subclasses declare the class variables and override what differs.

    Errors of every method: InvalidInput, naming the option, field or sample, the value and what is allowed.
    """

    # identity
    name: ClassVar[str]
    """Plain name, `[a-z][a-z0-9]*`: also the prefix of its flags and hooks."""
    loss_type: ClassVar[LossType]
    advantages: ClassVar[AdvantageSource]
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset()
    """Channels that `objective.py` must fill; the workers refuse to start without them, and with any other."""
    objective_module: ClassVar[str | None] = None
    """Module of the hooks; None: `objective` beside the module of this class."""
    hook_prefix: ClassVar[str | None] = None
    """What the names of the hooks start with, where families share them; None: the family's name."""
    uses_pg_loss_primitive: ClassVar[bool] = False
    """Keeps the stock policy loss and replaces its per-token primitive by the PG_LOSS hook."""

    # options
    Options: ClassVar[type[FamilyOptions]] = FamilyOptions

    # wire
    columns: ClassVar[tuple[ColumnSpec, ...]] = ()
    """Extra columns beyond the default row; the key lists below are views of it."""
    needs_prompt_renderer: ClassVar[bool] = False
    critic_value_head_zero_init: ClassVar[bool] = False
    critic_value_mask_key: ClassVar[str | None] = None
    """Column that masks the critic's value loss besides the loss mask."""

    def __init__(self, options: OptionsT_co) -> None:
        self.options = options

    @classmethod
    def from_options(cls, values: Mapping[str, JsonValue]) -> Self:
        """Makes the family from options as they stand in YAML; unknown and ill-typed ones are refused by name."""
        return cls(cast(OptionsT_co, cls.Options.from_mapping(cls.name, values)))

    @classmethod
    def reference(cls) -> str:
        """`module:Class`, which another process resolves to this class."""
        return f"{cls.__module__}:{cls.__qualname__}"

    @property
    def requires_rollout_log_probs(self) -> bool:
        """Whether the loss reads the recorded log-probs. Default: what the policy loss needs."""
        return self.loss_type is LossType.POLICY_LOSS and self.policy_loss_spec().needs_rollout_log_probs

    @property
    def sampler_top_k(self) -> int:
        """How many of the engine's most likely ids the gateway records with every token. Default: 0, none."""
        return 0

    @property
    def driver_options(self) -> tuple[str, ...]:
        """What the trainer must have been started with for these options, by name, such as `TEACHER_ENGINE`.

        A job that brings the family to a run of another one is refused where any is missing. Default: nothing.
        """
        return ()

    @classmethod
    def provides_advantages(cls) -> bool:
        """Whether `prepare` returns advantages."""
        return cls.advantages is AdvantageSource.REQUIRED

    # batching
    @property
    @abstractmethod
    def batching(self) -> BatchingRule:
        """The rule that turns reports into batches, and their metadata contract."""

    # wire
    @classmethod
    def rollout_data_keys(cls) -> tuple[str, ...]:
        """Names of the extra columns, which are split over data-parallel ranks with their rows."""
        return tuple(spec.name for spec in cls.columns)

    @classmethod
    def rollout_tensor_dtypes(cls) -> Mapping[str, str]:
        """Element type of each extra column."""
        return {spec.name: spec.dtype.value for spec in cls.columns}

    @classmethod
    def response_aligned_keys(cls) -> tuple[str, ...]:
        """Extra columns whose first axis is [R]: sliced for context parallelism."""
        return tuple(spec.name for spec in cls.columns if spec.response_aligned)

    @classmethod
    def external_batch_keys(cls) -> tuple[str, ...]:
        """Extra columns that reach the hooks in `LossBatch.columns`."""
        return tuple(spec.name for spec in cls.columns if spec.in_loss_batch)

    @classmethod
    def rollout_log_skip_keys(cls) -> tuple[str, ...]:
        """Extra columns that the numeric step log leaves out."""
        return tuple(spec.name for spec in cls.columns if not spec.logged)

    def run_columns(self, run: RunSettings) -> tuple[ColumnSpec, ...]:
        """All extra columns of a run, of every origin. Default: `columns`, and the sampler's heads where they are read.

        A family whose options decide on columns adds them to `super().run_columns(run)`.
        """
        return (*self.columns, *HEAD_COLUMNS) if run.score_centering else self.columns

    def shape_sample_row(self, item: ReportedSample, context: RowContext) -> Row:
        """The row of one reported sample. Default: the recorded tensors, the report's score as the reward.

        A family with columns of origin `row` calls this and adds them (`dataclasses.replace`).
        """
        sample, report = item.sample, item.report
        if report.score is None:
            raise report_refused(f"report {report.report_id}: {self.name} needs a score", field="score")
        return Row(
            sample_id=sample.sample_id,
            rollout_id=report.report_id,
            group_id=self.batching.group_of(report),
            tokens=sample.tokens,
            prompt_length=sample.prompt_length,
            loss_mask=sample.loss_mask,
            rollout_log_probs=sample.log_probs,
            temperature=sample.temperature,
            reward=report.score,
            exact=sample.exact,
            versions=sample.versions,
        )

    def build_rollout_data(self, batch: Batch, signal: StepSignal) -> Sequence[Mapping[str, Column]]:
        """Per row, the extra columns of origin `driver`. Default: none."""
        return [{} for _ in batch.rows]

    # configure
    def configure_backend(self, run: RunSettings) -> BackendNeeds:
        """What the backend sets up. Default: what the policy loss needs."""
        if self.loss_type is LossType.CUSTOM_LOSS:
            return BackendNeeds()
        spec = self.policy_loss_spec()
        return BackendNeeds(
            old_log_probs=spec.old_policy is OldPolicy.RECOMPUTED, reference_log_probs=spec.needs_reference
        )

    def validate_specific_args(self, run: RunSettings, source: str) -> None:
        """Refuses settings of the run that the family cannot train with; `source` says where they were given."""
        if run.score_centering and self.policy_gradient_weight(run) is None:
            raise option_refused(
                f"{source}: score_centering true is refused: {self.name} declares no "
                "policy-gradient weight; turn it off",
                field="score_centering",
            )
        if run.score_centering and not 1 <= run.score_centering_top_k <= run.vocab_size:
            raise option_refused(
                f"{source}: score_centering_top_k must be in [1, {run.vocab_size}], the vocabulary, "
                f"got {run.score_centering_top_k}",
                field="score_centering_top_k",
            )
        if run.score_centering and self.loss_type is LossType.POLICY_LOSS and self.policy_loss_spec().tis_cap:
            raise option_refused(
                f"{source}: score_centering true is refused with truncated importance sampling (use_tis), which weighs "
                "the policy gradient beyond the weight that the family declares; turn one off",
                field="score_centering",
            )
        if run.score_centering and HookChannel.REDUCER in self.required_objective_hooks:
            raise option_refused(
                f"{source}: score_centering true is refused: {self.name} reduces its loss with a custom_reducer, which "
                "may weigh the policy gradient beyond the weight that the family declares; turn it off",
                field="score_centering",
            )
        if self.configure_backend(run).reference_log_probs and not run.has_reference:
            raise option_refused(
                f"{source}: {self.name} uses a reference model and the run has none; give one or set its KL to 0",
                field="kl_loss_coef",
            )

    def policy_loss_spec(self) -> PolicyLossSpec:
        """Knobs of the stock policy loss; read for `policy_loss` families only."""
        return PolicyLossSpec()

    # prepare
    @abstractmethod
    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Turns the whole batch into its signal. Pure: the same batch and state give the same signal."""

    def schedule_steps(self, batch: Batch) -> StepScheduling:
        """How the batch is cut into optimizer steps. Default: one step."""
        return StepScheduling.whole(batch.rows)

    def effective_mask(self, row: Row) -> UInt8:
        """[R] the tokens that are trained. Default: the loss mask."""
        return row.loss_mask

    def aggregation(self) -> Aggregation:
        """How token losses become the loss of a step. Default: sample_mean."""
        return Aggregation()

    def row_weights(self, rows: Sequence[Row], trained_tokens: Sequence[int]) -> Sequence[RowWeights]:
        """Weights of the rows of one optimizer step. A family with a reduction of its own overrides it."""
        return aggregate(self.aggregation(), rows, trained_tokens)

    # run
    def prepare_rollout(self, batch: Batch, context: JobContext) -> Batch:
        """Driver-side work before `prepare`, such as a teacher's scores. Default: nothing."""
        return batch

    def bind(self, run: RunSettings) -> Self:
        """The instance of one run, which may carry a schedule. Default: the family itself."""
        return self

    def train(self, workers: WorkerGroups, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """Drives the worker groups through a job; returns metrics of each optimizer step.

        Default: `custom_advantage_function` where the family has one, then the actor.
        """
        if HookChannel.ADVANTAGE in self.required_objective_hooks:
            steps = workers.compute_advantages(steps)
            check_computed(steps)
        return workers.train_actor(steps)

    def rollout_metrics(self, batch: Batch, context: JobContext) -> Mapping[str, float]:
        """Metrics of the samples, such as their age, reported with the step. Default: none."""
        return {}

    # correction
    def policy_gradient_weight(self, run: RunSettings) -> PolicyGradientWeight | None:
        """The weight the loss puts on the sampled token's score. Default: none declared, score centering refused."""
        return None
