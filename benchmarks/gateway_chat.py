"""What the gateway costs: chat requests through it against the same token ids sent to the engine directly.

    python benchmarks/gateway_chat.py                  SGLang with the tiny model: what a user notices
    python benchmarks/gateway_chat.py --engine fake    an engine that answers at once: the gateway's own limit

Every sample is recorded durably. The two sides take turns in short rounds of one run, so that what else the machine
does hits both. Prints requests/s, latency, the ratio of the rates and the added latency at each concurrency.
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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from atoll.common.engine_types import SamplingParams
from atoll.common.renderer import TOKENIZER_FILES, Renderer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = "bench"
MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]
CONCURRENCY = (1, 8, 32)
ROUNDS = 4
START_SECONDS = 600.0

Call = Callable[[aiohttp.ClientSession], Awaitable[None]]


@dataclass
class Side:
    """One of the two ways to ask. Example: Side("direct", call, seconds=3.1, latencies=[0.01, ...])"""

    name: str
    call: Call
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies) / self.seconds

    @property
    def median_ms(self) -> float:
        return statistics.median(self.latencies) * 1e3


async def one_round(side: Side, session: aiohttp.ClientSession, concurrency: int, requests: int) -> None:
    left = requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            start = time.perf_counter()
            await side.call(session)
            side.latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    side.seconds += time.perf_counter() - start


def post(url: str, body: dict[str, object]) -> Call:
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}

    async def call(session: aiohttp.ClientSession) -> None:
        async with session.post(url, data=data, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status} {answer[:500]!r}")

    return call


async def measure(engine: str, gateway: str, model: Path, tokens: int, requests: int, stream: bool) -> Table:
    files = {name: (model / name).read_bytes() for name in TOKENIZER_FILES if (model / name).exists()}
    ids = Renderer.from_files(files).render(MESSAGES, 2048)
    params = SamplingParams(max_new_tokens=tokens).to_wire()
    direct_body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": stream}
    chat_body = {"model": SCENARIO, "messages": MESSAGES, "max_tokens": tokens, "stream": stream}
    table = Table(title=f"{tokens} tokens, {'streamed' if stream else 'plain'}")
    columns = ("concurrency", "direct req/s", "gateway req/s", "gateway/direct", "direct ms", "gateway ms", "added ms")
    for column in columns:
        table.add_column(column, justify="right")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for concurrency in CONCURRENCY:
            direct = Side("direct", post(f"{engine}/generate", dict(direct_body)))
            through = Side("gateway", post(f"{gateway}/v1/chat/completions", dict(chat_body)))
            for side in (direct, through):
                await one_round(side, session, concurrency, concurrency)
                side.seconds, side.latencies = 0.0, []
            per_round = max(concurrency, requests * min(concurrency, 8) // 8 // ROUNDS)
            for _ in range(ROUNDS):
                for side in (direct, through):
                    await one_round(side, session, concurrency, per_round)
            table.add_row(
                str(concurrency),
                f"{direct.rate:.1f}",
                f"{through.rate:.1f}",
                f"{through.rate / direct.rate:.2f}",
                f"{direct.median_ms:.1f}",
                f"{through.median_ms:.1f}",
                f"{through.median_ms - direct.median_ms:.1f}",
            )
    return table


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(arguments: list[str], port: int, log: Path, **settings: object) -> Iterator[None]:
    """A Python process from when it listens until the end of the block."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment |= {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in settings.items()}
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def run(arguments: argparse.Namespace, directory: Path) -> list[Table]:
    model = directory / "model"
    subprocess.run([sys.executable, "-m", "atoll.engine.models", "tiny", "--out", str(model)], check=True, cwd=ROOT)
    engine_port, registry_port, gateway_port, grpc_port = (free_port() for _ in range(4))
    engine_url = f"http://127.0.0.1:{engine_port}"
    scenario = {"scenario_id": SCENARIO, "family": "grpo", "options": {}, "base_model": str(model)}
    with ExitStack() as stack:
        if arguments.engine == "fake":
            fake = ["-m", "tests.fakes.fake_engine", "--port", str(engine_port), "--length", str(arguments.tokens + 1)]
            stack.enter_context(process(fake, engine_port, directory / "engine.log"))
        else:
            stack.enter_context(
                process(
                    ["-m", "atoll.engine"],
                    engine_port,
                    directory / "engine.log",
                    ATOLL_ENGINE_MODEL_PATH=model,
                    ATOLL_ENGINE_WEIGHT_VERSION="1:0",
                    ATOLL_ENGINE_PORT=engine_port,
                )
            )
        stack.enter_context(
            process(
                ["-m", "atoll.registry"],
                registry_port,
                directory / "registry.log",
                ATOLL_REGISTRY_PORT=registry_port,
                ATOLL_REGISTRY_STORE=directory / "store",
                ATOLL_REGISTRY_SCENARIOS=json.dumps([scenario]),
            )
        )
        stack.enter_context(
            process(
                ["-m", "atoll.gateway"],
                gateway_port,
                directory / "gateway.log",
                ATOLL_GATEWAY_PORT=gateway_port,
                ATOLL_GATEWAY_GRPC_PORT=grpc_port,
                ATOLL_GATEWAY_REGISTRY=f"127.0.0.1:{registry_port}",
                ATOLL_GATEWAY_ENGINES=json.dumps([engine_url]),
                ATOLL_GATEWAY_DATABASE_URL=f"sqlite:///{directory / 'gateway.db'}",
            )
        )
        gateway_url = f"http://127.0.0.1:{gateway_port}"
        return [
            asyncio.run(measure(engine_url, gateway_url, model, arguments.tokens, arguments.requests, stream))
            for stream in (False, True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sglang", "fake"), default="sglang")
    parser.add_argument("--tokens", type=int, default=16, help="of every answer, at most")
    parser.add_argument("--requests", type=int, default=160, help="per side and concurrency (fewer at 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tables = run(arguments, Path(directory))
    console = Console()
    console.print(f"engine: {arguments.engine}; {os.cpu_count()} cores shared by client, gateway and engine")
    for table in tables:
        console.print(table)


if __name__ == "__main__":
    main()
