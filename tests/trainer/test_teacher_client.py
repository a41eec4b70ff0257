"""Scores of the teacher service: in the order asked, whole or not at all, and asked again while it is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import InternalError, InvalidInput
from atoll.common.server import GrpcServer
from atoll.common.token_map import Token, TokenKind, TokenMap
from atoll.families.driver import ScoreRequest
from atoll.trainer.retries import Patience
from atoll.trainer.teacher_client import TeacherClient, scores_of

from tests.fakes.teacher_service import EchoTeacher, Response, pieces_of


@asynccontextmanager
async def client() -> AsyncIterator[tuple[EchoTeacher, TeacherClient]]:
    servicer, server = EchoTeacher(), GrpcServer("127.0.0.1", 0, None)
    teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(servicer, server.grpc)
    await server.start(["atoll.api.teacher.v1.TeacherService"])
    async with open_channel(f"127.0.0.1:{server.port}", None) as channel:
        yield servicer, TeacherClient(channel, Patience(0.01, 0.02))
    await server.stop()


def request(name: str, *response: int, top_k: int = 0) -> ScoreRequest:
    return ScoreRequest(name, np.asarray([7, 8, *response], dtype=np.int32), 2, top_k)


async def test_scores_come_in_the_order_asked_and_only_of_the_response() -> None:
    async with client() as (_, teacher):
        scores = await asyncio.to_thread(teacher.score, [request("a", 1, 2), request("b", 5, top_k=3)])
    assert scores[0].sampled_log_probs.tolist() == pytest.approx([-0.1, -0.2])
    assert scores[0].top_k_ids is None
    assert scores[1].sampled_log_probs.tolist() == [-0.5]
    assert scores[1].top_k_ids is not None
    assert scores[1].top_k_ids.shape == (1, 3)


async def test_one_sequence_that_cannot_be_scored_fails_all_of_them_by_name() -> None:
    async with client() as (servicer, teacher):
        servicer.bad = "b"
        with pytest.raises(InvalidInput, match="sample b: the teacher cannot score it: too long"):
            await asyncio.to_thread(teacher.score, [request("a", 1), request("b", 2)])


async def test_a_teacher_that_is_away_is_asked_again() -> None:
    async with client() as (servicer, teacher):
        servicer.away, servicer.bad, servicer.retryable = 2, "a", 1
        scores = await asyncio.to_thread(teacher.score, [request("a", 1)])
    assert len(scores) == 1
    assert (servicer.away, servicer.bad) == (0, "")


async def test_after_a_break_only_what_has_no_answer_is_sent_again() -> None:
    async with client() as (servicer, teacher):
        servicer.cut_after = [2, -1, 1]
        names = [f"s{n}" for n in range(5)]
        scores = await asyncio.to_thread(teacher.score, [request(name, n) for n, name in enumerate(names)])
    assert [each.sampled_log_probs.tolist() for each in scores] == [[pytest.approx(-0.1 * n)] for n in range(5)]
    # Two answers, then half of one, which does not count, then one, then the rest.
    assert servicer.asked == [names, names[:3], names[:3], names[:2]]


async def test_a_sequence_that_may_be_scored_later_is_sent_again_alone() -> None:
    async with client() as (servicer, teacher):
        servicer.bad, servicer.retryable = "b", 1
        await asyncio.to_thread(teacher.score, [request("a", 1), request("b", 2), request("c", 3)])
    assert servicer.asked == [["a", "b", "c"], ["b"]]


async def test_an_answer_that_was_not_asked_for_is_a_defect() -> None:
    async with client() as (servicer, teacher):
        servicer.renames["a"] = "b"
        with pytest.raises(InternalError, match="answered 'b', which was not asked for or has its answer"):
            await asyncio.to_thread(teacher.score, [request("a", 1)])


def tokens(**texts: str) -> TokenMap:
    named = {"t0": "a", "t1": "b", "t2": "c"} | texts
    return TokenMap(
        {int(name[1:]): Token(int(name[1:]), text, TokenKind.TOKEN) for name, text in named.items()}, "null"
    )


async def test_a_teacher_of_the_students_tokenizer_is_taken_and_asked_for_it_before_every_batch() -> None:
    async with client() as (servicer, teacher):
        servicer.tokens = tokens()
        await teacher.prove_tokenizer(tokens())
        await asyncio.to_thread(teacher.score, [request("a", 1)])

        servicer.tokens = tokens(t1="x")
        waiting = asyncio.create_task(asyncio.to_thread(teacher.score, [request("b", 1)]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert servicer.asked == [["a"]]
        servicer.tokens = tokens()
        assert len(await waiting) == 1


async def stream(*pieces: Response) -> AsyncIterator[Response]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Response(chunk=b"x")], "out of order"),
        (pieces_of("a", {"log_probs": np.zeros(2, np.float32)})[:1], "ended inside the scores of a"),
        (pieces_of("a", {"log_probs": np.zeros(2, np.float32)})[:1] * 2, "out of order"),
        (pieces_of("a", {"other": np.zeros(2, np.float32)}), "without log_probs"),
    ],
)
async def test_a_stream_that_breaks_its_announcements_is_a_defect(pieces: list[Response], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        _ = [each async for each in scores_of(stream(*pieces))]
