"""What took a second step, lost a batch or stopped for good elsewhere, in real processes.

What needs no kill has its test beside the code: a publish that fails once and an engine that only says it serves the
head in tests/trainer/test_publishing.py, versions named explicitly in tests/gateway/test_chat.py, publishes in the
middle of a reply in tests/common/test_engine_client_publish.py and tests/gateway/test_real_engine.py.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, Unavailable
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.structs import struct_from
from pydantic import JsonValue

from tests.chaos.databases import batch_options
from tests.chaos.deployment import SCENARIO, TOKEN, Shape
from tests.chaos.stage import Stage, stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
IN_OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture
async def here(tiny_models: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    shape = Shape(trainer_settings={"LEASE_TTL_S": "2"})
    async with stage(tmp_path, tiny_models / "student", shape) as running:
        yield running


def trained_versions(here: Stage) -> int:
    return sum(version.operation == "training" for version in here.observer.read()[1].versions)


async def submit(here: Stage, job_id: str, receipts: list[str], options: Mapping[str, JsonValue]) -> job_pb2.Job:
    """SubmitJob as a gateway sends it, until the trainer holds the lease again. Raises AtollError."""
    request = trainer_service_pb2.SubmitJobRequest(
        job_id=job_id, scenario=SCENARIO, family="grpo", options=struct_from(options), sample_ids=receipts
    )
    async with open_channel(here.deployment.address("trainer-1"), TOKEN) as channel:
        while True:
            try:
                return (await trainer_service_pb2_grpc.TrainerServiceStub(channel).SubmitJob(request, timeout=30)).job
            except grpc.RpcError as error:
                refusal = from_rpc_error(error)
                if not isinstance(refusal, Unavailable):
                    raise refusal from None
                await asyncio.sleep(0.2)


async def test_after_a_crash_no_submission_trains_a_committed_sample_again(here: Stage) -> None:
    """Not the same one, not one with other options under its id, not one with other options under another id."""
    await here.arm("trainer-1", "trainer.committed")
    feeding = asyncio.create_task(here.feed("first"))
    await here.deployment["trainer-1"].ended()
    receipts = await feeding
    # Nobody but this test submits from here on.
    await here.deployment["gateway"].terminate()
    await here.disarm("trainer-1")
    (job_id,) = here.observer.read()[1].jobs
    in_order = list(here.observer.read()[0].batch_receipts[job_id])
    assert set(in_order) == set(receipts)

    options = batch_options(here.deployment.gateway_database, job_id)
    again = await submit(here, job_id, in_order, options)
    assert again.state in (job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_SERVED) and again.version == 1
    changed = {**options, "eps_clip": 0.3}
    with pytest.raises(AtollError) as refused:
        await submit(here, job_id, in_order, changed)
    assert refused.value.reason == errors_pb2.REASON_JOB_ID_REUSED
    other_id = "job-" + "0" * 32
    with pytest.raises(AtollError, match=r"0\.3.*this trainer trains"):
        await submit(here, other_id, in_order, changed)
    # Under another id and otherwise as it was it is taken, and the gateway gives out no rows that it did not batch so;
    # that the chain would refuse the samples is shown in tests/trainer/test_job_endings.py.
    await here.deployment["gateway"].start()
    other = await submit(here, other_id, in_order, options)
    await here.until(lambda: not here.observer.read()[1].jobs[other.job_id].open, "the other job ends")
    ended = here.observer.read()[1].jobs[other.job_id]
    assert (ended.phase, ended.reason) == ("refused", "REASON_JOB_NOT_FOUND")
    assert trained_versions(here) == 1
    await here.check()


async def test_a_kill_while_a_checkpoint_is_written_leaves_the_last_good_one(here: Stage) -> None:
    await here.feed("first")
    await here.until_head(1)
    registry = await here.check()
    staging = here.deployment.store / "staging"
    feeding = asyncio.create_task(here.feed("second"))
    await asyncio.to_thread(_wait_for_a_file, staging)
    await here.deployment["trainer-1"].kill()
    assert here.observer.head == 1
    await feeding
    await here.deployment["trainer-1"].start()
    await here.until_head(2)
    after = await here.check()
    assert after.versions[1] == registry.versions[1]
    (job,) = [job for job in after.jobs.values() if job.version == 2]
    assert job.attempt == 2, "it was killed behind its steps and took them again"


def _wait_for_a_file(staging: Path) -> None:
    """Until a checkpoint's first bytes are there."""
    deadline = time.monotonic() + 60
    # os.walk: folders come and go while it looks.
    while not any(name.endswith(".distcp") for _, _, names in os.walk(staging) for name in names):
        assert time.monotonic() < deadline, "nothing was written"


async def test_a_batch_that_kills_its_trainer_three_times_is_settled_and_the_next_one_trains(here: Stage) -> None:
    await here.arm("trainer-1", "trainer.running")
    trainer = here.deployment["trainer-1"]
    poison = await here.feed("poison")
    for attempt in range(3):
        assert await trainer.ended() == -signal.SIGKILL, attempt
        if attempt < 2:
            await trainer.start()
    await here.disarm("trainer-1")
    await here.until(lambda: not here.observer.open_batches, "the poison batch is settled")
    gateway, registry = here.observer.read()
    (job,) = registry.jobs.values()
    assert (job.phase, job.attempt) == ("failed", 3)
    reasons = {gateway.claims[receipt].reason for receipt in poison}
    assert {gateway.claims[receipt].state for receipt in poison} == {"settled"} and "" not in reasons
    await here.feed("sound")
    await here.until_head(1)
    await here.check()


async def test_a_worker_that_dies_in_every_step_costs_its_batch_and_no_other(here: Stage) -> None:
    trainer = here.deployment["trainer-1"]
    await here.feed("first")
    await here.until_head(1)
    (worker,) = trainer.workers()
    os.kill(worker, signal.SIGSTOP)
    await here.feed("second")
    await here.until(lambda: any(job.phase == "running" for job in here.observer.read()[1].jobs.values()), "a step")
    os.kill(worker, signal.SIGKILL)
    await here.until_head(2)
    registry = await here.check()
    assert [job.attempt for job in registry.jobs.values()] == [1, 2]
    assert trainer.starts == 1, "the trainer itself lives on"


async def test_a_fresh_run_in_a_used_directory_is_refused_with_the_way_out(
    here: Stage, tiny_models: Path, tmp_path: Path
) -> None:
    await here.feed("first")
    await here.until_head(1)
    await here.check()
    registry = here.deployment["registry"]
    await registry.terminate()
    asked = registry.environment["ATOLL_REGISTRY_SCENARIOS"]
    other = str(tiny_models / "teacher")
    registry.environment["ATOLL_REGISTRY_SCENARIOS"] = asked.replace(str(tiny_models / "student"), other)
    await registry.start()
    assert await registry.ended() not in (0, -signal.SIGKILL)
    said = registry.last_lines(3)
    assert "exists with another definition" in said and "choose another id" in said and other in said
    registry.environment["ATOLL_REGISTRY_SCENARIOS"] = asked
    await registry.start()
    await here.feed("second")
    await here.until_head(2)
    await here.check()


def _may_mount() -> bool:
    return subprocess.run([*IN_OWN_MOUNTS, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="no mount namespaces on this machine")
def test_a_disk_that_reaches_its_floor_in_the_middle_of_a_step_keeps_the_step(tmp_path: Path) -> None:
    command = [*IN_OWN_MOUNTS, sys.executable, "-m", "tests.chaos.full_store", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
