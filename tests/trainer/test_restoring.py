"""Rollbacks through the jobs' queue, live versions, and the recovery from a memory that is gone."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import version_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.errors import AtollError
from atoll.common.rpc_errors import from_rpc_error
from atoll.trainer.recovery import recovery_job_id

from tests.fakes.backend import read_weights
from tests.trainer.world import Stub, World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def train(here: World, stub: Stub, name: str, weight_version: str, batch: str = "") -> job_pb2.Job:
    """A job of samples that this version produced; equal batches have equal rows."""
    await stub.SubmitJob(here.job(name, pair(batch or name, versions=(weight_version,))))
    return await until(stub, name)


async def roll_back(stub: Stub, version: int, job_id: str = "back") -> job_pb2.Job:
    await stub.SubmitRollback(
        trainer_service_pb2.SubmitRollbackRequest(job_id=job_id, scenario="chat", version=version)
    )
    return await until(stub, job_id)


async def refusal(call: object) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return from_rpc_error(refused.value)


def every(here: World, versions: int) -> None:
    here.settings = here.settings.model_copy(update={"checkpoint_every_n_versions": versions})


async def test_a_rollback_is_a_new_version_in_a_new_incarnation_that_engines_and_workers_load(here: World) -> None:
    stub = await here.start()
    for number in range(2):
        await train(here, stub, f"job-{number}", f"1:{number}")
    job = await roll_back(stub, 1)
    assert (job.state, job.version, job.restores) == (job_pb2.JOB_STATE_SERVED, 3, 1)
    version = (await here.registry.versions())[3]
    assert (version.operation, version.restores, version.weight_version) == (version_pb2.OPERATION_ROLLBACK, 1, "2:3")
    assert here.engine.served == "2:3" and here.engine.updates[-1] == (await here.registry.model_of(1), "2:3")
    async with asyncio.timeout(5):  # the workers hold it before the next job comes
        while (await stub.GetTrainer(trainer_service_pb2.GetTrainerRequest())).loaded_version != 3:
            await asyncio.sleep(0.01)
    assert here.backend.weights == read_weights(await here.registry.model_of(1)) and here.backend.count == 1


async def test_training_on_from_a_rollback_gives_the_weights_of_the_chain_that_never_left_it(
    here: World, tmp_path: Path
) -> None:
    stub = await here.start()
    await train(here, stub, "job-0", "1:0", "a")
    await train(here, stub, "job-1", "1:1", "wrong")
    await roll_back(stub, 1)
    assert (await train(here, stub, "job-2", "2:3", "b")).version == 4
    (tmp_path / "calm").mkdir()
    async with world(tmp_path / "calm") as calm:
        undisturbed = await calm.start()
        await train(calm, undisturbed, "job-0", "1:0", "a")
        await train(calm, undisturbed, "job-1", "1:1", "b")
        expected = (await calm.registry.versions())[2]
    assert (await here.registry.versions())[4].model_digest == expected.model_digest


async def test_a_batch_of_the_incarnation_that_was_left_is_dropped(here: World) -> None:
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    await roll_back(stub, 0)
    job = await train(here, stub, "job-1", "1:1")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_DROPPED, errors_pb2.REASON_STALE_SAMPLE)
    assert job.metrics["staleness/samples_dropped"] == 2


async def test_a_rollback_to_damaged_files_ends_refused_and_moves_nothing(here: World) -> None:
    stub = await here.start()
    for number in range(2):
        await train(here, stub, f"job-{number}", f"1:{number}")
    weights = await here.registry.model_of(1) / "weights.json"
    weights.chmod(0o600)
    weights.write_text("[0.0, 0.0, 0.0]")
    job = await roll_back(stub, 1)
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_NOT_RESTORABLE)
    assert "weights.json has sha256" in job.message and "name another version" in job.message
    assert [version.number for version in await here.registry.versions()] == [0, 1, 2] and here.engine.served == "1:2"


async def test_a_rollback_to_nowhere_or_to_a_live_version_is_refused_at_once(here: World) -> None:
    every(here, 2)
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    for version, reason in ((1, errors_pb2.REASON_NOT_RESTORABLE), (9, errors_pb2.REASON_VERSION_NOT_FOUND)):
        request = trainer_service_pb2.SubmitRollbackRequest(job_id="back", scenario="chat", version=version)
        assert (await refusal(stub.SubmitRollback(request))).reason == reason
    request = trainer_service_pb2.SubmitRollbackRequest(job_id="back", scenario="other", version=0)
    assert (await refusal(stub.SubmitRollback(request))).reason == errors_pb2.REASON_NOT_TRAINED_HERE
    request = trainer_service_pb2.SubmitRollbackRequest(job_id="job-0", scenario="chat", version=0)
    assert (await refusal(stub.SubmitRollback(request))).reason == errors_pb2.REASON_JOB_ID_REUSED


async def test_live_versions_keep_their_weights_alone_and_training_goes_on_from_memory(
    here: World, tmp_path: Path
) -> None:
    every(here, 2)
    stub = await here.start()
    for number in range(4):
        assert (await train(here, stub, f"job-{number}", f"1:{number}")).version == number + 1
    chain = await here.registry.versions()
    assert [bool(version.checkpoint_digest) for version in chain] == [False, False, True, False, True]
    assert [version.durable for version in chain] == [True, False, True, False, True]
    assert len(here.backend.loads) == 1
    (tmp_path / "calm").mkdir()
    async with world(tmp_path / "calm") as calm:
        undisturbed = await calm.start()
        for number in range(4):
            await train(calm, undisturbed, f"job-{number}", f"1:{number}")
        expected = await calm.registry.versions()
    assert [version.model_digest for version in chain] == [version.model_digest for version in expected]


async def test_a_live_head_whose_trainer_died_is_recovered_with_its_weights_and_costs_no_sample(here: World) -> None:
    every(here, 2)
    stub = await here.start()
    for number in range(3):
        await train(here, stub, f"job-{number}", f"1:{number}")
    await here.kill()
    stub = await here.start()
    head = (await here.registry.versions())[-1]
    assert (head.number, head.operation, head.restores) == (4, version_pb2.OPERATION_RECOVERY, 2)
    assert (head.weight_version, head.job_id) == ("2:4", recovery_job_id("chat", 3))
    assert here.backend.weights == read_weights(await here.registry.model_of(3)), "the head's own weights"
    assert here.backend.count == 2, "and the optimizer of the checkpoint"
    # What version 3 produced before the crash is still fresh.
    assert (await train(here, stub, "job-3", "1:3")).version == 5


@pytest.mark.parametrize("lost", [False, True])
async def test_what_was_staged_on_a_live_head_is_committed_in_place_of_a_recovery_if_its_bytes_are_there(
    here: World, lost: bool
) -> None:
    every(here, 2)
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    full = AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)
    here.registry.refusals["CommitVersion"] = [full] * 1_000
    await stub.SubmitJob(here.job("job-1", pair("job-1", versions=("1:1",))))
    await until(stub, "job-1", job_pb2.JOB_STATE_DEFERRED)
    count = here.backend.count
    await here.kill()
    here.registry.refusals.clear()
    if lost:
        here.registry.refusals["CommitVersion"] = [AtollError("gone", reason=errors_pb2.REASON_ARTIFACT_NOT_FOUND)]
    stub = await here.start()
    assert (await until(stub, "job-1")).version == (3 if lost else 2)
    recoveries = [v for v in await here.registry.versions() if v.operation == version_pb2.OPERATION_RECOVERY]
    assert (len(recoveries), here.backend.trained_jobs) == ((1, 1) if lost else (0, 0))
    assert lost or here.backend.count == count, "the optimizer is the one that took the steps"


async def test_a_recovery_waits_until_the_registry_has_room_for_it(here: World) -> None:
    every(here, 2)
    await train(here, await here.start(), "job-0", "1:0")
    await here.kill()
    full = AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)
    here.registry.refusals["CommitVersion"] = [full] * 3
    await here.start()
    assert (await here.registry.versions())[-1].operation == version_pb2.OPERATION_RECOVERY


async def test_a_live_head_whose_workers_died_is_recovered_within_the_job(here: World) -> None:
    every(here, 3)
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    here.backend.before["second_step"] = [here.backend.crash]
    job = await train(here, stub, "job-1", "1:1")
    assert (job.state, job.version, job.attempt) == (job_pb2.JOB_STATE_SERVED, 3, 2)
    assert (await here.registry.versions())[2].operation == version_pb2.OPERATION_RECOVERY


async def test_a_live_head_whose_bytes_are_lost_too_goes_back_to_the_checkpoint(here: World) -> None:
    every(here, 2)
    stub = await here.start()
    for number in range(3):
        await train(here, stub, f"job-{number}", f"1:{number}")
    await here.kill()
    lost = (await here.registry.versions())[3].model_digest
    await here.registry.lose(lost)
    stub = await here.start()
    head, checkpoint = (await here.registry.versions())[-1], (await here.registry.versions())[2]
    assert (head.operation, head.restores, head.model_digest) == (
        version_pb2.OPERATION_RECOVERY,
        2,
        checkpoint.model_digest,
    )
    job = await train(here, stub, "job-3", "1:3")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_DROPPED, errors_pb2.REASON_LOST_VERSION)
    # The checkpoint's own content is served again: what it produced is fresh.
    assert (await train(here, stub, "job-4", "1:2")).version == 5


@pytest.mark.parametrize("at_boot", [True, False])
@pytest.mark.parametrize("lost", ["checkpoint_digest", "model_digest"])
async def test_a_durable_head_whose_bytes_are_lost_is_gone_on_from(here: World, lost: str, at_boot: bool) -> None:
    stub = await here.start()
    for number in range(2):
        await train(here, stub, f"job-{number}", f"1:{number}")
    before = await here.registry.versions()
    await here.registry.lose(getattr(before[2], lost))
    if at_boot:
        stub = await here.start()
    else:
        here.backend.before["train"] = [here.backend.crash]
        await train(here, stub, "job-2", "1:2")
    version = (await here.registry.versions())[3]
    kept = before[2] if lost == "checkpoint_digest" else before[1]
    assert (version.operation, version.restores) == (version_pb2.OPERATION_RECOVERY, 1)
    assert (version.model_digest, version.checkpoint_digest) == (kept.model_digest, before[1].checkpoint_digest)
    assert (await train(here, stub, "job-3", f"2:{len(await here.registry.versions()) - 1}")).state == (
        job_pb2.JOB_STATE_SERVED
    )


@pytest.mark.parametrize("registry_knows", [True, False])
async def test_a_head_whose_bytes_are_lost_is_trained_on_from_memory(here: World, registry_knows: bool) -> None:
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    head = (await here.registry.versions())[1]
    if registry_knows:
        await here.registry.lose(head.checkpoint_digest)
    else:
        here.registry.real.artifacts.store.remove(head.model_digest)
    assert (await train(here, stub, "job-1", "1:1")).version == 2


async def test_what_is_loaded_is_compared_with_its_manifest_before_it_is_trusted(here: World) -> None:
    stub = await here.start()
    await train(here, stub, "job-0", "1:0")
    await here.stop()
    model = await here.registry.model_of(1)
    shutil.copytree(model, model.with_name("kept"))
    model.chmod(0o755)
    for path in model.iterdir():
        path.chmod(0o644)
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000, "model_type": "other"}))
    with pytest.raises(AtollError, match=r"config\.json has sha256"):
        await here.start()
    assert here.backend.loads == []
