"""What the trainer knows of the registry: the scenario, the versions of its chain, and the commit."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import (
    artifact_pb2,
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    scenario_service_pb2,
    scenario_service_pb2_grpc,
    version_pb2,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.api.registry.v1.version_pb2 import Operation
from atoll.common import structs
from atoll.common.errors import AtollError
from atoll.common.weight_version import WeightVersion
from atoll.trainer.calls import answer_of
from pydantic import JsonValue

CALL_SECONDS = 30.0
"""Deadline of a call that only touches the database."""


@dataclass(frozen=True)
class ScenarioFacts:
    """What the trainer needs of a scenario. Example: ScenarioFacts("chat", "grpo", {"groups_per_step": 4}, 0)."""

    scenario: str
    family: str
    options: Mapping[str, JsonValue]
    max_staleness: int


@dataclass(frozen=True)
class ChainVersion:
    """An entry of the chain.

    Example: ChainVersion(7, 6, WeightVersion(1, 7), "job-1f...", "grpo", "ab...", "cd...", ("4f0c...",))
    """

    number: int
    parent: int | None
    weight_version: WeightVersion
    job_id: str = ""
    family: str = ""
    model_digest: str = ""
    checkpoint_digest: str = ""
    """Empty for a live version, for version 0, and for one that brings version 0 back."""
    consumed_sample_ids: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    family_state: Mapping[str, JsonValue] = field(default_factory=dict)
    operation: Operation.ValueType = version_pb2.OPERATION_TRAINING
    restores: int | None = None
    """The version that a rollback or a recovery brought back."""
    durable: bool = True
    """Whether training can go on from it in a fresh memory; a live version lives in the memory that made it."""
    committed_at: datetime | None = None
    """By the registry's clock."""

    @classmethod
    def from_message(cls, message: version_pb2.Version) -> "ChainVersion":
        return cls(
            number=message.number,
            parent=message.parent if message.HasField("parent") else None,
            weight_version=WeightVersion.parse(message.weight_version),
            job_id=message.job_id,
            family=message.family,
            model_digest=message.model_digest,
            checkpoint_digest=message.checkpoint_digest,
            consumed_sample_ids=tuple(message.consumed_sample_ids),
            metrics=dict(message.metrics),
            family_state=structs.object_of(message.family_state, "family_state"),
            operation=message.operation,
            restores=message.restores if message.HasField("restores") else None,
            durable=message.durable,
            committed_at=message.create_time.ToDatetime(UTC) if message.HasField("create_time") else None,
        )


@dataclass(frozen=True)
class NewVersion:
    """What a job appends to the chain. A rollback or a recovery names what it `restores` and consumes nothing."""

    job_id: str
    expected_parent: int
    operation: Operation.ValueType
    family: str
    model_digest: str
    checkpoint_digest: str
    consumed_sample_ids: tuple[str, ...]
    metrics: Mapping[str, float]
    family_state: Mapping[str, JsonValue]
    restores: int | None = None


class Chain:
    """One scenario's chain. Every method asks once and raises the registry's AtollError, Unavailable included."""

    def __init__(self, channel: grpc.aio.Channel, scenario: str) -> None:
        self.scenario = scenario
        self._scenarios = scenario_service_pb2_grpc.ScenarioServiceStub(channel)
        self._versions = version_service_pb2_grpc.VersionServiceStub(channel)
        self._artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(channel)
        # Versions and artifact locations never change once they exist. Kept without what grows with the samples.
        self._by_number: dict[int, ChainVersion] = {}
        self._locations: dict[str, Path] = {}

    async def facts(self) -> ScenarioFacts:
        """The scenario's definition. Raises NotFound (SCENARIO_NOT_FOUND)."""
        request = scenario_service_pb2.GetScenarioRequest(scenario_id=self.scenario)
        scenario = (await answer_of(self._scenarios.GetScenario(request, timeout=CALL_SECONDS))).scenario
        options = structs.object_of(scenario.options, "options")
        return ScenarioFacts(self.scenario, scenario.family, options, scenario.max_staleness)

    async def head(self) -> ChainVersion:
        """The newest version."""
        return await self._get(version_service_pb2.GetVersionRequest(scenario=self.scenario))

    async def version(self, number: int) -> ChainVersion:
        """A version by its number, perhaps without its sample ids and metrics. Raises NotFound (VERSION_NOT_FOUND)."""
        known = self._by_number.get(number)
        return known or await self._get(version_service_pb2.GetVersionRequest(scenario=self.scenario, number=number))

    async def versions(self, numbers: Iterable[int]) -> Mapping[int, ChainVersion]:
        """Several versions by number."""
        found = await asyncio.gather(*(self.version(number) for number in sorted(set(numbers))))
        return {version.number: version for version in found}

    async def version_of_job(self, job_id: str) -> ChainVersion | None:
        """The version that a job made, None when it has not committed."""
        try:
            return await self._get(version_service_pb2.GetVersionRequest(scenario=self.scenario, job_id=job_id))
        except AtollError as error:
            if error.reason == errors_pb2.REASON_VERSION_NOT_FOUND:
                return None
            raise

    async def commit(self, new: NewVersion, token: int) -> ChainVersion:
        """Appends a version under the fencing token: the commit point. Repeating it is harmless.

        Raises Conflict (PARENT_NOT_HEAD, FENCED, JOB_COMMITTED_DIFFERENTLY, SAMPLE_ALREADY_CONSUMED, NOT_RESTORABLE),
        NotFound (ARTIFACT_NOT_FOUND).
        """
        request = version_service_pb2.CommitVersionRequest(
            scenario=self.scenario,
            job_id=new.job_id,
            expected_parent=new.expected_parent,
            operation=new.operation,
            family=new.family,
            model_digest=new.model_digest,
            checkpoint_digest=new.checkpoint_digest,
            consumed_sample_ids=new.consumed_sample_ids,
            metrics=new.metrics,
            family_state=structs.struct_from(new.family_state, "family_state"),
            fencing_token=token,
            restores=new.restores,
        )
        reply = await answer_of(self._versions.CommitVersion(request, timeout=CALL_SECONDS))
        return self._remember(reply.version)

    async def location(self, digest: str) -> Path:
        """The directory of a sealed artifact. Raises NotFound (ARTIFACT_NOT_FOUND)."""
        if digest not in self._locations:
            self._locations[digest] = Path((await self.artifact(digest)).location)
        return self._locations[digest]

    async def artifact(self, digest: str) -> artifact_pb2.Artifact:
        """A sealed artifact with its manifest, as long as its bytes are there. Raises NotFound (ARTIFACT_NOT_FOUND)."""
        request = artifact_service_pb2.GetArtifactRequest(digest=digest)
        return (await answer_of(self._artifacts.GetArtifact(request, timeout=CALL_SECONDS))).artifact

    async def _get(self, request: version_service_pb2.GetVersionRequest) -> ChainVersion:
        return self._remember((await answer_of(self._versions.GetVersion(request, timeout=CALL_SECONDS))).version)

    def _remember(self, message: version_pb2.Version) -> ChainVersion:
        version = ChainVersion.from_message(message)
        self._by_number[version.number] = replace(version, consumed_sample_ids=(), metrics={})
        return version
