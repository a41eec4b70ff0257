"""What OpenClaw-RL (arXiv 2603.10165) declares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar, Self

import numpy as np
from atoll.families.aggregation import Aggregation, AggregationOptions
from atoll.families.batching import BatchingRule
from atoll.families.driver import TEACHER_ENGINE, JobContext, WorkerGroups
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.openclawrl.report import JudgedTurns, hinted_prompts
from atoll.families.openclawrl.service import (
    SERVICE_IDS,
    SERVICE_LOG_PROBS,
    candidate_prompts,
    with_service_scores,
)
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import KlKind
from atoll.families.refusals import batch_refused, option_refused, sample_refused
from atoll.families.rows import Batch, ColumnDtype, ColumnOrigin, ColumnSpec, Int32, Row
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.steps import TrainStep
from pydantic import Field, model_validator

SAMPLER_IDS = "engine_top_k_ids"
"""int32 [R, K] S^q: the engine's most likely ids, -1 where a place holds none."""
HINT_TOKENS = "hint_tokens"
"""int32 [sum of P'] the prompts of the candidates, one after another; empty: the plain prompt is the only one."""
HINT_LENGTHS = "hint_lengths"
"""int32 [candidates] their lengths P'."""
TEACHER_IDS = "teacher_subset_ids"
"""int32 [R, K] S: the ids that are distilled, -1 where a place holds none."""
TEACHER_LOG_PROBS = "teacher_subset_log_probs"
"""float32 [R, K] l_T at them under the selected hint; anything where the id is -1."""
HINT_OVERLAP = "hint_overlap"
"""float32 [R] |S^q and the selected candidate's own top ids| / |S^q|."""


class HintSelection(StrEnum):
    """Which candidate teaches."""

    SHORTEST = "shortest"
    """The one of fewest tokens."""
    TOKEN_OPTIMAL = "token_optimal"
    """For every token, the one whose most likely ids share most with the engine's."""
    SEQUENCE_OPTIMAL = "sequence_optimal"
    """The one whose most likely ids share most with the engine's, over the trained tokens of `hint_scope`."""


class HintScope(StrEnum):
    """Over which trained tokens `sequence_optimal` adds up."""

    SAMPLE = "sample"
    """All of the sample: one candidate teaches it."""
    SPAN = "span"
    """A run of trained tokens, such as one turn of several: each has a candidate of its own."""


class Subset(StrEnum):
    """Which ids are distilled at a token."""

    STUDENT = "student"
    """The engine's most likely ids."""
    OVERLAP = "overlap"
    """Those of them that are among the teacher's most likely ids too."""
    TEACHER = "teacher"
    """The teacher's most likely ids."""


class HintTeacher(StrEnum):
    """Who reads the hints."""

    BASE = "base"
    """The weights of the family's first job, which the workers keep."""
    SERVICE = "service"
    """The model of the trainer's teacher service."""


