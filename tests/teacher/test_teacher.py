"""`python -m atoll.teacher` with a real engine of its own, against a float32 forward by transformers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.token_map import TokenMap

from tests.engines import VOCAB_SIZE, free_port
from tests.forward import all_log_probs, log_probs_of
from tests.teacher.teacher_world import Result, request, results_of

TOLERANCE = 1e-4
START_SECONDS = 480


@dataclass(frozen=True)
class RunningTeacher:
    address: str
    model_path: Path
    process: "subprocess.Popen[bytes]"


@pytest.fixture(scope="module")
def teacher(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTeacher]:
    port, log = free_port(), tmp_path_factory.mktemp("teacher") / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | {
        "ATOLL_TEACHER_PORT": str(port),
        "ATOLL_TEACHER_MODEL_PATH": str(tiny_models / "teacher"),
        "ATOLL_TEACHER_ENGINE_PORT": str(free_port()),
        "ATOLL_ENGINE_DEVICE": "cpu",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.teacher"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        asyncio.run(_until_ready(f"127.0.0.1:{port}", process, log))
        yield RunningTeacher(f"127.0.0.1:{port}", tiny_models / "teacher", process)
    finally:
        process.kill()
        process.wait()


async def _until_ready(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    async with asyncio.timeout(START_SECONDS), open_channel(address) as channel:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)


@pytest.fixture
async def stub(teacher: RunningTeacher) -> AsyncIterator["teacher_service_pb2_grpc.TeacherServiceAsyncStub"]:
    async with open_channel(teacher.address) as channel:
        yield teacher_service_pb2_grpc.TeacherServiceStub(channel)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    prompt: list[int]
    response: list[int]
    top_k: int = 0

    def request(self) -> teacher_service_pb2.ScoreRequest:
        return request(self.name, self.prompt, self.response, self.top_k)


def cases() -> list[Case]:
    """Sequences of many lengths; the last id of the vocabulary is among them, which SGLang reports as 0."""
    numbers = np.random.default_rng(7)
    made = [
        Case(
            f"s{n}",
            numbers.integers(0, VOCAB_SIZE, int(numbers.integers(1, 40))).tolist(),
            numbers.integers(0, VOCAB_SIZE, int(numbers.integers(1, 60))).tolist(),
            top_k=(0, 1, 8)[n % 3],
        )
        for n in range(24)
    ]
    return [*made, Case("last-id", [5, 6], [VOCAB_SIZE - 1, 7, VOCAB_SIZE - 1], top_k=4)]


def check(model_path: Path, case: Case, result: Result) -> None:
    assert isinstance(result, dict)
    expected = log_probs_of(model_path, case.prompt, case.response, 1.0)
    np.testing.assert_allclose(result["log_probs"], expected, atol=TOLERANCE)
    if case.top_k == 0:
        assert set(result) == {"log_probs"}
        return
    table = all_log_probs(model_path, case.prompt, case.response, 1.0)
    assert result["top_k_ids"].shape == (len(case.response), case.top_k)
    np.testing.assert_allclose(result["top_k_log_probs"], -np.sort(-table)[:, : case.top_k], atol=TOLERANCE)
    at_ids = np.take_along_axis(table, result["top_k_ids"].astype(np.int64), axis=1)
    np.testing.assert_allclose(result["top_k_log_probs"], at_ids, atol=TOLERANCE)


async def test_scores_of_a_stream_are_those_of_a_float32_forward(
    teacher: RunningTeacher, stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"
) -> None:
    before = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    sent = cases()
    call = stub.Score(case.request() for case in sent)
    results = await results_of(call)
    assert set(results) == {case.name for case in sent}
    for case in sent:
        check(teacher.model_path, case, results[case.name])
    after = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    assert after.sequences_scored - before.sequences_scored == len(sent)
    assert after.tokens_scored - before.tokens_scored == sum(len(case.response) for case in sent)


async def test_a_batch_scores_its_good_sequences_and_names_the_bad_one(
    teacher: RunningTeacher, stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"
) -> None:
    good, bad = Case("good", [1, 2], [3, 4], top_k=2), Case("bad", [1], [VOCAB_SIZE])
    batch = teacher_service_pb2.ScoreBatchRequest(sequences=[bad.request(), good.request()])
    results = await results_of(stub.ScoreBatch(batch))
    check(teacher.model_path, good, results["good"])
    error = results["bad"]
    assert isinstance(error, teacher_service_pb2.ScoreError)
    assert (error.reason, error.retryable) == (errors_pb2.REASON_INVALID_FIELD, False)


async def test_the_longest_sequence_it_admits_to_is_scored_and_one_more_token_is_refused(
    teacher: RunningTeacher, stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"
) -> None:
    longest = (await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())).max_sequence_length
    fits = Case("fits", [1], [2 + n % 1000 for n in range(longest - 1)])
    over = Case("over", [1, *fits.response[:1]], fits.response)
    results = await results_of(stub.Score(case.request() for case in (over, fits)))
    check(teacher.model_path, fits, results["fits"])
    error = results["over"]
    assert isinstance(error, teacher_service_pb2.ScoreError)
    assert error.reason == errors_pb2.REASON_SEQUENCE_TOO_LONG


async def test_it_says_which_model_answers(
    teacher: RunningTeacher, stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"
) -> None:
    told = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    assert Path(told.model_path) == teacher.model_path
    assert told.vocabulary_size == VOCAB_SIZE
    assert (
        told.tokenizer_digest
        == TokenMap.from_tokenizer_json((teacher.model_path / "tokenizer.json").read_bytes()).digest
    )


@pytest.mark.slow
async def test_a_killed_engine_is_started_again_and_its_sequences_are_scored_again(
    teacher: RunningTeacher, stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"
) -> None:
    before = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    engine = max(psutil.Process(teacher.process.pid).children(recursive=True), key=lambda each: each.memory_info().rss)
    numbers = np.random.default_rng(9)
    sent = [
        Case(f"k{n}", [n + 1], numbers.integers(0, VOCAB_SIZE, int(numbers.integers(1, 300))).tolist(), top_k=8)
        for n in range(120)
    ]
    scoring = asyncio.create_task(results_of(stub.Score(case.request() for case in sent)))
    while (
        await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
    ).sequences_scored < before.sequences_scored + 10:
        await asyncio.sleep(0.02)
    engine.kill()
    states = set()
    while not scoring.done():
        told = await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())
        states.add(told.engines[0].state)
        await asyncio.sleep(0.2)
    results = await scoring
    assert set(results) == {case.name for case in sent}
    for case in sent:
        check(teacher.model_path, case, results[case.name])
    assert states >= {teacher_service_pb2.ENGINE_STATE_AWAY, teacher_service_pb2.ENGINE_STATE_STARTING}
    assert told.engines[0].restarts == 1


def test_a_killed_teacher_leaves_no_engine_behind(teacher: RunningTeacher) -> None:
    engine = psutil.Process(teacher.process.pid).children(recursive=True)
    assert engine
    teacher.process.kill()
    _, alive = psutil.wait_procs(engine, timeout=20)
    assert alive == []
