"""What the driver offers a family: scores of a teacher and groups of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from atoll.families.rows import Float32, Int32
from atoll.families.steps import TrainStep

TEACHER_ENGINE = "teacher"
"""Driver option: the address of a teacher service."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """One token sequence to score. Positions [start, S) are scored."""

    sample_id: str
    tokens: Int32
    """[S]"""
    start: int
    top_k: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """A teacher's log-probs for the R = S - start scored positions."""

    sampled_log_probs: Float32
    """[R]"""
    top_k_ids: Int32 | None = None
    """[R, K]"""
    top_k_log_probs: Float32 | None = None
    """[R, K]"""


class TeacherScorer(Protocol):
    """The frozen teacher engine."""

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        """Scores all requests, in their order, or raises: nothing is scored in part."""


class WorkerGroups(Protocol):
    """The workers of a run, as a family orchestrates them."""

    def train_actor(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """One optimizer step of the actor for each entry; returns each step's metrics."""

    def train_critic(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        """The same for the critic, at the rate and with the clip of its `CriticSpec`: the clipped value loss against
        the rows' `values` and `returns`, with their masks and weights. Only where `BackendNeeds` ask for a critic."""

    def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        """The same steps with what `custom_advantage_function` makes of them: `advantages` of every row, and `values`
        and `returns` where there is a critic.

        One call for the whole job, before any weight of it moves: the critic's forward and the reference log-probs
        where `BackendNeeds` ask for them, then the hook over all rows that lie on each rank.
        """


@dataclass(frozen=True, slots=True)
class JobContext:
    """The job a family works for, and what it may call."""

    head_weight_version: str
    started_at: datetime
    teacher: TeacherScorer | None = None
