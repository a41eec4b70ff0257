"""Jobs that train the critic alone: a new version of the same weights, and nothing to publish."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common import structs
from atoll.registry.types import ScenarioDefinition
from pydantic import JsonValue

from tests.trainer.world import World, pair, until, world

SAO: dict[str, JsonValue] = {"batch_size": 2, "eps_clip_high": 5.0, "num_critic_only_steps": 2}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        made.registry.add_scenario(ScenarioDefinition("critics", "sao", SAO, str(tmp_path / "base"), 0))
        made.settings = made.settings.model_copy(update={"scenario": "critics"})
        yield made


def job_of(here: World, number: int, produced_by: str) -> trainer_service_pb2.SubmitJobRequest:
    submission = here.job(f"job-{number}", pair(f"s{number}", versions=(produced_by,)))
    submission.scenario, submission.family = "critics", "sao"
    submission.options.CopyFrom(structs.struct_from(SAO))
    return submission


@pytest.mark.parametrize("every", [1, 5], ids=["checkpoints", "live versions"])
async def test_jobs_of_the_critic_alone_are_served_without_a_publish_and_nothing_goes_stale(
    here: World, every: int
) -> None:
    here.settings = here.settings.model_copy(update={"checkpoint_every_n_versions": every})
    stub = await here.start()
    for number, produced_by in enumerate(["1:0", "1:0", "1:0"]):
        await stub.SubmitJob(job_of(here, number, produced_by))
        job = await until(stub, f"job-{number}")
        assert (job.state, job.version) == (job_pb2.JOB_STATE_SERVED, number + 1), job.message
        assert job.metrics["staleness/samples_fresh"] == 2
        # Only the third job takes a step of the actor.
        assert ("train/learning_rate" in job.metrics) == (number == 2)
    chain = [here.registry.real.chain.get("critics", number=number).content for number in range(4)]
    digests = [version.model_digest for version in chain]
    assert len(set(digests[:3])) == 1
    assert digests[3] != digests[0]
    assert [bool(version.checkpoint_digest) for version in chain] == [False, *[every == 1] * 3]
    assert [version for _, version in here.engine.updates] == ["1:3"]
    assert here.engine.served == "1:3"


async def test_a_fresh_trainer_goes_on_from_a_version_of_unmoved_weights(here: World) -> None:
    for number, produced_by in enumerate(["1:0", "1:0", "1:0"]):
        stub = await here.start()
        await stub.SubmitJob(job_of(here, number, produced_by))
        job = await until(stub, f"job-{number}")
        assert (job.state, job.version) == (job_pb2.JOB_STATE_SERVED, number + 1), job.message
    assert job.metrics["sao/critic_only"] == 0
    assert [version for _, version in here.engine.updates] == ["1:3"]
