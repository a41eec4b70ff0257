"""What the teacher service costs: sequences scored through it against the bare engine at its best concurrency.

    python benchmarks/teacher.py                    SGLang with the tiny model, top-k 128
    python benchmarks/teacher.py --top-k 0 --rounds 8

Both sides ask the same engine for the same kind of sequences, parse the same JSON and pack the same tensors, with the
same setting of Python's garbage collector, which halves what the parsing takes. First the bare engine's best
concurrency is found; then the two take turns, round by round, so that what else the machine does hits both. The ratio
is the median of the rounds' ratios: one slow round does not move it. No sequence is sent twice: the engine's prefix
cache has nothing of them.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import Ids
from atoll.common.tensors import TensorReader
from atoll.teacher.app import spare_collector
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CONCURRENCY = (8, 16, 32, 48, 64)
SWEEPS = 2
START_SECONDS = 600.0
PROMPT = (64, 384)
RESPONSE = (32, 256)
"""Lengths, uniform."""

Sequences = Sequence[tuple[Ids, Ids]]
Score = Callable[[Sequences], Awaitable[None]]


@dataclass
class Side:
    """One of the two ways to ask, and what it did. Example: Side("service", score, seconds=[3.1], tokens=[40100])"""

    name: str
    score: Score
    seconds: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    async def round(self, batch: Sequences) -> float:
        """Tokens per second of this round."""
        start = time.perf_counter()
        await self.score(batch)
        self.seconds.append(time.perf_counter() - start)
        self.sequences.append(len(batch))
        self.tokens.append(sum(len(prompt) + len(response) for prompt, response in batch))
        return self.tokens[-1] / self.seconds[-1]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def sequences_per_s(self) -> float:
        return sum(self.sequences) / sum(self.seconds)


class Draw:
    """New sequences every time, and for both sides of a round the same lengths."""

    def __init__(self, vocabulary: int) -> None:
        self._ids = np.random.default_rng(1)
        self._vocabulary = vocabulary

    def batch(self, count: int, round_number: int) -> Sequences:
        lengths = np.random.default_rng(round_number)
        sizes = [(int(lengths.integers(*PROMPT)), int(lengths.integers(*RESPONSE))) for _ in range(count)]
        return [(self._some(prompt), self._some(response)) for prompt, response in sizes]

    def _some(self, length: int) -> Ids:
        return self._ids.integers(0, self._vocabulary, length).astype(np.int32)


@dataclass
class Traffic:
    """Bytes of a service's answers, on the wire and as stored."""

    sent: int = 0
    stored: int = 0
    response_tokens: int = 0


def bare(client: EngineClient, top_k: int, concurrency: int) -> Score:
    """As a good client would without the service: so many requests at once, each parsed and packed."""

    async def score(batch: Sequences) -> None:
        waiting = iter(batch)

        async def worker() -> None:
            for prompt, response in waiting:
                result = await client.score(prompt, response, top_k)
                result.log_probs.astype("<f4").tobytes()
                if result.top_k is not None:
                    result.top_k.ids.astype("<i4").tobytes()
                    result.top_k.log_probs.astype("<f4").tobytes()

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    return score


