"""The torch-free side of distillation: rows with what the teacher reads, checks of the run, scores of an engine."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self, TypeVar

import numpy as np
from atoll.common.errors import BadConfiguration
from atoll.families.distill.options import DistillOptions, TopKDistribution
from atoll.families.distill.prompts import TeacherPrompt
from atoll.families.divergence_spec import Estimator, TeacherColumn
from atoll.families.driver import TEACHER_ENGINE, JobContext, ScoreRequest, TeacherScores
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.policy_spec import PolicyGradientWeight
from atoll.families.refusals import option_refused, sample_refused
from atoll.families.rows import Batch, Column, ColumnDtype, ColumnOrigin, ColumnSpec, Row, UInt8
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.teacher_ids import refuse_foreign_ids

TEACHER_TOKENS = "teacher_tokens"
"""int32 [P_T + R] the teacher's prompt, then the student's response ids verbatim."""
SAMPLE_WEIGHT = "sample_weight"
"""float32 [1] multiplies the row's token losses, never a denominator."""

DistillOptionsT_co = TypeVar("DistillOptionsT_co", bound=DistillOptions, covariant=True)

_READS: dict[Estimator, tuple[tuple[TeacherColumn, ColumnDtype], ...]] = {
    Estimator.FULL: ((TeacherColumn.ROWS, ColumnDtype.FLOAT16),),
    Estimator.SAMPLED: ((TeacherColumn.SAMPLED, ColumnDtype.FLOAT32),),
    Estimator.RENORMALIZED: (
        (TeacherColumn.TOP_K_IDS, ColumnDtype.INT32),
        (TeacherColumn.TOP_K_LOG_PROBS, ColumnDtype.FLOAT32),
    ),
    Estimator.TAIL: (
        (TeacherColumn.TOP_K_IDS, ColumnDtype.INT32),
        (TeacherColumn.TOP_K_LOG_PROBS, ColumnDtype.FLOAT32),
    ),
}


