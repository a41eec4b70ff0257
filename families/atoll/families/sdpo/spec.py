"""What SDPO (self-distillation policy optimization, arXiv 2601.20802) declares."""

from dataclasses import dataclass
from typing import ClassVar

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.distill.family import DistillFamily
from atoll.families.distill.options import DistillOptions, TopKDistribution, TopKSource
from atoll.families.distill.prompts import TeacherPrompt, first_text, renderer_of, with_context, without_thinking
from atoll.families.divergence_spec import DivergenceKind
from atoll.families.grid import Grid
from atoll.families.options import FamilyOptions
from atoll.families.refusals import report_refused
from atoll.families.samples import ReportedSample, RowContext
from pydantic import Field

ATTEMPT = "A correct answer from another attempt:\n\n{attempt}"
FEEDBACK = "Feedback on your last attempt:\n\n{feedback}"
CLOSING = "Now answer the question yourself."


class SdpoOptions(DistillOptions):
    """Options of sdpo. Example: `{"groups_per_step": 8, "rollouts_per_group": 8, "use_feedback": true}`."""

    groups_per_step: int = Field(default=4, ge=1)
    """Groups, one to a question, in a grid."""
    rollouts_per_group: int = Field(default=8, ge=2)
    """Rollouts of each question."""
    success_reward_threshold: float = 0.5
    """An attempt is correct from this score on."""
    use_feedback: bool = False
    """Show the teacher the report's `feedback`, a text, too."""
    divergence: DivergenceKind = DivergenceKind.JSD
    top_k: int = Field(default=100, ge=0)
    """Ids that the divergence is taken over; 0: the whole vocabulary."""
    top_k_source: TopKSource = TopKSource.STUDENT
    top_k_distribution: TopKDistribution = TopKDistribution.TAIL
    """`renormalized` with the reverse divergence is the reverse KL estimated at the sampled token."""
    teacher_update_rate: float = Field(default=0.05, ge=0, le=1)
    """Of a self teacher: 1 is the current weights, 0 a frozen copy, between them a moving average in float32."""
    importance_sampling_cap: float = Field(default=2.0, ge=0)
    """Importance weights exp(l - lq) are cut off here; 0: no weights."""


@dataclass(frozen=True, slots=True)
class FeedbackGrid(Grid):
    """A grid of rollouts of one sample each, whose reports may carry feedback."""

    max_receipts: int | None = 1
    use_feedback: bool = False

    def validate(self, report: ReportView) -> None:
        """Like a grid's, and feedback that is read must be a text."""
        Grid.validate(self, report)
        if self.use_feedback and not isinstance(report.feedback, str | None):
            raise report_refused(
                f"feedback: a text expected, which the teacher reads, got {type(report.feedback).__name__}",
                field="feedback",
            )


class SdpoFamily(DistillFamily[SdpoOptions]):
    """The teacher is a slow copy of the student that reads the first correct attempt of another rollout."""

    name: ClassVar[str] = "sdpo"
    Options: ClassVar[type[FamilyOptions]] = SdpoOptions
    needs_prompt_renderer: ClassVar[bool] = True

    @property
    def batching(self) -> BatchingRule:
        options = self.options
        return FeedbackGrid(options.groups_per_step, options.rollouts_per_group, use_feedback=options.use_feedback)

    def teacher_prompt(self, item: ReportedSample, context: RowContext) -> TeacherPrompt:
        """The question with the attempt and the feedback there is; without either, the plain prompt at weight 0."""
        attempt = first_text([without_thinking(each.sample.text) for each in self._correct_others(item, context)])
        blocks = [] if attempt is None else [ATTEMPT.format(attempt=attempt)]
        feedback = item.report.feedback
        if self.options.use_feedback and isinstance(feedback, str) and feedback.strip():
            blocks.append(FEEDBACK.format(feedback=feedback.strip()))
        if not blocks:
            return TeacherPrompt(item.sample.tokens[: item.sample.prompt_length], sample_weight=0.0)
        messages = with_context(item.sample, "\n\n".join([*blocks, CLOSING]))
        return TeacherPrompt(renderer_of(self.name, context).render(messages))

    def _correct_others(self, item: ReportedSample, context: RowContext) -> list[ReportedSample]:
        """Correct attempts of the same question by other rollouts, in the order of the grid."""
        group = self.batching.group_of(item.report)
        return [
            other
            for other in context.batch
            if other.report.report_id != item.report.report_id
            and self.batching.group_of(other.report) == group
            and other.report.score is not None
            and other.report.score >= self.options.success_reward_threshold
        ]
