"""What OPD (on-policy distillation) declares: arXiv 2306.13649, with the sampled reverse KL of arXiv 2306.08543."""

from typing import ClassVar

from atoll.families.batching import BatchingRule
from atoll.families.distill.family import DistillFamily
from atoll.families.distill.options import DistillOptions, Teacher
from atoll.families.distill.prompts import TeacherPrompt
from atoll.families.divergence_spec import DivergenceKind
from atoll.families.options import FamilyOptions
from atoll.families.refusals import option_refused
from atoll.families.run_settings import RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.singleton import Singleton
from pydantic import Field


class OpdOptions(DistillOptions):
    """Options of opd. Example: `{"batch_size": 32, "teacher_checkpoint": "/models/teacher"}`."""

    batch_size: int = Field(default=8, ge=1)
    """Reports in a batch, which is one optimizer step."""
    teacher: Teacher = Teacher.SEPARATE
    divergence: DivergenceKind = DivergenceKind.REVERSE
    top_k: int = Field(default=1, ge=0)
    """Ids that the divergence is taken over; 0: the whole vocabulary."""


class OpdFamily(DistillFamily[OpdOptions]):
    """The teacher is another, frozen model that reads exactly what the student read and wrote."""

    name: ClassVar[str] = "opd"
    Options: ClassVar[type[FamilyOptions]] = OpdOptions

    @property
    def batching(self) -> BatchingRule:
        return Singleton(batch_size=self.options.batch_size, score_required=False)

    def validate_specific_args(self, run: RunSettings, source: str) -> None:
        """And refuses stale samples without importance weights: the bias is large."""
        if run.max_staleness > 0 and self.options.importance_sampling_cap == 0:
            raise option_refused(
                f"{source}: opd: importance_sampling_cap 0 is refused with max_staleness {run.max_staleness}: samples "
                "of older weights bias it much; set a cap (such as 2.0) or max_staleness 0",
                field="importance_sampling_cap",
            )
        super().validate_specific_args(run, source)

    def teacher_prompt(self, item: ReportedSample, context: RowContext) -> TeacherPrompt:
        """The student's own prompt."""
        return TeacherPrompt(item.sample.tokens[: item.sample.prompt_length])