class OpenClawRlOptions(AggregationOptions):
    """Options of openclawrl. Example: `{"batch_size": 16, "top_k": 20, "hint_selection": "token_optimal"}`."""

    batch_size: int = Field(default=8, ge=1)
    """Reports in a batch, which is one optimizer step."""
    w_rl: float = Field(default=1.0, ge=0)
    w_opd: float = Field(default=1.0, ge=0)
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    eps_clip_high: float | None = Field(default=None, gt=0)
    """None: eps_clip."""
    top_k: int = Field(default=20, ge=1)
    """K: how many of the engine's most likely ids are recorded with every token."""
    teacher: HintTeacher = HintTeacher.BASE
    hint_selection: HintSelection = HintSelection.SEQUENCE_OPTIMAL
    hint_scope: HintScope = HintScope.SAMPLE
    subset: Subset = Subset.STUDENT
    adv_diff_clip: float = Field(default=1.0, ge=0)
    """Bound of |l_T - l_old| in the distilled advantage; 0: none."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    kl_loss_type: KlKind = KlKind.LOW_VAR_KL
    entropy_coef: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _scope_is_read(self) -> Self:
        if self.hint_scope is HintScope.SPAN and self.hint_selection is not HintSelection.SEQUENCE_OPTIMAL:
            raise ValueError(
                f"hint_scope span is only for hint_selection sequence_optimal, got {self.hint_selection.value}; leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _service_can_answer(self) -> Self:
        if self.teacher is HintTeacher.SERVICE and self.subset is Subset.STUDENT:
            raise ValueError(
                "subset student needs the teacher's log-probs at ids that the engine chose, which a service does not "
                "give; set subset overlap or teacher, or teacher base"
            )
        return self


class OpenClawRlFamily(LossFamily[OpenClawRlOptions]):
    """w_rl PPO(reward of the turn) + w_opd PPO(l_T - l_old over the subset), T the frozen base with a hint."""

    name: ClassVar[str] = "openclawrl"
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.REQUIRED
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset(
        {HookChannel.LOSS, HookChannel.ACTOR_INIT, HookChannel.ACTOR_PRE_TRAIN}
    )
    Options: ClassVar[type[FamilyOptions]] = OpenClawRlOptions
    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec(SAMPLER_IDS, ColumnDtype.INT32, response_aligned=True),
        ColumnSpec(HINT_TOKENS, ColumnDtype.INT32, in_loss_batch=False),
        ColumnSpec(HINT_LENGTHS, ColumnDtype.INT32, in_loss_batch=False),
        ColumnSpec(TEACHER_IDS, ColumnDtype.INT32, ColumnOrigin.WORKER, response_aligned=True),
        ColumnSpec(TEACHER_LOG_PROBS, ColumnDtype.FLOAT32, ColumnOrigin.WORKER, response_aligned=True),
        ColumnSpec(HINT_OVERLAP, ColumnDtype.FLOAT32, ColumnOrigin.WORKER, response_aligned=True),
    )

    def __init__(self, options: OpenClawRlOptions, run: RunSettings | None = None) -> None:
        super().__init__(options)
        self._run = run

    @property
    def batching(self) -> BatchingRule:
        return JudgedTurns(batch_size=self.options.batch_size)

    @property
    def sampler_top_k(self) -> int:
        return self.options.top_k

    @property
    def driver_options(self) -> tuple[str, ...]:
        return (TEACHER_ENGINE,) if self._asks_service else ()

    def run_columns(self, run: RunSettings) -> tuple[ColumnSpec, ...]:
        """And what the teacher service says about the candidates."""
        if not self._asks_service:
            return super().run_columns(run)
        told = (
            ColumnSpec(SERVICE_IDS, ColumnDtype.INT32, ColumnOrigin.DRIVER, in_loss_batch=False),
            ColumnSpec(SERVICE_LOG_PROBS, ColumnDtype.FLOAT32, ColumnOrigin.DRIVER, in_loss_batch=False),
        )
        return (*super().run_columns(run), *told)

    def bind(self, run: RunSettings) -> Self:
        """Knows how long a candidate may be."""
        return type(self)(self.options, run)

    def validate_specific_args(self, run: RunSettings, source: str) -> None:
        """Refuses a top_k that the vocabulary does not have, besides what every family refuses."""
        super().validate_specific_args(run, source)
        if self.options.top_k > run.vocab_size:
            raise option_refused(
                f"{source}: openclawrl: top_k {self.options.top_k} is refused: from 1 to {run.vocab_size}, the size of "
                "the vocabulary, is allowed",
                field="top_k",
            )

    def configure_backend(self, run: RunSettings) -> BackendNeeds:
        return BackendNeeds(
            old_log_probs=True, reference_log_probs=self.options.kl_loss_coef > 0, frozen_base=not self._asks_service
        )

    def shape_sample_row(self, item: ReportedSample, context: RowContext) -> Row:
        """The default row with the engine's most likely ids and the candidates that fit.

        A candidate is a hinted prompt and the row's own response. Raises: InvalidInput naming the sample when fewer
        than `top_k` ids were captured, or when a candidate holds an id outside the vocabulary.
        """
        row = super().shape_sample_row(item, context)
        prompts = self._fitting(row, hinted_prompts(item.report))
        columns = {
            SAMPLER_IDS: self._sampler_ids(row, item.sample.top_k_ids),
            HINT_TOKENS: np.concatenate([np.zeros(0, dtype=np.int32), *prompts]),
            HINT_LENGTHS: np.asarray([len(prompt) for prompt in prompts], dtype=np.int32),
        }
        return replace(row, columns={**row.columns, **columns})

    def aggregation(self) -> Aggregation:
        """A report is a prompt group of its own, so `prompt_mean` is the mean over reports."""
        return self.options.aggregation(group_size=1)

    def prepare_rollout(self, batch: Batch, context: JobContext) -> Batch:
        """Asks the teacher service about all candidates at once, where it teaches."""
        if not self._asks_service:
            return batch
        prompts = [candidate_prompts(row, row.columns[HINT_TOKENS], row.columns[HINT_LENGTHS]) for row in batch.rows]
        return with_service_scores(batch, context, prompts, self.options.top_k, self._run)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """The advantage of every token is the reward of its turn."""
        advantages = tuple(np.full(row.response_length, row.reward, dtype=np.float32) for row in batch.rows)
        hinted = sum(len(row.columns[HINT_LENGTHS]) > 0 for row in batch.rows)
        return StepSignal(advantages, {"hinted_rate": hinted / len(batch.rows)}, state)

    def train(self, workers: WorkerGroups, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """One optimizer step: the teacher's scores and l_old are of the weights before it."""
        if len(steps) != 1:
            raise batch_refused(
                f"openclawrl takes 1 optimizer step per job, got {len(steps)}; make batch_size the size of a step",
                field="steps",
            )
        return workers.train_actor(steps)

    @property
    def _asks_service(self) -> bool:
        return self.options.teacher is HintTeacher.SERVICE

    def _fitting(self, row: Row, prompts: Sequence[Int32]) -> list[Int32]:
        if self._run is None:
            return list(prompts)
        longest = self._run.seq_length - row.response_length
        fitting = [prompt for prompt in prompts if len(prompt) <= longest]
        for number, prompt in enumerate(fitting):
            if int(prompt.max()) >= self._run.vocab_size:
                raise sample_refused(
                    row.sample_id,
                    f"hint candidate {number}: token ids must be in "
                    f"[0, {self._run.vocab_size}), got {int(prompt.max())}",
                    field="hint_candidates",
                )
        return fitting

    def _sampler_ids(self, row: Row, recorded: Int32 | None) -> Int32:
        top_k = self.options.top_k
        captured = 0 if recorded is None else recorded.shape[1]
        if recorded is None or captured < top_k:
            raise sample_refused(
                row.sample_id,
                f"openclawrl distils at the engine's {top_k} most likely ids and {captured} "
                "were captured with it; lower top_k, or report samples that were recorded since it was set",
                field="top_k",
            )
        return np.ascontiguousarray(recorded[:, :top_k], dtype=np.int32)
