"""Settings of distillation; each family sets defaults of its own."""

from enum import StrEnum
from typing import Self

from atoll.families.divergence_spec import (
    DistillationSpec,
    DivergenceKind,
    DivergenceSpec,
    Estimator,
    ImportanceLevel,
)
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import PolicyGradientWeight
from pydantic import Field, model_validator


class Teacher(StrEnum):
    """Whose weights the teacher has."""

    SELF = "self"
    """The student's own: current, a moving average of them, or a frozen copy (`teacher_update_rate`)."""
    SEPARATE = "separate"
    """Those of another model: a checkpoint that fits the actor's model, or a teacher engine."""


class TopKSource(StrEnum):
    """Whose K most likely ids a divergence over K ids is taken over."""

    TEACHER = "teacher"
    STUDENT = "student"


class TopKDistribution(StrEnum):
    """What becomes of the rest of the vocabulary in a divergence over K ids."""

    RENORMALIZED = "renormalized"
    """It is left out, and both distributions are renormalised over the K ids."""
    TAIL = "tail"
    """It is one bucket more."""


class DistillOptions(FamilyOptions):
    """Options of every distillation family."""

    teacher: Teacher = Teacher.SELF
    divergence: DivergenceKind = DivergenceKind.FORWARD
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of the jsd."""
    top_k: int = Field(default=0, ge=0)
    """Ids that the divergence is taken over; 0: the whole vocabulary."""
    top_k_source: TopKSource = TopKSource.TEACHER
    top_k_distribution: TopKDistribution = TopKDistribution.RENORMALIZED
    """`renormalized` with the reverse divergence is the reverse KL estimated at the sampled token."""
    teacher_update_rate: float = Field(default=0.0, ge=0, le=1)
    """Of a self teacher: 1 is the current weights, 0 a frozen copy, between them a moving average in float32."""
    teacher_checkpoint: str | None = None
    """Model directory of a separate teacher; none: a separate teacher answers from its engine."""
    importance_sampling_cap: float = Field(default=0.0, ge=0)
    """Importance weights exp(l - lq) are cut off here; 0: no weights."""
    importance_sampling_level: ImportanceLevel = ImportanceLevel.TOKEN
    skip_response_tokens: int = Field(default=0, ge=0)
    """First tokens of every response that are not trained."""

    @model_validator(mode="after")
    def _consistent_teacher(self) -> Self:
        if self.top_k_distribution is TopKDistribution.TAIL and self.top_k == 0:
            raise ValueError("top_k_distribution tail needs top_k above 0; the whole vocabulary (top_k 0) has no tail")
        if self.teacher is Teacher.SELF:
            if self.teacher_checkpoint is not None:
                raise ValueError("teacher_checkpoint is for teacher separate; leave it out or set teacher separate")
            return self
        if self.teacher_update_rate > 0:
            raise ValueError(
                f"teacher_update_rate {self.teacher_update_rate:g} moves a self teacher; a separate one is frozen: "
                "set it to 0"
            )
        if self.teacher_checkpoint is None:
            self._refuse_what_an_engine_cannot_score()
        return self

    def _refuse_what_an_engine_cannot_score(self) -> None:
        if self.top_k == 0:
            raise ValueError(
                "top_k 0 needs the teacher's whole distribution, which an engine does not give; "
                "set teacher_checkpoint, or top_k above 0"
            )
        if self.top_k_source is TopKSource.STUDENT and self.estimator is not Estimator.SAMPLED:
            raise ValueError(
                "top_k_source student needs the teacher's log-probs at ids that the student chose, which an engine "
                "does not give; set teacher_checkpoint, or top_k_source teacher"
            )

    @property
    def estimator(self) -> Estimator:
        """Over what the divergence is taken."""
        if self.top_k == 0:
            return Estimator.FULL
        if self.top_k_distribution is TopKDistribution.TAIL:
            return Estimator.TAIL
        return Estimator.SAMPLED if self.divergence is DivergenceKind.REVERSE else Estimator.RENORMALIZED

    @property
    def student_selects(self) -> bool:
        """Whether the student's own forward must choose ids before the teacher's."""
        over_ids = self.estimator in (Estimator.TAIL, Estimator.RENORMALIZED)
        return over_ids and self.top_k_source is TopKSource.STUDENT

    @property
    def from_engine(self) -> bool:
        """Whether a teacher engine scores the batch before the step, in place of a worker's forward-only pass."""
        return self.teacher is Teacher.SEPARATE and self.teacher_checkpoint is None

    def distillation_spec(self) -> DistillationSpec:
        """The settings as the loss reads them."""
        return DistillationSpec(
            DivergenceSpec(self.divergence, self.jsd_beta),
            self.estimator,
            self.importance_sampling_cap or None,
            self.importance_sampling_level,
        )

    def policy_gradient_weight(self) -> PolicyGradientWeight | None:
        """The sampled reverse KL is -sg[(l_T - l) f] l: f is 1 without a cap, min(p/q, cap) with one of the token."""
        if self.estimator is not Estimator.SAMPLED:
            return None
        if self.importance_sampling_cap == 0:
            return PolicyGradientWeight.none()
        if self.importance_sampling_level is ImportanceLevel.SEQUENCE:
            return None
        return PolicyGradientWeight.truncated(self.importance_sampling_cap)
