"""A fake engine whose tokens are a function of the weights that it loaded, as a process to be killed and restarted.

It boots from the registry's head as `atoll.engine` does, takes publishes as SGLang does (pause, load from a directory,
go on), and lets running replies go on under the new weights, with one span per version. Whoever reads a sample can
compute its tokens from the files of the version that is recorded for them: a token under a wrong name shows.

    python -m tests.fakes.weight_engine --port 30000 --registry 127.0.0.1:7410 --scenario demo
"""

import argparse
import asyncio
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from atoll.engine.head import scenario_head

from tests.fakes.fake_engine import FakeEngine, token_at

BOOT_SECONDS = 300.0
MODEL_FILES = ("config.json", "model.safetensors")
"""Without these nothing is loaded, as with SGLang."""
KEYS = 500
"""Different replies of different weights to the same prompt."""


@dataclass(frozen=True)
class Weights:
    """What samples. Example: Weights("1:3", 417)"""

    version: str
    key: int


def weights_key(files: Iterable[tuple[str, str]]) -> int:
    """A number of the contents: of the path and SHA-256 (64 hexadecimal digits) of every file."""
    lines = "".join(f"{sha256} {path}\n" for path, sha256 in sorted(files))
    return int.from_bytes(hashlib.sha256(lines.encode()).digest()[:8]) % KEYS


def key_of_directory(directory: Path) -> int:
    """Reads every file. Raises OSError, also when a file of a model is missing."""
    for name in MODEL_FILES:
        (directory / name).stat()
    files = [path for path in directory.rglob("*") if path.is_file()]
    return weights_key((path.relative_to(directory).as_posix(), _sha256(path)) for path in files)


def token_of(key: int, input_ids: list[int], position: int) -> int:
    """What weights of this key sample at a position of the reply to a prompt."""
    return token_at([*input_ids, key], position)


class WeightEngine(FakeEngine):
    """Serves one directory's weights, and others when it is told."""

    def __init__(self, port: int, model: Path, weight_version: str, *, host: str = "127.0.0.1") -> None:
        """Raises OSError for a directory that is no model."""
        super().__init__(port, keep_requests=False, host=host)
        self._weights = Weights(weight_version, key_of_directory(model))
        self.weight_version, self.model_path = weight_version, str(model)
        self._running = asyncio.Event()
        self._running.set()

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._go_on)
        app.router.add_post("/update_weights_from_disk", self._update)

    async def _sample(self, input_ids: list[int], position: int, first_version: str) -> tuple[str, int]:
        await self._running.wait()
        # Both at once: a publish falls between two tokens, never into one.
        weights = self._weights
        return weights.version, token_of(weights.key, input_ids, position)

    async def _pause(self, _request: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({})

    async def _go_on(self, _request: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        directory = Path(body["model_path"])
        try:
            key = await asyncio.to_thread(key_of_directory, directory)
        except OSError as error:
            return web.json_response({"success": False, "message": f"cannot load {directory}: {error}"}, status=400)
        self._weights = Weights(body["weight_version"], key)
        self.weight_version, self.model_path = self._weights.version, str(directory)
        return web.json_response({"success": True, "message": ""})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _serve(arguments: argparse.Namespace) -> None:
    head = await scenario_head(arguments.registry, arguments.scenario, os.environ.get("ATOLL_TOKEN"), BOOT_SECONDS)
    engine = WeightEngine(arguments.port, head.model_path, head.weight_version, host=arguments.host)
    engine.behaviour.length, engine.behaviour.pause_s = arguments.length, arguments.pause_s
    await engine.start()
    await asyncio.Event().wait()


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--registry", required=True, help="host:port")
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--length", type=int, default=12, help="tokens of a reply")
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds before every token")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
