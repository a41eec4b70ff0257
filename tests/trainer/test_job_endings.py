"""Jobs that end without a version: dropped, refused, cancelled; and what they leave behind, which is nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.errors import AtollError
from atoll.trainer.backend import StepRefused

from tests.fakes.samples import FakeSample
from tests.trainer.world import World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def test_samples_that_another_version_consumed_are_never_trained_into_a_second_one(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    again = pair("a", versions=("1:1",))
    await stub.SubmitJob(here.job("job-1", again))
    job = await until(stub, "job-1")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED)
    assert list(job.rejected_sample_ids) == ["a-0", "a-1"]
    await stub.SubmitJob(here.job("job-2", pair("b", versions=("1:1",))))
    assert (await until(stub, "job-2")).version == 2
    assert here.backend.loads[-1] == await here.registry.model_of(1)


async def test_a_stale_batch_is_dropped_with_the_samples_and_versions_seen(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    stale = pair("b", versions=("1:0",))
    await stub.SubmitJob(here.job("job-1", [stale[0], *pair("b", versions=("1:1",))[1:]]))
    job = await until(stub, "job-1")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_DROPPED, errors_pb2.REASON_STALE_SAMPLE)
    assert list(job.rejected_sample_ids) == ["b-0"]
    assert "1:0" in job.message and "b-0" in job.message
    assert here.backend.trained_jobs == 1


async def test_bad_rows_are_refused_naming_the_sample(here: World) -> None:
    stub = await here.start()
    bad = FakeSample("b-9", score=1.0, group="b", tokens=(5, 6, 7, 5000))
    await stub.SubmitJob(here.job("job-0", [*pair("b")[:1], bad]))
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_BATCH_REFUSED)
    assert list(job.rejected_sample_ids) == ["b-9"]


async def test_a_step_that_is_not_finite_refuses_the_job_and_the_head_is_loaded_again(here: World) -> None:
    stub = await here.start()

    def refuse() -> None:
        raise StepRefused("sample a-1: loss is nan", ("a-1",), steps_taken=1)

    here.backend.before["second_step"] = [refuse]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, list(job.rejected_sample_ids)) == (job_pb2.JOB_STATE_REFUSED, ["a-1"])
    await stub.SubmitJob(here.job("job-1", pair("b")))
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_SERVED
    assert len(here.backend.loads) == 2


async def test_a_running_job_that_is_cancelled_leaves_no_version_and_no_trace_in_the_weights(here: World) -> None:
    stub = await here.start()
    loop = asyncio.get_running_loop()
    entered, go_on = asyncio.Event(), asyncio.Event()

    def hold() -> None:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)

    here.backend.before["second_step"] = [hold]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await entered.wait()
    cancelled = (await stub.CancelJob(trainer_service_pb2.CancelJobRequest(job_id="job-0"))).job
    assert (cancelled.state, cancelled.reason) == (job_pb2.JOB_STATE_CANCELLED, errors_pb2.REASON_JOB_CANCELLED)
    go_on.set()
    await stub.SubmitJob(here.job("job-1", pair("b")))
    assert (await until(stub, "job-1")).version == 1
    assert len(here.backend.loads) == 2


async def test_a_served_job_cannot_be_cancelled(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.CancelJob(trainer_service_pb2.CancelJobRequest(job_id="job-0"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("reason", [errors_pb2.REASON_STORAGE_FULL, errors_pb2.REASON_INTERNAL])
async def test_an_end_that_the_registry_does_not_take_is_recorded_later_and_not_asked_about_without_a_pause(
    here: World, reason: errors_pb2.Reason.ValueType
) -> None:
    stub = await here.start()
    bad = FakeSample("b-9", score=1.0, group="b", tokens=(5, 6, 7, 5000))
    # The first write, of the job itself, has to succeed for the job to be there.
    hook = here.registry.refusals.setdefault("PutJobRecord", [])
    here.registry.after["PutJobRecord"] = lambda: hook.extend([AtollError("not now", reason=reason)] * 1_000)
    await stub.SubmitJob(here.job("job-0", [*pair("b")[:1], bad]))
    await asyncio.sleep(0.5)
    assert 0 < 1_000 - len(hook) < 20, "a pause of 0.05 s between the tries"
    hook.clear()
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_BATCH_REFUSED)
    assert list(job.rejected_sample_ids) == ["b-9"]


async def test_a_registry_that_fails_to_tell_how_a_job_stands_ends_no_job(here: World) -> None:
    stub = await here.start()
    failing = here.registry.refusals.setdefault("GetVersion", [])
    here.registry.after["PutJobRecord"] = lambda: failing.extend(
        [AtollError("a defect", reason=errors_pb2.REASON_INTERNAL)] * 3
    )
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).version == 1
