"""Boots a teacher and runs it until SIGTERM: engine -> what it serves -> gRPC."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from atoll.api.teacher.v1 import teacher_service_pb2_grpc
from atoll.common.engine_client import EngineClient
from atoll.common.errors import InternalError
from atoll.common.server import GrpcServer, wait_for_stop_signal
from atoll.teacher.model_facts import ModelFacts, read_model_facts
from atoll.teacher.own_engine import own_engine, until_sampling
from atoll.teacher.score_service import SERVICE_NAME, ScoreService, TeacherFacts
from atoll.teacher.scoring import Scorer
from atoll.teacher.sequences import ScoringLimits
from atoll.teacher.settings import TeacherSettings

log = structlog.get_logger(__name__)

ENGINE_RESERVE = 7
"""SGLang takes a prompt of at most its context length minus this (measured, 0.5.23)."""


async def main(settings: TeacherSettings) -> None:
    """Serves until a signal; fails when its own engine ends before."""
    async with AsyncExitStack() as stack:
        _, process = await boot(settings, stack)
        stop = asyncio.create_task(wait_for_stop_signal())
        ended = None if process is None else asyncio.create_task(process.wait())
        await asyncio.wait({stop} if ended is None else {stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done() and ended is not None:
            stop.cancel()
            raise InternalError(f"the teacher's engine ended with status {ended.result()}; its log says why")
        log.info("stopping")


async def boot(
    settings: TeacherSettings, stack: AsyncExitStack
) -> tuple[GrpcServer, asyncio.subprocess.Process | None]:
    """Returns once sequences are scored; what was started stops with the stack. Raises BadConfiguration."""
    url = settings.engine or f"http://127.0.0.1:{settings.engine_port}"
    facts = None if settings.model_path is None else read_model_facts(settings.model_path)
    process = None if settings.engine else await stack.enter_async_context(own_engine(settings))

    # A vocabulary of 1 holds the one token that a probe sends.
    async with EngineClient(url, vocab_size=1) as probe:
        await until_sampling(probe, settings.start_timeout_s, process)
        model_path = (await probe.model_info()).model_path
        context_length = await probe.context_length()
    if facts is None:
        facts = read_model_facts(Path(model_path))

    engine = await stack.enter_async_context(EngineClient(url, facts.vocabulary_size))
    scorer = Scorer(engine, limits_of(facts, context_length, settings), settings.in_flight_tokens, settings.call_tokens)
    server = GrpcServer(settings.host, settings.port, settings.token_text)
    service = ScoreService(scorer, TeacherFacts(model_path, facts.tokenizer_digest))
    teacher_service_pb2_grpc.add_TeacherServiceServicer_to_server(service, server.grpc)
    await server.start([SERVICE_NAME])
    stack.push_async_callback(server.stop)
    log.info("teacher ready", engine=url, model_path=model_path, port=server.port)
    return server, process


def limits_of(facts: ModelFacts, context_length: int | None, settings: TeacherSettings) -> ScoringLimits:
    """What the engine can do faithfully with this model."""
    longest = min(facts.max_positions, context_length or facts.max_positions)
    return ScoringLimits(
        vocabulary_size=facts.vocabulary_size,
        max_sequence_length=longest - ENGINE_RESERVE,
        max_top_k=min(settings.max_top_k, facts.vocabulary_size),
    )
