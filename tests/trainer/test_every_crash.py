"""A trainer killed before and after every effect it has, one run for each, and another one that goes on.

The real transaction over the real registry, in process; the gateway, the workers and the engine are fakes. What must
hold afterwards is read from the registry, the store and the engine.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.gateway.v1 import sample_service_pb2_grpc
from atoll.api.registry.v1 import (
    artifact_service_pb2,
    job_record_pb2,
    job_record_service_pb2,
    version_pb2,
)
from atoll.api.trainer.v1 import trainer_service_pb2
from atoll.common import structs
from atoll.common.errors import AtollError, Unavailable
from atoll.common.intact import refuse_damaged
from atoll.registry.types import ScenarioDefinition
from atoll.trainer.assembly import Trainer, assemble, read_scenario
from atoll.trainer.job_records import OPEN
from atoll.trainer.retries import Patience
from atoll.trainer.settings import TrainerSettings

from tests.fakes.backend import write_model
from tests.fakes.mortal import LocalChannel, MortalBackend, MortalEngine, Tripwire
from tests.fakes.registry import Handlers, RegistryUnderTest
from tests.fakes.samples import FakeSamples
from tests.trainer.world import OPTIONS, pair

FOR_EVER = 3_600.0
PAUSE = 0.005


@dataclass(frozen=True)
class Story:
    """What callers want, in order. Example: Story("two jobs", (TRAIN, TRAIN))."""

    name: str
    wishes: tuple[int | None, ...]
    """A batch to train, or the number of a version to go back to."""
    killed_during: int
    """The wish in whose course trainers die."""
    checkpoint_every: int = 1


TRAIN = None
STORIES = (
    Story("the first of two jobs", (TRAIN, TRAIN), killed_during=0),
    Story("a job after a live version", (TRAIN, TRAIN), killed_during=1, checkpoint_every=2),
    Story("a job that makes a live version", (TRAIN, TRAIN), killed_during=1, checkpoint_every=3),
    Story("a rollback", (TRAIN, 0), killed_during=1),
)


@dataclass
class Line:
    """A scenario with its callers, who outlive every trainer."""

    scenario: str
    story: Story
    registry: RegistryUnderTest
    samples: FakeSamples
    engine: MortalEngine
    settings: TrainerSettings
    submitted: dict[str, trainer_service_pb2.SubmitJobRequest] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    """How many places the trainer had passed at the end of each wish."""

    async def live(self, wire: Tripwire) -> None:
        """One trainer's life: until the story has ended, or until it dies."""
        handlers = Handlers()
        sample_service_pb2_grpc.add_SampleServiceServicer_to_server(self.samples, handlers)  # type: ignore[arg-type]
        registry, gateway = LocalChannel(self.registry.handlers, wire), LocalChannel(handlers.found, wire)
        self.engine.attach(wire)
        patience = Patience(0.001, 0.002)

        async def run() -> None:
            scenario = await read_scenario(self.settings, registry, patience)  # type: ignore[arg-type]
            trainer = assemble(
                self.settings,
                scenario,
                MortalBackend(wire),
                registry,  # type: ignore[arg-type]
                gateway,  # type: ignore[arg-type]
                [self.engine],
                None,
                _say_nothing,
                patience,
            )
            async with asyncio.TaskGroup() as tasks:
                work = [tasks.create_task(each) for each in trainer.work("here:1")]
                await self._tell(trainer, wire)
                for task in work:
                    task.cancel()

        life, death = asyncio.create_task(run()), asyncio.create_task(wire.dead.wait())
        async with asyncio.timeout(20):
            await asyncio.wait({life, death}, return_when=asyncio.FIRST_COMPLETED)
        if not wire.is_dead:
            await life
        for task in (life, death):
            task.cancel()
        await asyncio.gather(life, death, return_exceptions=True)

    async def _tell(self, trainer: Trainer, wire: Tripwire) -> None:
        """What the gateway does: submits what it has reserved, again when it hears of another trainer."""
        for index, wish in enumerate(self.story.wishes):
            job_id = f"job-{index}"
            while not await self.ended(job_id):
                if await self.record(job_id) is None:
                    await self._submit(trainer, job_id, wish)
                await asyncio.sleep(PAUSE)
            await self._served()
            self.passed.append(len(wire.places))

    async def _served(self) -> None:
        """Waits until the engine has the head's name."""
        while self.engine.served != (await self.registry.versions(self.scenario))[-1].weight_version:
            await asyncio.sleep(PAUSE)

    async def _submit(self, trainer: Trainer, job_id: str, wish: int | None) -> None:
        try:
            if wish is not None:
                request = trainer_service_pb2.SubmitRollbackRequest(job_id=job_id, scenario=self.scenario, version=wish)
                await trainer.service.SubmitRollback(request, None)  # type: ignore[arg-type]
                return
            if job_id not in self.submitted:
                batch = pair(f"{self.scenario}-{job_id}", versions=(self.engine.served,))
                self.samples.batches[job_id] = batch
                self.submitted[job_id] = trainer_service_pb2.SubmitJobRequest(
                    job_id=job_id,
                    scenario=self.scenario,
                    family="grpo",
                    options=structs.struct_from(OPTIONS),
                    sample_ids=[sample.sample_id for sample in batch],
                )
            await trainer.service.SubmitJob(self.submitted[job_id], None)  # type: ignore[arg-type]
        except Unavailable as away:
            assert away.reason == errors_pb2.REASON_NOT_LEASE_HOLDER

    async def record(self, job_id: str) -> job_record_pb2.JobRecord | None:
        request = job_record_service_pb2.GetJobRecordRequest(scenario=self.scenario, job_id=job_id)
        try:
            record: job_record_pb2.JobRecord = (await self.registry.ask("GetJobRecord", request)).record
        except AtollError as error:
            assert error.reason == errors_pb2.REASON_JOB_NOT_FOUND
            return None
        return record

    async def ended(self, job_id: str) -> bool:
        record = await self.record(job_id)
        return record is not None and record.phase not in OPEN

    async def check(self) -> list[version_pb2.Version]:
        """What holds whatever happened; the chain."""
        chain = await self.registry.versions(self.scenario)
        assert [version.number for version in chain] == list(range(len(chain)))
        assert [version.parent for version in chain[1:]] == list(range(len(chain) - 1))
        consumed = Counter(sample for version in chain for sample in version.consumed_sample_ids)
        assert consumed == Counter(sample for job in self.submitted.values() for sample in job.sample_ids)
        for index, wish in enumerate(self.story.wishes):
            record = await self.record(f"job-{index}")
            assert record is not None and record.phase == job_record_pb2.JOB_PHASE_COMMITTED, record
            assert record.attempt <= 2
            assert chain[record.version].job_id == f"job-{index}"
            assert wish is None or chain[record.version].restores == wish
        names = [version.weight_version for version in chain]
        assert len(set(names)) == len(names)
        for digest in {chain[-1].model_digest, chain[-1].checkpoint_digest} - {""}:
            request = artifact_service_pb2.GetArtifactRequest(digest=digest)
            artifact = (await self.registry.ask("GetArtifact", request)).artifact
            refuse_damaged(Path(artifact.location), artifact.files)
        assert self.engine.served == chain[-1].weight_version
        return chain


