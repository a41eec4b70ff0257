"""The trainer's gRPC edge: what a caller may send and what comes back."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common import structs
from atoll.common.errors import AtollError
from atoll.common.rpc_errors import from_rpc_error
from google.protobuf.message import Message

from tests.trainer.world import World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def refusal(call: object) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return from_rpc_error(refused.value)


def changed(submission: trainer_service_pb2.SubmitJobRequest, **fields: object) -> trainer_service_pb2.SubmitJobRequest:
    other = trainer_service_pb2.SubmitJobRequest()
    other.CopyFrom(submission)
    for name, value in fields.items():
        other.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(other, name).extend(value)
        elif isinstance(value, Message):
            getattr(other, name).CopyFrom(value)
        else:
            setattr(other, name, value)
    return other


async def test_the_same_submission_returns_the_job_and_another_body_is_refused_by_field(here: World) -> None:
    stub = await here.start()
    submission = here.job("job-0", pair("a"))
    first = (await stub.SubmitJob(submission)).job
    await until(stub, "job-0")
    again = (await stub.SubmitJob(submission)).job
    assert (again.state, again.create_time) == (job_pb2.JOB_STATE_SERVED, first.create_time)
    options = structs.struct_from({"groups_per_step": 1, "n_samples_per_prompt": 3})
    for name, value in (("sample_ids", ["a-1", "a-0"]), ("family", "other"), ("options", options)):
        error = await refusal(stub.SubmitJob(changed(submission, **{name: value})))
        assert (error.reason, error.field) == (errors_pb2.REASON_JOB_ID_REUSED, name)


async def test_a_job_that_an_earlier_trainer_committed_is_compared_as_well(here: World) -> None:
    stub = await here.start()
    submission = here.job("job-0", pair("a"))
    await stub.SubmitJob(submission)
    await until(stub, "job-0")
    stub = await here.start()
    asked = await stub.GetJob(trainer_service_pb2.GetJobRequest(job_id="job-0"))
    assert (asked.job.version, list(asked.job.sample_ids)) == (1, ["a-0", "a-1"])
    error = await refusal(stub.SubmitJob(changed(submission, sample_ids=["a-0"])))
    assert (error.reason, error.field) == (errors_pb2.REASON_JOB_ID_REUSED, "sample_ids")
    assert (await stub.SubmitJob(submission)).job.version == 1


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("job_id", "Job_0", errors_pb2.REASON_INVALID_FIELD),
        ("job_id", "", errors_pb2.REASON_INVALID_FIELD),
        ("sample_ids", [], errors_pb2.REASON_INVALID_FIELD),
        ("sample_ids", ["a-0", "a-0"], errors_pb2.REASON_INVALID_FIELD),
        ("scenario", "other", errors_pb2.REASON_NOT_TRAINED_HERE),
        ("family", "nonesuch", errors_pb2.REASON_FAMILY_NOT_FOUND),
        ("options", structs.struct_from({}), errors_pb2.REASON_NOT_TRAINED_HERE),
        ("options", structs.struct_from({"eps": 1}), errors_pb2.REASON_UNKNOWN_FIELD),
    ],
)
async def test_a_submission_that_cannot_be_trained_here_is_refused_by_field(
    here: World, field: str, value: object, reason: int
) -> None:
    stub = await here.start()
    error = await refusal(stub.SubmitJob(changed(here.job("job-0", pair("a")), **{field: value})))
    assert error.reason == reason
    assert error.field.startswith(field)
    assert (await stub.ListJobs(trainer_service_pb2.ListJobsRequest())).jobs == []


async def test_options_are_compared_with_their_defaults_filled_in(here: World) -> None:
    stub = await here.start()
    options = structs.struct_from({"groups_per_step": 1, "n_samples_per_prompt": 2, "normalize_std": True})
    await stub.SubmitJob(changed(here.job("job-0", pair("a")), options=options))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED


async def test_an_unknown_job_is_not_found_by_any_method(here: World) -> None:
    stub = await here.start()
    for call in (
        stub.GetJob(trainer_service_pb2.GetJobRequest(job_id="job-9")),
        stub.CancelJob(trainer_service_pb2.CancelJobRequest(job_id="job-9")),
    ):
        assert (await refusal(call)).reason == errors_pb2.REASON_JOB_NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stub.WatchJob(trainer_service_pb2.WatchJobRequest(job_id="job-9")):
            pass
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_jobs_are_listed_newest_first_in_pages(here: World) -> None:
    stub = await here.start()
    for number in range(3):
        await stub.SubmitJob(here.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",))))
        await until(stub, f"job-{number}")
    page = await stub.ListJobs(trainer_service_pb2.ListJobsRequest(page_size=2))
    assert [job.job_id for job in page.jobs] == ["job-2", "job-1"]
    token = page.next_page_token
    last = await stub.ListJobs(trainer_service_pb2.ListJobsRequest(page_size=2, page_token=token))
    assert ([job.job_id for job in last.jobs], last.next_page_token) == (["job-0"], "")
    error = await refusal(stub.ListJobs(trainer_service_pb2.ListJobsRequest(page_token="!")))
    assert error.field == "page_token"


async def test_the_trainer_says_what_it_is(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    told = await stub.GetTrainer(trainer_service_pb2.GetTrainerRequest())
    assert (told.scenario, told.family, told.layout, told.loaded_version) == ("chat", "grpo", "tp1 dp1", 1)
    assert list(told.engines) == [here.engine.base_url]
