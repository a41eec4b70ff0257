"""What is known of jobs outlives the trainers that ran them: ends, bodies, crashes, and why a job waits."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2, job_record_service_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common import structs
from atoll.common.errors import AtollError
from atoll.common.rpc_errors import from_rpc_error
from atoll.registry import tables
from atoll.registry.job_types import JobPhase
from atoll.trainer.backend import StepRefused

from tests.trainer.world import Stub, World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def refusal(call: object) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return from_rpc_error(refused.value)


async def record_of(here: World, job_id: str) -> job_record_pb2.JobRecord:
    request = job_record_service_pb2.GetJobRecordRequest(scenario="chat", job_id=job_id)
    record: job_record_pb2.JobRecord = (await here.registry.ask("GetJobRecord", request)).record
    return record


async def cancel(stub: Stub, job_id: str) -> job_pb2.Job:
    return (await stub.CancelJob(trainer_service_pb2.CancelJobRequest(job_id=job_id))).job


async def end_every_way(here: World, stub: Stub) -> dict[str, job_pb2.JobState.ValueType]:
    """Four jobs that end without a version."""

    def refuse() -> None:
        raise StepRefused("sample a-1: loss is nan", ("a-1",), steps_taken=0)

    here.backend.before["train"] = [here.backend.crash, here.backend.crash, here.backend.crash, refuse]
    await stub.SubmitJob(here.job("job-failed", pair("f")))
    await until(stub, "job-failed")
    await stub.SubmitJob(here.job("job-refused", pair("a")))
    await until(stub, "job-refused")
    await stub.SubmitJob(here.job("job-dropped", pair("d", versions=("1:7",))))
    await until(stub, "job-dropped")
    held = here.elsewhere(asyncio.Event().wait, patient=False)
    here.backend.before["second_step"] = [held]
    await stub.SubmitJob(here.job("job-cancelled", pair("c")))
    await until(stub, "job-cancelled", job_pb2.JOB_STATE_RUNNING)
    await cancel(stub, "job-cancelled")
    return {
        "job-failed": job_pb2.JOB_STATE_FAILED,
        "job-refused": job_pb2.JOB_STATE_REFUSED,
        "job-dropped": job_pb2.JOB_STATE_DROPPED,
        "job-cancelled": job_pb2.JOB_STATE_CANCELLED,
    }


async def test_a_job_that_ended_without_a_version_never_runs_again_whichever_trainer_is_asked(here: World) -> None:
    stub = await here.start()
    ends = await end_every_way(here, stub)
    before = {job_id: (await stub.GetJob(trainer_service_pb2.GetJobRequest(job_id=job_id))).job for job_id in ends}
    stub = await here.start()
    batches = {"job-failed": "f", "job-refused": "a", "job-dropped": "d", "job-cancelled": "c"}
    for job_id, state in ends.items():
        versions = ("1:7",) if job_id == "job-dropped" else ("1:0",)
        again = (await stub.SubmitJob(here.job(job_id, pair(batches[job_id], versions=versions)))).job
        assert again.state == state
        for name in ("reason", "message", "rejected_sample_ids", "sample_ids", "create_time"):
            assert getattr(again, name) == getattr(before[job_id], name), name
    assert (await stub.GetJob(trainer_service_pb2.GetJobRequest(job_id="job-dropped"))).job.metrics == {
        "staleness/samples_dropped": 2.0
    }
    await stub.SubmitJob(here.job("job-next", pair("n")))
    assert (await until(stub, "job-next")).version == 1
    assert here.backend.trained_jobs == 1
    listed = (await stub.ListJobs(trainer_service_pb2.ListJobsRequest())).jobs
    assert [job.job_id for job in listed] == ["job-next", "job-cancelled", "job-dropped", "job-refused", "job-failed"]
    assert [job.state for job in listed[1:]] == list(ends.values())[::-1]


async def test_options_changed_between_a_crash_and_a_resubmission_do_not_train_a_sample_twice(here: World) -> None:
    stub = await here.start()
    submission = here.job("job-0", pair("a"))
    await stub.SubmitJob(submission)
    await until(stub, "job-0")
    await here.kill()
    stub = await here.start()
    changed = trainer_service_pb2.SubmitJobRequest()
    changed.CopyFrom(submission)
    changed.options.CopyFrom(
        structs.struct_from({"groups_per_step": 1, "n_samples_per_prompt": 2, "normalize_std": False})
    )
    error = await refusal(stub.SubmitJob(changed))
    assert (error.reason, error.field) == (errors_pb2.REASON_JOB_ID_REUSED, "options")
    # Under another id its samples are refused by the chain, or stale before that.
    other = here.job("job-1", pair("a"))
    await stub.SubmitJob(other)
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_DROPPED
    assert len(await here.registry.versions()) == 2


async def test_a_batch_that_kills_the_whole_trainer_three_times_fails_and_the_next_one_trains(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await stub.SubmitJob(here.job("job-1", pair("b")))
    for attempt in range(1, 4):
        here.backend.before["second_step"] = [here.elsewhere(asyncio.Event().wait, patient=False)]
        running = await until(stub, "job-0", job_pb2.JOB_STATE_RUNNING)
        assert (running.state, running.attempt) == (job_pb2.JOB_STATE_RUNNING, attempt)
        await here.kill()
        stub = await here.start()
    failed = await until(stub, "job-0")
    assert (failed.state, failed.reason) == (job_pb2.JOB_STATE_FAILED, errors_pb2.REASON_TRAINING_CRASHED)
    assert (await until(stub, "job-1")).version == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_fills_while_the_version_is_written_keeps_the_weights_and_the_job_waits(
    here: World, code: int
) -> None:
    stub = await here.start()

    def full() -> None:
        raise OSError(code, "No space left")

    here.backend.before["stage"] = [full, full]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    deferred = await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    assert deferred.reason == errors_pb2.REASON_STORAGE_FULL
    job = await until(stub, "job-0")
    assert (job.state, job.attempt, here.backend.trained_jobs) == (job_pb2.JOB_STATE_SERVED, 1, 1)


async def test_why_a_job_waits_is_known_after_a_restart_and_a_waiting_job_can_be_cancelled(here: World) -> None:
    stub = await here.start()
    base = (await here.registry.versions())[0].model_digest
    here.registry.sizes[base] = 1 << 60
    await stub.SubmitJob(here.job("job-0", pair("a")))
    waiting = await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    record = await record_of(here, "job-0")
    assert (record.phase, record.reason) == (job_record_pb2.JOB_PHASE_RECORDED, errors_pb2.REASON_STORAGE_FULL)
    assert record.message == waiting.message
    stub = await here.start()
    again = await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    assert again.message == waiting.message
    assert (await cancel(stub, "job-0")).state == job_pb2.JOB_STATE_CANCELLED
    assert (await record_of(here, "job-0")).phase == job_record_pb2.JOB_PHASE_CANCELLED


async def test_a_job_that_is_staged_is_not_cancelled_while_its_commit_waits(here: World) -> None:
    stub = await here.start()
    here.registry.refusals["CommitVersion"] = [AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)] * 20
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    assert (await refusal(cancel(stub, "job-0"))).reason == errors_pb2.REASON_JOB_NOT_CANCELLABLE
    here.registry.refusals.clear()
    assert (await until(stub, "job-0")).version == 1


async def test_a_job_that_ends_while_it_is_being_cancelled_is_told_as_it_ended(here: World) -> None:
    stub = await here.start()
    here.registry.refusals["CommitVersion"] = [AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)] * 1_000
    await stub.SubmitRollback(trainer_service_pb2.SubmitRollbackRequest(job_id="back", scenario="chat", version=0))
    await until(stub, "back", job_pb2.JOB_STATE_DEFERRED)

    def end() -> None:
        with here.registry.real.artifacts._database.write() as connection:
            connection.execute(tables.jobs.update().values(phase=JobPhase.REFUSED, reason="REASON_INTERNAL"))

    here.registry.after["GetJobRecord"] = end
    refused = await refusal(cancel(stub, "back"))
    assert (refused.reason, "back is REFUSED" in refused.message) == (errors_pb2.REASON_JOB_NOT_CANCELLABLE, True)


async def test_what_an_earlier_trainer_staged_is_committed_with_its_metrics_and_without_a_step(here: World) -> None:
    stub = await here.start()
    here.registry.refusals["CommitVersion"] = [AtollError("no room", reason=errors_pb2.REASON_STORAGE_FULL)] * 1_000
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0", job_pb2.JOB_STATE_DEFERRED)
    staged = (await record_of(here, "job-0")).staged
    await here.kill()
    here.registry.refusals.clear()
    stub = await here.start()
    assert (await until(stub, "job-0")).version == 1
    version = (await here.registry.versions())[1]
    assert (version.model_digest, dict(version.metrics)) == (staged.model_digest, dict(staged.metrics))
    assert here.backend.trained_jobs == 0