async def _say_nothing(serving: bool) -> None:
    """Health is nobody's business here."""


@pytest.fixture
async def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RegistryUnderTest]:
    # Processes die here, not machines: what was written is there.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    write_model(tmp_path / "base", [1.0, 2.0, 3.0])
    made = RegistryUnderTest(tmp_path, tmp_path / "base", "unused", "grpo", OPTIONS)
    yield made
    made.close()


def line(registry: RegistryUnderTest, directory: Path, story: Story, name: str) -> Line:
    """A fresh scenario of the registry."""
    registry.add_scenario(ScenarioDefinition(name, "grpo", OPTIONS, str(directory / "base"), 0))
    settings = TrainerSettings(
        scenario=name,
        registry="in-process:1",
        gateway="in-process:2",
        engines=("http://engine",),
        run_dir=directory / "run",
        learning_rate=1e-3,
        publish_poll_s=FOR_EVER,
        lease_ttl_s=FOR_EVER,
        checkpoint_every_n_versions=story.checkpoint_every,
    )
    return Line(name, story, registry, FakeSamples(), MortalEngine(), settings)  # type: ignore[abstract]


def numbers(chain: Sequence[version_pb2.Version], *operations: version_pb2.Operation.ValueType) -> list[int]:
    return [version.number for version in chain if version.operation in operations]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
async def test_whatever_a_trainer_dies_of_another_one_goes_on_and_nothing_is_lost_or_done_twice(
    registry: RegistryUnderTest, tmp_path: Path, story: Story
) -> None:
    calm, undisturbed = line(registry, tmp_path, story, "calm"), Tripwire()
    await calm.live(undisturbed)
    expected = await calm.check()
    assert len(expected) == len(story.wishes) + 1
    first = calm.passed[story.killed_during - 1] if story.killed_during else 0
    places = undisturbed.places[first : calm.passed[story.killed_during]]
    assert {"before CommitVersion", "after CommitVersion", "after update_weights"} <= {name for name, _ in places}
    for index, place in enumerate(places):
        here, wire = line(registry, tmp_path, story, f"killed-{index}"), Tripwire(place)
        await here.live(wire)
        registry.pass_time(2 * FOR_EVER)
        await here.live(Tripwire())
        try:
            await compare(here, expected)
        except AssertionError as broken:
            raise AssertionError(f"killed at {place}, after {wire.places[:-1]}") from broken


async def test_a_trainer_that_dies_while_it_recovers_from_a_live_head_leaves_one_recovery(
    registry: RegistryUnderTest, tmp_path: Path
) -> None:
    story = Story("a recovery", (TRAIN, TRAIN), killed_during=1, checkpoint_every=3)
    committed = ("after CommitVersion", 1)
    calm, recovering = line(registry, tmp_path, story, "calm"), Tripwire()
    await calm.live(Tripwire(committed))
    registry.pass_time(2 * FOR_EVER)
    await calm.live(recovering)
    expected = await calm.check()
    assert numbers(expected, version_pb2.OPERATION_RECOVERY) == [2]
    assert expected[2].restores == 0 and expected[2].model_digest == expected[1].model_digest
    places = [
        (f"{when} {what}", 1) for what in ("CommitVersion", "load", "update_weights") for when in ("before", "after")
    ]
    assert set(places) <= set(recovering.places)
    for index, place in enumerate(places):
        here = line(registry, tmp_path, story, f"killed-{index}")
        for wire in (Tripwire(committed), Tripwire(place), Tripwire()):
            await here.live(wire)
            registry.pass_time(2 * FOR_EVER)
        chain = await here.check()
        assert [version.model_digest for version in chain] == [version.model_digest for version in expected], place


async def compare(here: Line, expected: Sequence[version_pb2.Version]) -> None:
    """What holds always, and the weights of a trainer that never died: no step was taken twice or left out.

    A recovery loses the moments since the checkpoint before, so it may end with other weights.
    """
    chain = await here.check()
    recoveries = numbers(chain, version_pb2.OPERATION_RECOVERY)
    assert len(recoveries) <= (here.story.checkpoint_every > 1)
    if not recoveries:
        assert [version.model_digest for version in chain] == [version.model_digest for version in expected]
