"""A job that asks the teacher service: scored before it runs, whole or not at all, and safely submitted again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.errors import BadConfiguration
from atoll.common.server import GrpcServer
from atoll.common.token_map import TokenMap

from tests.fakes.teacher_service import EchoTeacher
from tests.trainer.world import World, pair, until, world

TOKENIZER = json.dumps({"model": {"vocab": {f"t{n}": n for n in range(1000)}}, "decoder": None}).encode()
METRIC = "perf/distill_teacher_time"


@dataclass
class Taught:
    """A trainer's world with a teacher in it."""

    world: World
    teacher: EchoTeacher
    server: GrpcServer


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Taught]:
    async with AsyncExitStack() as stack:
        inside = await stack.enter_async_context(
            world(tmp_path, family="opd", options={"batch_size": 2}, tokenizer=TOKENIZER)
        )
        teacher, server = EchoTeacher(TokenMap.from_tokenizer_json(TOKENIZER)), GrpcServer("127.0.0.1", 0, None)
        teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(teacher, server.grpc)
        await server.start(["atoll.api.teacher.v1.TeacherService"])
        stack.push_async_callback(server.stop)
        inside.settings = inside.settings.model_copy(update={"teacher": f"127.0.0.1:{server.port}"})
        yield Taught(inside, teacher, server)


async def asked(here: Taught, calls: int) -> None:
    async with asyncio.timeout(10):
        while len(here.teacher.asked) < calls:
            await asyncio.sleep(0.01)


async def test_scores_are_there_before_the_job_runs_and_their_time_is_a_metric(here: Taught) -> None:
    stub = await here.world.start()
    here.teacher.gate.clear()
    await stub.SubmitJob(here.world.job("job-0", pair("a")))
    await asked(here, 1)
    await asyncio.sleep(0.1)
    job = (await stub.GetJob(trainer_service_pb2.GetJobRequest(job_id="job-0"))).job
    assert job.state == job_pb2.JOB_STATE_ADMITTED
    here.teacher.gate.set()
    job = await until(stub, "job-0")
    assert job.state == job_pb2.JOB_STATE_SERVED
    assert job.metrics[METRIC] >= 0.1
    assert here.teacher.asked == [["a-0", "a-1"]]
    assert here.world.backend.trained_jobs == 1


async def test_a_break_in_the_middle_is_no_failure_of_the_job(here: Taught) -> None:
    stub = await here.world.start()
    here.teacher.cut_after = [1]
    await stub.SubmitJob(here.world.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.teacher.asked == [["a-0", "a-1"], ["a-0"]]


async def test_a_sequence_that_cannot_be_scored_refuses_the_job_and_leaves_the_weights_alone(here: Taught) -> None:
    stub = await here.world.start()
    here.teacher.bad = "a-1"
    await stub.SubmitJob(here.world.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_BATCH_REFUSED)
    assert list(job.rejected_sample_ids) == ["a-1"]
    assert here.world.backend.trained_jobs == 0

    here.teacher.bad = ""
    again = [pair("a")[0], pair("b")[0]]
    await stub.SubmitJob(here.world.job("job-1", again))
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_SERVED
    assert len(here.world.backend.loads) == 1


async def test_a_sample_at_another_temperature_is_refused_and_no_teacher_is_asked(here: Taught) -> None:
    stub = await here.world.start()
    warm = [pair("a")[0], replace(pair("a")[1], temperature=0.7)]
    await stub.SubmitJob(here.world.job("job-0", warm))
    job = await until(stub, "job-0")
    assert job.state == job_pb2.JOB_STATE_REFUSED
    assert "sample a-1: a teacher engine scores at temperature 1, got 0.7" in job.message
    assert here.teacher.asked == []


async def test_a_job_whose_trainer_died_while_it_was_scored_is_scored_and_trained_once_by_the_next(
    here: Taught,
) -> None:
    stub = await here.world.start()
    here.teacher.gate.clear()
    submission = here.world.job("job-0", pair("a"))
    await stub.SubmitJob(submission)
    await asked(here, 1)
    await here.world.kill()
    here.teacher.gate.set()
    stub = await here.world.start()
    await stub.SubmitJob(submission)
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.world.backend.trained_jobs == 1
    assert here.teacher.asked[-1] == ["a-0", "a-1"]


async def test_a_teacher_of_another_tokenizer_is_refused_at_the_start(here: Taught) -> None:
    here.teacher.tokens = TokenMap.from_tokenizer_json(TOKENIZER.replace(b'"t7":', b'"seven":'))
    with pytest.raises(BadConfiguration, match="id 7 is token 't7' for the student and token 'seven' for the teacher"):
        await here.world.start()
    assert here.world.backend.loads == []


async def test_a_family_that_asks_a_teacher_does_not_start_without_one(here: Taught) -> None:
    here.world.settings = here.world.settings.model_copy(update={"teacher": None})
    with pytest.raises(BadConfiguration, match="ATOLL_TRAINER_TEACHER is not set"):
        await here.world.start()
