"""A teacher of another tokenizer is refused with the first difference."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration
from atoll.common.server import GrpcServer
from atoll.common.token_map import BLOCK, Token, TokenKind, TokenMap
from atoll.families.catalog import make_family
from atoll.trainer.retries import Patience
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.teacher_start import connect_teacher, refuse_missing_teacher
from atoll.trainer.teacher_tokenizer import refuse_other_tokenizer, student_tokens

from tests.fakes.teacher_service import EchoTeacher

SIZE = BLOCK + 50


def tokens(size: int = SIZE, decoder: str = '{"type":"ByteLevel"}', **changed: Token) -> TokenMap:
    """Changed tokens by any name."""
    made = {n: Token(n, f"t{n}", TokenKind.TOKEN) for n in range(size)}
    return TokenMap(made | {token.id: token for token in changed.values()}, decoder)


async def refusal(student: TokenMap, teacher: TokenMap) -> str:
    async with AsyncExitStack() as stack:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(
            await stack.enter_async_context(open_channel(await served(teacher, stack)))
        )
        with pytest.raises(BadConfiguration) as refused:
            await refuse_other_tokenizer(stub, student)
        return refused.value.message


async def served(teacher: TokenMap, stack: AsyncExitStack) -> str:
    server = GrpcServer("127.0.0.1", 0, None)
    teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(EchoTeacher(teacher), server.grpc)
    await server.start(["atoll.api.teacher.v1.TeacherService"])
    stack.push_async_callback(server.stop)
    return f"127.0.0.1:{server.port}"


END = Token(SIZE - 1, "<end>", TokenKind.SPECIAL)


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        (
            tokens(),
            tokens(a=Token(BLOCK + 7, "x", TokenKind.TOKEN)),
            f"id {BLOCK + 7} is token 't{BLOCK + 7}' for the ",
        ),
        (tokens(a=END), tokens(), f"id {SIZE - 1} is special '<end>' for the student and token 't{SIZE - 1}' for the "),
        (
            tokens(),
            tokens(size=SIZE - 1),
            f"id {SIZE - 1} is token 't{SIZE - 1}' for the student and no token for the ",
        ),
        (
            tokens(size=SIZE - 1),
            tokens(),
            f"id {SIZE - 1} is no token for the student and token 't{SIZE - 1}' for the ",
        ),
        (tokens(), tokens(size=BLOCK), f"id {BLOCK} is token 't{BLOCK}' for the student and no token for the teacher"),
        (
            tokens(),
            tokens(decoder='{"type":"Fuse"}'),
            'its decoder is {"type":"Fuse"}, the student\'s is {"type":"Byte',
        ),
    ],
    ids=["a token", "a special token", "one less", "one more", "a block less", "the decoder"],
)
async def test_the_first_difference_is_named(student: TokenMap, teacher: TokenMap, message: str) -> None:
    assert message in await refusal(student, teacher)


def write(directory: Path, vocabulary: Mapping[str, int]) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "decoder": None}))
    return directory


async def test_a_trainer_starts_with_a_teacher_of_its_models_tokenizer_and_no_other(tmp_path: Path) -> None:
    mine, other = write(tmp_path / "mine", {"a": 0, "b": 1}), write(tmp_path / "other", {"a": 0, "c": 1})
    async with AsyncExitStack() as stack:
        address = await served(student_tokens(mine), stack)
        neighbours = {"scenario": "s", "registry": "127.0.0.1:1", "gateway": "127.0.0.1:1"}
        settings = TrainerSettings.model_validate({**neighbours, "run_dir": tmp_path, "teacher": address})
        assert await connect_teacher(settings, mine, Patience(0.01, 0.02), stack) is not None
        with pytest.raises(
            BadConfiguration, match=rf"ATOLL_TRAINER_TEACHER {address}: .* id 1 is token 'c' for the st"
        ):
            await connect_teacher(settings, other, Patience(0.01, 0.02), stack)
        without = settings.model_copy(update={"teacher": None})
        assert await connect_teacher(without, other, Patience(0.01, 0.02), stack) is None


def test_a_student_without_a_tokenizer_is_refused_naming_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"tokenizer\.json: a teacher's ids are compared with it"):
        student_tokens(tmp_path)


def test_a_family_that_asks_a_teacher_needs_one() -> None:
    asks, brings = make_family("opd", {}), make_family("opd", {"teacher_checkpoint": "/models/teacher"})
    refuse_missing_teacher(asks, has_teacher=True)
    refuse_missing_teacher(brings, has_teacher=False)
    hinted = make_family("openclawrl", {"teacher": "service", "subset": "teacher"})
    for family in (asks, hinted):
        with pytest.raises(BadConfiguration, match=f"{family.name} asks .* ATOLL_TRAINER_TEACHER is not set"):
            refuse_missing_teacher(family, has_teacher=False)
