"""Whole jobs through a booted trainer, with every service around it faked and failing on demand."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, Unavailable
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.trainer.world import World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


def wait_for(event: threading.Event) -> None:
    assert event.wait(10)


async def weights_after(directory: Path, jobs: int) -> str:
    """The weights that an undisturbed trainer reaches."""
    directory.mkdir()
    async with world(directory) as calm:
        stub = await calm.start()
        for number in range(jobs):
            await stub.SubmitJob(calm.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",))))
            assert (await until(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED
        return (await calm.registry.model_of(jobs) / "weights.json").read_text()


async def test_a_job_goes_through_every_phase_and_ends_served(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.version, job.attempt) == (job_pb2.JOB_STATE_SERVED, 1, 1)
    assert {"perf/commit_seconds", "perf/publish_seconds"} <= set(job.metrics)
    assert here.engine.served == "1:1"
    assert here.engine.updates == [(await here.registry.model_of(1), "1:1")]
    version = (await here.registry.versions())[1]
    assert list(version.consumed_sample_ids) == ["a-0", "a-1"]
    assert version.checkpoint_digest
    metrics = version.metrics
    assert metrics["reward/mean"] == 0.5
    assert metrics["staleness/samples_fresh"] == 2
    assert metrics["train/tokens"] == 8
    assert metrics["train/learning_rate"] == 1e-3
    assert {"train/loss", "train/grad_norm"} <= set(metrics)
    phases = ("pull", "admit", "score", "prepare", "record", "train", "export", "hash", "seal")
    assert {f"perf/{phase}_seconds" for phase in phases} <= set(metrics)


async def test_whoever_watches_a_job_sees_its_metrics_while_it_trains(here: World) -> None:
    stub = await here.start()
    go_on = threading.Event()
    here.backend.before["train"] = [lambda: wait_for(go_on)]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    running = await until(stub, "job-0", job_pb2.JOB_STATE_RUNNING)
    go_on.set()
    assert running.metrics["reward/mean"] == 0.5
    assert {"perf/pull_seconds", "perf/prepare_seconds"} <= set(running.metrics)
    assert "perf/train_seconds" not in running.metrics
    assert "perf/train_seconds" in (await until(stub, "job-0")).metrics


async def test_a_fresh_trainer_goes_on_from_the_heads_checkpoint_as_if_it_had_not_stopped(
    here: World, tmp_path: Path
) -> None:
    for number in range(3):
        stub = await here.start()
        await stub.SubmitJob(here.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",))))
        assert (await until(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED
    assert (await here.registry.model_of(3) / "weights.json").read_text() == await weights_after(tmp_path / "calm", 3)


async def test_a_committed_job_is_answered_from_the_registry_by_a_fresh_trainer(here: World) -> None:
    stub = await here.start()
    submission = here.job("job-0", pair("a"))
    await stub.SubmitJob(submission)
    await until(stub, "job-0")
    stub = await here.start()
    answered = (await stub.SubmitJob(submission)).job
    assert answered.state in (job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_SERVED)
    assert answered.version == 1
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.backend.trained_jobs == 0
    assert len(await here.registry.versions()) == 2


async def test_a_crash_in_mid_step_is_another_attempt_from_the_head(here: World, tmp_path: Path) -> None:
    stub = await here.start()
    here.backend.before["second_step"] = [here.backend.crash]
    await stub.SubmitJob(here.job("job-0", pair("s0")))
    job = await until(stub, "job-0")
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_SERVED, 2)
    assert len(here.backend.loads) == 2
    assert (await here.registry.model_of(1) / "weights.json").read_text() == await weights_after(tmp_path / "calm", 1)


async def test_a_job_that_crashes_three_times_fails_and_the_next_one_trains(here: World) -> None:
    stub = await here.start()
    here.backend.before["train"] = [here.backend.crash] * 3
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await stub.SubmitJob(here.job("job-1", pair("b")))
    failed = await until(stub, "job-0")
    assert (failed.state, failed.reason) == (job_pb2.JOB_STATE_FAILED, errors_pb2.REASON_TRAINING_CRASHED)
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_SERVED
    assert [version.job_id for version in await here.registry.versions()] == ["", "job-1"]
    again = (await stub.SubmitJob(here.job("job-0", pair("a")))).job
    assert again.state == job_pb2.JOB_STATE_FAILED


async def test_a_registry_that_is_away_is_asked_again_and_the_step_is_not_taken_twice(here: World) -> None:
    stub = await here.start()
    away = Unavailable("away")
    # A channel repeats a call five times by itself; the sixth refusal reaches the trainer.
    here.registry.refusals = {"StageArtifact": [away], "SealArtifact": [away], "CommitVersion": [away] * 6}
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.backend.trained_jobs == 1


async def test_a_commit_whose_answer_is_lost_is_found_in_the_chain(here: World) -> None:
    stub = await here.start()
    here.registry.after["CommitVersion"] = lambda: here.registry.refusals.update(GetVersion=[Unavailable("gone")] * 9)
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).version == 1
    assert here.backend.trained_jobs == 1


async def test_when_the_head_moved_before_the_commit_the_job_is_admitted_anew(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    here.backend.before["stage"] = [here.elsewhere(lambda: here.registry.append("job-other", like=1))]
    await stub.SubmitJob(here.job("job-1", pair("b", versions=("1:1",))))
    # The other version has the content of version 1, so the samples of 1:1 still have lag 0.
    job = await until(stub, "job-1")
    assert (job.state, job.version) == (job_pb2.JOB_STATE_SERVED, 3)
    assert here.backend.trained_jobs == 3


async def test_a_job_that_another_trainer_committed_is_adopted_and_its_version_loaded(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    here.backend.before["stage"] = [here.elsewhere(lambda: here.registry.append("job-1", ("b-0", "b-1"), like=1))]
    await stub.SubmitJob(here.job("job-1", pair("b", versions=("1:1",))))
    assert (await until(stub, "job-1")).version == 2
    await stub.SubmitJob(here.job("job-2", pair("c", versions=("1:2",))))
    assert (await until(stub, "job-2")).version == 3
    assert here.backend.loads[-1] == await here.registry.model_of(2)


@pytest.mark.parametrize("method", ["StageArtifact", "SealArtifact", "CommitVersion"])
async def test_a_full_store_defers_the_job_which_goes_on_by_itself(here: World, method: str) -> None:
    stub = await here.start()
    full = AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)
    here.registry.refusals[method] = [full] * 3
    await stub.SubmitJob(here.job("job-0", pair("a")))
    deferred = await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    assert (deferred.reason, deferred.message) == (errors_pb2.REASON_STORAGE_FULL, "no room")
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_SERVED, errors_pb2.REASON_UNSPECIFIED)
    assert here.backend.trained_jobs == 1


async def test_a_full_registry_makes_a_job_wait_and_is_not_asked_without_a_pause(here: World) -> None:
    stub = await here.start()
    puts = here.registry.refusals.setdefault("PutJobRecord", [])
    full = AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)
    here.registry.after["PutJobRecord"] = lambda: puts.extend([full] * 1_000)
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)).message == "no room"
    await asyncio.sleep(0.5)
    assert 0 < 1_000 - len(puts) < 40, "two tries, then a pause of 0.05 s"
    puts.clear()
    assert (await until(stub, "job-0")).version == 1


async def test_a_job_waits_before_its_first_step_while_its_version_would_not_fit(here: World) -> None:
    stub = await here.start()
    base = (await here.registry.versions())[0].model_digest
    here.registry.sizes[base] = 1 << 60
    await stub.SubmitJob(here.job("job-0", pair("a")))
    deferred = await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    assert deferred.reason == errors_pb2.REASON_STORAGE_FULL and str(5 << 60) in deferred.message
    assert here.backend.trained_jobs == 0
    here.registry.sizes.clear()
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("SealArtifact", errors_pb2.REASON_STAGING_NOT_FOUND),
        ("SealArtifact", errors_pb2.REASON_ARTIFACT_MISMATCH),
        ("SealArtifact", errors_pb2.REASON_INTERNAL),
        ("CommitVersion", errors_pb2.REASON_ARTIFACT_NOT_FOUND),
    ],
)
async def test_artifacts_that_got_lost_are_written_again_from_the_weights_in_memory(
    here: World, method: str, reason: errors_pb2.Reason.ValueType
) -> None:
    stub = await here.start()
    here.registry.refusals[method] = [AtollError("lost", reason=reason)]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.backend.trained_jobs == 1


async def test_a_crash_while_the_version_is_written_is_another_attempt(here: World) -> None:
    stub = await here.start()
    here.backend.before["stage"] = [here.backend.crash]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_SERVED, 2)
    assert here.backend.trained_jobs == 2
    assert list((here.registry.store / "staging").iterdir()) == []


async def test_a_store_that_fails_while_the_version_is_written_costs_an_attempt_and_not_the_batch(here: World) -> None:
    stub = await here.start()

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    here.backend.before["stage"] = [fail]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.attempt, here.backend.trained_jobs) == (job_pb2.JOB_STATE_SERVED, 2, 2)


async def test_a_pull_that_breaks_is_repeated_from_the_start(here: World) -> None:
    stub = await here.start()
    here.samples.refusals = [Unavailable("gone"), Unavailable("gone")]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.samples.refusals == []


async def test_a_token_that_is_wrong_for_a_while_costs_no_batch(here: World) -> None:
    stub = await here.start()
    here.samples.refusals = [AtollError("the token is another one", reason=errors_pb2.REASON_UNAUTHENTICATED)] * 2
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED


async def test_a_gateway_that_stops_while_rows_are_pulled_costs_no_job(here: World) -> None:
    stub = await here.start()
    here.samples.cuts = 2
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.samples.cuts == 0


async def test_a_head_that_does_not_load_keeps_the_job_waiting_and_health_says_so(here: World) -> None:
    stub = await here.start()
    assert here.trainer is not None
    health = health_pb2_grpc.HealthStub(
        await here.stack.enter_async_context(open_channel(f"127.0.0.1:{here.trainer.server.port}"))
    )
    seen: list[int] = []
    loop = asyncio.get_running_loop()

    def fail_and_look() -> None:
        check = asyncio.run_coroutine_threadsafe(_status(health), loop)
        seen.append(check.result(10))
        here.backend.crash()

    here.backend.before = {"train": [here.backend.crash], "load": [fail_and_look] * 3}
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert seen == [serving, not_serving, not_serving]
    assert await _status(health) == serving


async def _status(health: health_pb2_grpc.HealthStub) -> int:
    return int((await health.Check(health_pb2.HealthCheckRequest())).status)
