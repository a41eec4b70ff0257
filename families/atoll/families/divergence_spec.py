"""Divergences between a student S and a teacher T as a family describes its own: plain facts, free of torch."""

from dataclasses import dataclass
from enum import StrEnum


class DivergenceKind(StrEnum):
    """What is minimised, per token."""

    FORWARD = "forward"
    """KL(T || S)"""
    REVERSE = "reverse"
    """KL(S || T)"""
    JSD = "jsd"
    """b KL(T || M) + (1 - b) KL(S || M), M = b T + (1 - b) S (generalised Jensen-Shannon, arXiv 2306.13649)"""


class Estimator(StrEnum):
    """Over what a divergence is taken."""

    FULL = "full"
    """The whole vocabulary, against a float16 row of the teacher's log-probs."""
    RENORMALIZED = "renormalized"
    """K ids, both distributions renormalised over them."""
    TAIL = "tail"
    """K ids and one bucket for the rest of the vocabulary."""
    SAMPLED = "sampled"
    """The reverse KL estimated at the sampled token."""


class ImportanceLevel(StrEnum):
    """What a truncated importance weight belongs to."""

    TOKEN = "token"
    """min(exp(l - lq), cap) of the token itself."""
    SEQUENCE = "sequence"
    """The mean of those over the row's trained tokens."""


@dataclass(frozen=True, slots=True)
class DivergenceSpec:
    """A divergence. Example: `DivergenceSpec(DivergenceKind.JSD, beta=0.5)`."""

    kind: DivergenceKind
    beta: float = 0.5
    """b of the JSD, in (0, 1)."""


@dataclass(frozen=True, slots=True)
class DistillationSpec:
    """Knobs of the distillation loss.

    Example: `DistillationSpec(DivergenceSpec(DivergenceKind.FORWARD), Estimator.FULL, importance_cap=2.0)`.
    """

    divergence: DivergenceSpec
    estimator: Estimator
    importance_cap: float | None = None
    """None: no importance weights."""
    importance_level: ImportanceLevel = ImportanceLevel.TOKEN


class TeacherColumn(StrEnum):
    """Names of the columns that hold what the teacher said about a row, each with a first axis of R."""

    SAMPLED = "distill_teacher_sampled_log_probs"
    """float32 [R] log-probs of the response tokens."""
    TOP_K_IDS = "distill_teacher_topk_ids"
    """int32 [R, K] the ids that the divergence is taken over, whoever selected them."""
    TOP_K_LOG_PROBS = "distill_teacher_topk_log_probs"
    """float32 [R, K] the teacher's log-probs there."""
    ROWS = "teacher_rows"
    """float16 [R, V_local] its log-probs over this rank's shard of the vocabulary."""