def through(stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub", top_k: int, traffic: Traffic) -> Score:
    async def score(batch: Sequences) -> None:
        requests = (
            teacher_service_pb2.ScoreRequest(
                id=str(number), prompt_ids=prompt.tobytes(), response_ids=response.tobytes(), top_k=top_k
            )
            for number, (prompt, response) in enumerate(batch)
        )
        answered, reader = 0, TensorReader(())
        async for piece in stub.Score(requests):
            traffic.sent += piece.ByteSize()
            if piece.HasField("header"):
                assert not piece.header.HasField("error"), piece.header.error.message
                reader = TensorReader(piece.header.tensors)
                continue
            reader.add(piece.chunk)
            if reader.complete:
                arrays = reader.arrays()
                answered += 1
                traffic.stored += sum(array.nbytes for array in arrays.values())
                traffic.response_tokens += len(arrays["log_probs"])
        assert answered == len(batch)

    return score


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(module: str, log: Path, **settings: object) -> Iterator[None]:
    """`python -m module` with these settings; stopped at the end."""
    prefix = module.replace(".", "_").upper()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = clean | {f"{prefix}_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


async def ready(stub: "teacher_service_pb2_grpc.TeacherServiceAsyncStub", log: Path) -> int:
    """The size of the vocabulary, once the teacher answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return int((await stub.GetTeacher(teacher_service_pb2.GetTeacherRequest())).vocabulary_size)
        except grpc.aio.AioRpcError:
            if time.monotonic() > deadline:
                raise SystemExit(f"the teacher did not start:\n{log.read_text()[-3000:]}") from None
            await asyncio.sleep(0.5)


async def best_concurrency(client: EngineClient, top_k: int, draw: Draw, count: int) -> dict[int, float]:
    """Tokens per second of the bare engine by concurrency, after a warm-up."""
    await bare(client, top_k, 8)(draw.batch(count, 0))
    sides = {concurrency: Side("sweep", bare(client, top_k, concurrency)) for concurrency in CONCURRENCY}
    for number in range(SWEEPS):
        for side in sides.values():
            await side.round(draw.batch(count, number))
    return {concurrency: side.tokens_per_s for concurrency, side in sides.items()}


async def measure(arguments: argparse.Namespace, engine_url: str, address: str, log: Path) -> None:
    console = Console()
    async with open_channel(address) as channel:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        draw, traffic = Draw(await ready(stub, log)), Traffic()
        async with EngineClient(engine_url, draw._vocabulary) as client:
            found = await best_concurrency(client, arguments.top_k, draw, arguments.sequences)
            best = max(found, key=found.__getitem__)
            console.print("bare engine, tokens/s:", ", ".join(f"{c} at once {rate:,.0f}" for c, rate in found.items()))
            direct = Side(f"bare engine, {best} at once", bare(client, arguments.top_k, best))
            service = Side("teacher service", through(stub, arguments.top_k, traffic))
            await service.score(draw.batch(arguments.sequences // 4, 0))
            traffic.sent = traffic.stored = traffic.response_tokens = 0
            ratios = []
            for number in range(arguments.rounds):
                sides = (direct, service) if number % 2 == 0 else (service, direct)
                rates = {side.name: await side.round(draw.batch(arguments.sequences, number)) for side in sides}
                ratios.append(rates[service.name] / rates[direct.name])
    report(console, direct, service, ratios, traffic)


def report(console: Console, direct: Side, service: Side, ratios: Sequence[float], traffic: Traffic) -> None:
    table = Table("", "sequences/s", "tokens/s")
    for side in (direct, service):
        table.add_row(side.name, f"{side.sequences_per_s:.1f}", f"{side.tokens_per_s:,.0f}")
    console.print(table)
    sent, stored = (count / traffic.response_tokens for count in (traffic.sent, traffic.stored))
    console.print(f"bytes per response token: {sent:.1f} sent, {stored:.1f} stored")
    totals = service.tokens_per_s / direct.tokens_per_s
    console.print(f"ratio of the rounds: {min(ratios):.3f} to {max(ratios):.3f}; of the totals: {totals:.3f}")
    print(f"teacher: ratio={statistics.median(ratios):.3f} tokens_per_s={service.tokens_per_s:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; without it the tiny model")
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--sequences", type=int, default=192, help="of every round: filling and draining the engine is little of it"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = arguments.model or make_model(directory / "model")
        engine_port, port = free_port(), free_port()
        engine_url, log = f"http://127.0.0.1:{engine_port}", directory / "teacher.log"
        engine = {"model_path": model, "port": engine_port, "device": arguments.device}
        stack.enter_context(running("atoll.engine", directory / "engine.log", **engine))
        stack.enter_context(running("atoll.teacher", log, port=port, engines=json.dumps([engine_url])))
        spare_collector()
        asyncio.run(measure(arguments, engine_url, f"127.0.0.1:{port}", log))


def make_model(out: Path) -> Path:
    # In another process: with torch loaded here, the bare client would parse JSON at half its speed, because Python's
    # garbage collector then walks a heap of a million objects.
    subprocess.run([sys.executable, "-m", "atoll.engine.models", "tiny", "--out", str(out)], check=True, cwd=ROOT)
    return out


if __name__ == "__main__":
    main()
