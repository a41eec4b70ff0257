"""SIGKILL of the engine, and of the service, in the middle of 500 sequences: every one is answered exactly once."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration, InternalError
from atoll.common.server import GrpcServer
from atoll.families.driver import ScoreRequest, TeacherScores
from atoll.teacher import app
from atoll.teacher.app import RunningTeacher, boot
from atoll.teacher.engine_pool import EnginePool
from atoll.teacher.settings import TeacherSettings
from atoll.trainer.retries import Patience
from atoll.trainer.teacher_client import TeacherClient
from structlog.testing import capture_logs

from tests.engines import free_port
from tests.fakes.scoring_server import VOCABULARY, expected, write_model
from tests.teacher.teacher_world import World, request

COUNT = 500
DELAY_S = 0.02
"""Of every sequence: with the tokens that may be in flight, all of them take some seconds."""


def engine_command(port: int, model: Path, *more: str) -> tuple[str, ...]:
    where = ("--port", str(port), "--model", str(model), "--delay", str(DELAY_S))
    return (sys.executable, "-m", "tests.fakes.scoring_server", *where, *more)


@asynccontextmanager
async def process(command: Sequence[str], **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    child = await asyncio.create_subprocess_exec(*command, env=clean | environment)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def kill(child: asyncio.subprocess.Process) -> None:
    child.send_signal(signal.SIGKILL)
    await child.wait()


def teacher_environment(port: int, engine_port: int) -> dict[str, str]:
    return {
        "ATOLL_TEACHER_PORT": str(port),
        "ATOLL_TEACHER_ENGINES": json.dumps([f"http://127.0.0.1:{engine_port}"]),
        "ATOLL_TEACHER_WATCH_S": "0.1",
        "ATOLL_TEACHER_IN_FLIGHT_TOKENS": "400",
    }


def sequences() -> list[ScoreRequest]:
    draw = np.random.default_rng(5)
    made = []
    for number in range(COUNT):
        start, length = int(draw.integers(1, 30)), int(draw.integers(31, 60))
        tokens = draw.integers(0, VOCABULARY, length).astype(np.int32)
        made.append(ScoreRequest(f"s{number}", tokens, start, top_k=number % 4))
    return made


def check(asked: Sequence[ScoreRequest], scores: Sequence[TeacherScores]) -> None:
    assert len(scores) == len(asked)
    for one, got in zip(asked, scores, strict=True):
        wanted = expected(one.tokens[: one.start].tolist(), one.tokens[one.start :].tolist())
        np.testing.assert_allclose(got.sampled_log_probs, wanted, atol=1e-5)


async def scored(stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub", at_least: int) -> None:
    """Returns once the teacher has scored so many sequences."""
    async with asyncio.timeout(30):
        while (await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())).sequences_scored < at_least:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def client(port: int) -> AsyncIterator[TeacherClient]:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield TeacherClient(channel, Patience(0.05, 0.2))


@asynccontextmanager
async def stub_of(port: int) -> AsyncIterator["teacher_service_pb2_grpc.TeacherServiceAsyncStub"]:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        async with asyncio.timeout(30):
            while True:
                try:
                    await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        yield stub


async def test_a_killed_engine_that_comes_back_leaves_no_sequence_unanswered(tmp_path: Path) -> None:
    model, port, engine_port = write_model(tmp_path / "model"), free_port(), free_port()
    asked = sequences()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(process(engine_command(engine_port, model)))
        teacher = (sys.executable, "-m", "atoll.teacher")
        await stack.enter_async_context(process(teacher, **teacher_environment(port, engine_port)))
        stub = await stack.enter_async_context(stub_of(port))
        trainer = await stack.enter_async_context(client(port))
        scoring = asyncio.create_task(asyncio.to_thread(trainer.score, asked))
        for done in (100, 300):
            await scored(stub, done)
            await kill(engine)
            await asyncio.sleep(0.3)
            assert not scoring.done()
            engine = await stack.enter_async_context(process(engine_command(engine_port, model)))
        check(asked, await asyncio.wait_for(scoring, 60))
        told = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    # Within one stream each is answered once.
    assert (told.sequences_scored, told.sequences_failed) == (COUNT, 0)


async def test_after_a_killed_service_the_trainer_sends_again_what_has_no_answer(tmp_path: Path) -> None:
    model, port, engine_port = write_model(tmp_path / "model"), free_port(), free_port()
    asked = sequences()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(process(engine_command(engine_port, model)))
        teacher = (sys.executable, "-m", "atoll.teacher")
        environment = teacher_environment(port, engine_port)
        service = await stack.enter_async_context(process(teacher, **environment))
        stub = await stack.enter_async_context(stub_of(port))
        trainer = await stack.enter_async_context(client(port))
        scoring = asyncio.create_task(asyncio.to_thread(trainer.score, asked))
        await scored(stub, COUNT // 2)
        await kill(service)
        assert not scoring.done()
        await stack.enter_async_context(process(teacher, **environment))
        stub = await stack.enter_async_context(stub_of(port))
        check(asked, await asyncio.wait_for(scoring, 60))
        told = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    # What the first service had answered was not asked for again.
    assert told.sequences_scored <= COUNT // 2 + 60


@asynccontextmanager
async def own(model: Path, *more: str, **settings: object) -> AsyncIterator[tuple[World, asyncio.Task[None]]]:
    """A teacher in this process that starts its own engine, and the watch of it."""
    port = free_port()
    values: Mapping[str, object] = {"port": 0, "model_path": model, "engine_port": port, "watch_s": 0.1, **settings}
    async with AsyncExitStack() as stack:
        told = TeacherSettings.model_validate(values)
        teacher = await boot(told, stack, engine_command(port, model, *more))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{teacher.server.port}"))
        yield World(teacher, teacher_service_pb2_grpc.TeacherServiceStub(channel)), teacher.watches[0]


async def test_a_teachers_own_engine_is_started_again_and_its_sequences_are_scored_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with own(model, "--poison", "9", restart_pause_s=0.05, restart_window_s=600, max_restarts=9) as (
        world,
        watch,
    ):
        good = {f"s{n}": request(f"s{n}", [n % 8 + 1], [n % VOCABULARY]) for n in range(100)}
        got = await asyncio.wait_for(world.scores([*good.values(), request("bad", [9, 9], [1])]), 60)
        told = await world.told()
        assert not watch.done()
    error = got.pop("bad")
    assert isinstance(error, teacher_service_pb2.ScoreError)
    assert not error.retryable and "the engine died 3 times" in error.message
    assert set(got) == set(good)
    assert all(isinstance(result, dict) for result in got.values())
    # The third may still be on its way.
    assert told.engines[0].restarts in (2, 3)


async def test_sequences_that_kill_the_engine_do_not_use_up_its_restarts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with own(model, "--poison", "9", restart_pause_s=0.02, max_restarts=3) as (world, watch):
        for number in range(3):
            good = request(f"good{number}", [1], [2])
            got = await asyncio.wait_for(world.scores([request(f"bad{number}", [9, 9], [1]), good]), 60)
            assert isinstance(got[f"bad{number}"], teacher_service_pb2.ScoreError)
            assert isinstance(got[f"good{number}"], dict)
        assert not watch.done()
        assert (await world.told()).engines[0].restarts >= 8


async def test_an_engine_that_dies_of_everything_is_given_up_though_sequences_are_blamed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with own(model, "--poison", "9", restart_pause_s=0.02, max_restarts=5) as (world, watch):
        answer = asyncio.create_task(world.scores([request(f"bad{n}", [9, 9], [1]) for n in range(20)]))
        with pytest.raises(InternalError, match="started again 5 times, which is the limit"):
            await asyncio.wait_for(watch, 60)
        answer.cancel()


async def test_an_engine_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with own(model, "--poison", "9", restart_pause_s=0.05, max_restarts=1) as (world, watch):
        answer = asyncio.create_task(world.scores([request("bad", [9, 9], [1])]))
        with pytest.raises(InternalError, match=r"ended with status 1.*started again 1 times, which is the limit"):
            await asyncio.wait_for(watch, 30)
        answer.cancel()


async def test_a_teacher_that_gives_up_ends_with_the_reason_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies() -> None:
        raise InternalError("started again 5 times, which is the limit")

    async def booted(*_: object) -> RunningTeacher:
        return RunningTeacher(GrpcServer("127.0.0.1", 0, None), EnginePool([], 1.0), (asyncio.create_task(dies()),))

    monkeypatch.setattr(app, "boot", booted)
    monkeypatch.setattr(app, "spare_collector", lambda: None)
    with capture_logs() as logs, pytest.raises(SystemExit) as ended:
        await app.main(TeacherSettings(model_path=tmp_path))
    assert ended.value.code == 1
    assert [each["reason"] for each in logs if each["event"] == "gives up"] == [
        "started again 5 times, which is the limit"
    ]


async def test_an_engine_that_never_serves_is_a_refusal_at_start(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="ended with status 2; its log says why"):
        async with own(write_model(tmp_path / "model"), "--no-such-flag"):
            raise AssertionError("it started")
