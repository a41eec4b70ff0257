"""A teacher in this process, in front of engines that are formulas, and what a client makes of its streams."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.tensors import Array, TensorReader
from atoll.teacher.app import RunningTeacher, boot
from atoll.teacher.settings import TeacherSettings

Result = Mapping[str, Array] | teacher_service_pb2.ScoreError


@dataclass(frozen=True)
class World:
    teacher: RunningTeacher
    stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub"

    async def told(self, *, verify: bool = False) -> teacher_service_pb2.GetTeacherResponse:
        return await self.stub.GetTeacher(teacher_service_pb2.GetTeacherRequest(verify=verify))

    async def scores(self, requests: Iterable[teacher_service_pb2.ScoreRequest]) -> dict[str, Result]:
        """One call of Score; fails when an id is answered twice."""
        return await results_of(self.stub.Score(iter(list(requests))))


@asynccontextmanager
async def running(*urls: str, model: Path | None = None, **settings: object) -> AsyncIterator[World]:
    """A teacher of these engines, which looks at them often."""
    async with AsyncExitStack() as stack:
        values = {"port": 0, "engines": urls, "model_path": model, "watch_s": 0.05, "engine_wait_s": 10, **settings}
        teacher = await boot(TeacherSettings.model_validate(values), stack)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{teacher.server.port}"))
        yield World(teacher, teacher_service_pb2_grpc.TeacherServiceStub(channel))


def request(
    name: str, prompt: Sequence[int], response: Sequence[int], top_k: int = 0
) -> teacher_service_pb2.ScoreRequest:
    packed = [np.asarray(ids, dtype=np.int32).tobytes() for ids in (prompt, response)]
    return teacher_service_pb2.ScoreRequest(id=name, prompt_ids=packed[0], response_ids=packed[1], top_k=top_k)


async def results_of(
    pieces: AsyncIterable[teacher_service_pb2.ScoreResponse] | AsyncIterable[teacher_service_pb2.ScoreBatchResponse],
) -> dict[str, Result]:
    """Joins a stream by the contract's words: a header, then its bytes, never interleaved, no id twice."""
    results: dict[str, Result] = {}
    header, reader = teacher_service_pb2.ScoreHeader(), TensorReader(())
    async for piece in pieces:
        if piece.HasField("header"):
            assert reader.complete
            header, reader = piece.header, TensorReader(piece.header.tensors)
            assert header.id not in results
            if header.HasField("error"):
                results[header.id] = header.error
        else:
            reader.add(piece.chunk)
            if reader.complete:
                results[header.id] = dict(reader.arrays())
    return results
