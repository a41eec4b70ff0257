"""What SDFT (self-distillation fine-tuning, arXiv 2601.19897) declares."""

from dataclasses import dataclass
from typing import ClassVar

from atoll.families.batching import BatchingRule, ReportView
from atoll.families.distill.family import DistillFamily
from atoll.families.distill.options import DistillOptions
from atoll.families.distill.prompts import TeacherPrompt, renderer_of, with_context
from atoll.families.divergence_spec import DivergenceKind, ImportanceLevel
from atoll.families.options import FamilyOptions
from atoll.families.report_checks import metadata_text
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.singleton import Singleton
from pydantic import Field

MAX_CONTEXT_LENGTH = 200_000
"""Characters of `metadata.teacher_context`."""


class SdftOptions(DistillOptions):
    """Options of sdft. Example: `{"batch_size": 8, "skip_response_tokens": 3}`."""

    batch_size: int = Field(default=1, ge=1)
    """Reports in a batch, which is one optimizer step."""
    divergence: DivergenceKind = DivergenceKind.FORWARD
    teacher_update_rate: float = Field(default=0.01, ge=0, le=1)
    """Of a self teacher: 1 is the current weights, 0 a frozen copy, between them a moving average in float32."""
    importance_sampling_cap: float = Field(default=2.0, ge=0)
    """Importance weights exp(l - lq) are cut off here; 0: no weights."""
    importance_sampling_level: ImportanceLevel = ImportanceLevel.SEQUENCE


@dataclass(frozen=True, slots=True)
class TaughtSingleton(Singleton):
    """Single reports that carry `metadata.teacher_context`; a score may be there and is not read."""

    score_required: bool = False

    def validate(self, report: ReportView) -> None:
        """Wants one receipt and a text to teach with."""
        Singleton.validate(self, report)
        metadata_text(report, "teacher_context", at_most=MAX_CONTEXT_LENGTH)


class SdftFamily(DistillFamily[SdftOptions]):
    """The teacher is a slow copy of the student that reads the report's context behind the last user message."""

    name: ClassVar[str] = "sdft"
    Options: ClassVar[type[FamilyOptions]] = SdftOptions
    needs_prompt_renderer: ClassVar[bool] = True

    @property
    def batching(self) -> BatchingRule:
        return TaughtSingleton(batch_size=self.options.batch_size)

    def teacher_prompt(self, item: ReportedSample, context: RowContext) -> TeacherPrompt:
        """The request with the context block, word for word, added to its last user message."""
        taught = metadata_text(item.report, "teacher_context", at_most=MAX_CONTEXT_LENGTH)
        return TeacherPrompt(renderer_of(self.name, context).render(with_context(item.sample, taught)))
