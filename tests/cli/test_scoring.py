"""`atoll score` before a teacher that scores by arithmetic."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.cli.main import app
from atoll.cli.scoring import ids_of
from atoll.common.errors import InvalidInput
from atoll.common.server import GrpcServer
from typer.testing import CliRunner, Result

from tests.fakes.teacher_service import EchoTeacher


@pytest.fixture
async def teacher(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EchoTeacher]:
    echo, server = EchoTeacher(), GrpcServer("127.0.0.1", 0, None)
    teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(echo, server.grpc)
    await server.start(["atoll.api.teacher.v1.TeacherService"])
    monkeypatch.setenv("ATOLL_TEACHER", f"127.0.0.1:{server.port}")
    yield echo
    await server.grpc.stop(None)


async def run(*words: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["score", *words]))


async def test_every_token_of_the_response_gets_its_log_prob_and_its_candidates(teacher: EchoTeacher) -> None:
    result = await run("--prompt", "5,6", "--response", "7, 2", "--top-k", "2", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert first["token"] == 7 and first["log_prob"] == pytest.approx(-0.7)
    assert second["log_prob"] == pytest.approx(-0.2) and second["top_k"] == [[0, 0.0], [0, 0.0]]
    shown = await run("--prompt", "5", "--response", "7,2")
    assert "sum -0.9000" in shown.output and "likeliest" not in shown.output


async def test_the_table_shows_as_many_candidates_as_were_asked_for(teacher: EchoTeacher) -> None:
    result = await run("--prompt", "5", "--response", "7", "--top-k", "8")
    assert result.exit_code == 0 and result.output.count("0.0000") == 8


async def test_a_sequence_that_the_teacher_does_not_score_ends_with_its_words(teacher: EchoTeacher) -> None:
    teacher.bad = "cli"
    result = await run("--prompt", "5", "--response", "7")
    assert result.exit_code == 1 and "did not score it: too long" in result.stderr


async def test_a_teacher_that_does_not_answer_is_named() -> None:
    result = await run("--prompt", "5", "--response", "7", "--teacher", "127.0.0.1:1")
    assert result.exit_code == 1 and "the teacher does not answer at 127.0.0.1:1" in result.stderr


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1.5", str(2**31)])
def test_what_is_no_list_of_token_ids_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        ids_of(text, "--prompt")