class DistillFamily(LossFamily[DistillOptionsT_co]):
    """A family that lowers a divergence to a teacher at every trained token of the student's own samples.

    A subclass names itself, its defaults and its batching, and says what the teacher reads (`teacher_prompt`); the
    hooks are those of `distill.objective`. Per rollout the mean over trained tokens, then the mean over
    rollouts; one optimizer step per job, because the teacher's scores are those of the job's first weights.
    """

    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.FORBIDDEN
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset(
        {HookChannel.LOSS, HookChannel.ACTOR_PRE_TRAIN}
    )
    objective_module: ClassVar[str | None] = "atoll.families.distill.objective"
    hook_prefix: ClassVar[str | None] = "distill"
    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec(TEACHER_TOKENS, ColumnDtype.INT32, in_loss_batch=False),
        ColumnSpec(SAMPLE_WEIGHT, ColumnDtype.FLOAT32, logged=True),
    )
    _run: RunSettings | None = None

    @abstractmethod
    def teacher_prompt(self, item: ReportedSample, context: RowContext) -> TeacherPrompt:
        """What the teacher reads before the student's response."""

    @property
    def requires_rollout_log_probs(self) -> bool:
        return self.options.importance_sampling_cap > 0

    @property
    def driver_options(self) -> tuple[str, ...]:
        return (TEACHER_ENGINE,) if self.options.from_engine else ()

    def run_columns(self, run: RunSettings) -> tuple[ColumnSpec, ...]:
        """And what the teacher says, which an engine or a worker's forward-only pass fills."""
        origin = ColumnOrigin.DRIVER if self.options.from_engine else ColumnOrigin.WORKER
        said = [
            ColumnSpec(name, dtype, origin, response_aligned=True) for name, dtype in _READS[self.options.estimator]
        ]
        return (*super().run_columns(run), *said)

    def bind(self, run: RunSettings) -> Self:
        """The family with the run's longest row, which the teacher's sequences must not exceed either."""
        bound = copy.copy(self)
        bound._run = run
        return bound

    def shape_sample_row(self, item: ReportedSample, context: RowContext) -> Row:
        """The default row with the teacher's sequence; a report without a score has the reward 0."""
        score = 0.0 if item.report.score is None else item.report.score
        row = super().shape_sample_row(replace(item, report=replace(item.report, score=score)), context)
        prompt = self.teacher_prompt(item, context)
        tokens = np.concatenate([prompt.tokens, row.response_tokens]).astype(np.int32)
        if self._run is not None and len(tokens) > self._run.seq_length:
            raise sample_refused(
                row.sample_id,
                f"its teacher reads {len(tokens)} tokens, the workers take at most "
                f"{self._run.seq_length}; shorten what is added to the prompt or raise the workers' sequence length",
                field=TEACHER_TOKENS,
            )
        columns: dict[str, Column] = {
            TEACHER_TOKENS: tokens,
            SAMPLE_WEIGHT: np.asarray([prompt.sample_weight], dtype=np.float32),
        }
        return replace(row, columns={**row.columns, **columns})

    def effective_mask(self, row: Row) -> UInt8:
        """The loss mask without the first `skip_response_tokens` positions of the response."""
        mask = row.loss_mask.copy()
        mask[: self.options.skip_response_tokens] = 0
        return mask

    def configure_backend(self, run: RunSettings) -> BackendNeeds:
        """No old or reference log-probs; zero dropout where the student's forward selects ids."""
        return BackendNeeds(zero_dropout=self.options.student_selects)

    def validate_specific_args(self, run: RunSettings, source: str) -> None:
        """Refuses a K that the vocabulary does not hold, dropout under selected ids, and what cannot be centered."""
        options = self.options
        most = run.vocab_size - (options.top_k_distribution is TopKDistribution.TAIL)
        if options.top_k > most:
            raise option_refused(
                f"{source}: {self.name}: top_k must be at most {most} with a vocabulary of {run.vocab_size} and "
                f"top_k_distribution {options.top_k_distribution.value}, got {options.top_k}",
                field="top_k",
            )
        if options.student_selects and run.dropout > 0:
            raise option_refused(
                f"{source}: {self.name}: top_k_source student needs dropout 0, got {run.dropout:g}: the forward that "
                "selects ids must be the one that is trained; set dropout 0 or top_k_source teacher",
                field="top_k_source",
            )
        if run.score_centering and options.policy_gradient_weight() is None:
            raise option_refused(
                f"{source}: score_centering true is refused: {self.name} must use the sampled reverse KL (divergence "
                "reverse, top_k above 0, top_k_distribution renormalized) with importance weights of the token or "
                f"none, got divergence {options.divergence.value}, top_k {options.top_k}, top_k_distribution "
                f"{options.top_k_distribution.value}, importance_sampling_level "
                f"{options.importance_sampling_level.value}",
                field="score_centering",
            )
        super().validate_specific_args(run, source)

    def policy_gradient_weight(self, run: RunSettings) -> PolicyGradientWeight | None:
        return self.options.policy_gradient_weight()

    def prepare_rollout(self, batch: Batch, context: JobContext) -> Batch:
        """Asks the teacher's engine for all rows at once, where a separate teacher has no checkpoint.

        Raises: BadConfiguration without an engine; InvalidInput for a row that it cannot score faithfully.
        """
        if not self.options.from_engine:
            return batch
        if context.teacher is None:
            raise BadConfiguration(
                f"{self.name}: teacher separate needs a teacher engine or teacher_checkpoint; give one",
                field="teacher_checkpoint",
            )
        requests = [self._score_request(row) for row in batch.rows]
        scores = context.teacher.score(requests)
        rows = [
            replace(row, columns={**row.columns, **self._said(row, said)})
            for row, said in zip(batch.rows, scores, strict=True)
        ]
        return replace(batch, rows=tuple(rows))

    def _score_request(self, row: Row) -> ScoreRequest:
        if row.temperature != 1:
            raise sample_refused(
                row.sample_id,
                f"a teacher engine scores at temperature 1, got {row.temperature:g}; sample at "
                "temperature 1 or set teacher_checkpoint",
                field="temperature",
            )
        tokens = np.asarray(row.columns[TEACHER_TOKENS], dtype=np.int32)
        top_k = 0 if self.options.estimator is Estimator.SAMPLED else self.options.top_k
        return ScoreRequest(row.sample_id, tokens, len(tokens) - row.response_length, top_k)

    def _said(self, row: Row, scores: TeacherScores) -> dict[str, Column]:
        answered: dict[TeacherColumn, Column | None] = {
            TeacherColumn.SAMPLED: scores.sampled_log_probs,
            TeacherColumn.TOP_K_IDS: scores.top_k_ids,
            TeacherColumn.TOP_K_LOG_PROBS: scores.top_k_log_probs,
        }
        said: dict[str, Column] = {}
        for name, dtype in _READS[self.options.estimator]:
            column = answered[name]
            width = () if name is TeacherColumn.SAMPLED else (self.options.top_k,)
            if column is None or column.shape != (row.response_length, *width):
                raise sample_refused(
                    row.sample_id,
                    f"the teacher should answer {name.value} of shape "
                    f"{[row.response_length, *width]}, got {None if column is None else list(column.shape)}",
                    field=name.value,
                )
            if name is TeacherColumn.TOP_K_IDS:
                refuse_foreign_ids(row, column.astype(np.int32), self._run, name.value)
            said[name.value] = column.astype(dtype.value)
        return said

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Nothing to prepare: there are no advantages. Metric: the share of rows that their teacher speaks about."""
        weights = [float(row.columns[SAMPLE_WEIGHT][0]) for row in batch.rows]
        return StepSignal(None, {"taught_rate": _share_above_zero(weights)}, state)


def _share_above_zero(weights: Sequence[float]) -> float:
    return sum(weight > 0 for weight in weights) / len(weights)
