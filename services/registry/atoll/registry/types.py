"""The registry's vocabulary: what the chain, the store and the handlers hand to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from atoll.common.weight_version import WeightVersion
from pydantic import JsonValue

JsonObject = Mapping[str, JsonValue]


class Kind(StrEnum):
    """What an artifact holds."""

    MODEL = "model"
    CHECKPOINT = "checkpoint"


class Operation(StrEnum):
    """What appended a version."""

    CREATION = "creation"
    TRAINING = "training"
    ROLLBACK = "rollback"
    RECOVERY = "recovery"


@dataclass(frozen=True, order=True)
class ManifestFile:
    """One file of an artifact. Example: ManifestFile("config.json", 412, "9f86d0...")."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Artifact:
    """A sealed directory.

    Example: Artifact("ab12...", Kind.MODEL, (ManifestFile(...),), total_size=412, sealed_at=utc_now(), removed_at=None)
    """

    digest: str
    kind: Kind
    files: tuple[ManifestFile, ...]
    total_size: int
    sealed_at: datetime
    removed_at: datetime | None


@dataclass(frozen=True)
class ScenarioDefinition:
    """What a caller chooses. Example: ScenarioDefinition("support", "grpo", {}, "/models/small", max_staleness=0)."""

    scenario_id: str
    family: str
    options: JsonObject
    base_model: str
    max_staleness: int


@dataclass(frozen=True)
class Scenario:
    """A scenario and where its chain is. Example: Scenario(definition, head=3, created_at=utc_now())."""

    definition: ScenarioDefinition
    head: int
    created_at: datetime


@dataclass(frozen=True)
class VersionContent:
    """What a commit asks for; equal contents under one job id are one commit.

    restores: number of the version that a rollback or a recovery brings back, None for the other operations.
    Example: VersionContent("support", "job-1f", 3, Operation.TRAINING, "grpo", "ab12...", None, ("5f0c...",),
    {"train/loss": 0.1}, {})
    """

    scenario: str
    job_id: str | None
    parent: int | None
    operation: Operation
    family: str
    model_digest: str
    checkpoint_digest: str | None
    consumed_sample_ids: tuple[str, ...]
    metrics: Mapping[str, float]
    family_state: JsonObject
    restores: int | None = None

    @property
    def is_durable(self) -> bool:
        """Whether training can go on from it: it has a checkpoint, or is the base model, or restores one of these."""
        return self.checkpoint_digest is not None or self.operation is not Operation.TRAINING


@dataclass(frozen=True)
class Version:
    """An entry of the chain.

    Example: Version(content, 4, WeightVersion(1, 4), revision=5, created_at=utc_now(), fencing_token=1)
    """

    content: VersionContent
    number: int
    weight_version: WeightVersion
    revision: int
    created_at: datetime
    fencing_token: int = 0


def utc_now() -> datetime:
    return datetime.now(UTC)
