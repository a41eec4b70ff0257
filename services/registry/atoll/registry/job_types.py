"""The vocabulary of job records."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.registry.types import JsonObject


class JobPhase(StrEnum):
    """How far a job has durably come."""

    RECORDED = "recorded"
    RUNNING = "running"
    STAGED = "staged"
    COMMITTED = "committed"
    DROPPED = "dropped"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        return self in OPEN_PHASES


OPEN_PHASES = (JobPhase.RECORDED, JobPhase.RUNNING, JobPhase.STAGED)
"""A record in any other phase never changes again."""


@dataclass(frozen=True)
class TrainingBody:
    """A batch to train. options: None when nobody recorded the job before its commit.

    Example: TrainingBody("grpo", {"group_size": 4}, ("5f0c...", "77ab..."))
    """

    family: str
    options: JsonObject | None
    sample_ids: tuple[str, ...]


@dataclass(frozen=True)
class RollbackBody:
    """A version to bring back. Example: RollbackBody(version=3)."""

    version: int


JobBody = TrainingBody | RollbackBody


@dataclass(frozen=True)
class StagedVersion:
    """Everything that a commit needs besides the body.

    Example: StagedVersion(3, "ab12...", "cd34...", {"train/loss": 0.1}, {"baseline": 0.5})
    """

    parent: int
    model_digest: str
    checkpoint_digest: str | None
    metrics: Mapping[str, float]
    family_state: JsonObject


@dataclass(frozen=True)
class JobProgress:
    """What a write of a record may change.

    staged: set in the phase STAGED and in no other. reason: why it ended without a version, or why it waits.
    Example: JobProgress(JobPhase.RUNNING, attempt=1)
    """

    phase: JobPhase
    attempt: int = 0
    staged: StagedVersion | None = None
    reason: Reason.ValueType = errors_pb2.REASON_UNSPECIFIED
    message: str = ""
    rejected_sample_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobRecord:
    """A job as the registry remembers it. position: 1 for the scenario's first, then 2, ...: the order of running.

    Example: JobRecord("support", "job-1f", body, JobProgress(JobPhase.RECORDED), 1, None, 3, utc_now(), utc_now())
    """

    scenario: str
    job_id: str
    body: JobBody
    progress: JobProgress
    position: int
    version: int | None
    fencing_token: int
    created_at: datetime
    updated_at: datetime
