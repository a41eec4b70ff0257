"""An engine's HTTP interface as far as scoring needs it, with a model that is a formula.

In a test: `async with ScoringServer(directory) as server`. As a process, to be killed: `python -m
tests.fakes.scoring_server --port 30000 --model DIRECTORY`; a sequence that starts with the id `--poison` twice ends it.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

VOCABULARY = 64
POSITIONS = 4096


def write_model(directory: Path) -> Path:
    """What the teacher reads of a model directory."""
    directory.mkdir(parents=True)
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "architectures": ["Fake"]}
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{token_id}": token_id for token_id in range(VOCABULARY - 1)}
    added = [{"id": VOCABULARY - 1, "content": "<end>", "special": True}]
    document = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added, "decoder": {"type": "ByteLevel"}}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def log_probs_after(previous: int, seed: int = 0) -> NDArray[np.float64]:
    """[V] log-probs of the next token."""
    logits = -((7 * previous + (11 + 2 * seed) * np.arange(VOCABULARY)) % VOCABULARY) / 8
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def expected(prompt: Sequence[int], response: Sequence[int], seed: int = 0) -> list[float]:
    """[R] what a correct teacher answers."""
    ids = [*prompt, *response]
    return [float(log_probs_after(ids[at - 1], seed)[ids[at]]) for at in range(len(prompt), len(ids))]


class ScoringServer:
    """Tests set the attributes while it runs. `url` is its base URL."""

    def __init__(self, model: Path, port: int = 0, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self.architecture = "Fake"
        self.weight_version = "0:0"
        self.poison: int | None = None
        """A sequence that starts with this id twice ends the process; in a test it stops the server."""
        self.delay_s = 0.0
        """Of every sequence."""
        self.delay_per_token_s = 0.0
        self.null_id: int | None = None
        """This id gets no log-prob."""
        self.lost_nats = 0.0
        """Every log-prob is lower by this: there are more ids than it tells of."""
        self.busy = 0
        """So many sequences to come are answered with 503."""
        self.gate = asyncio.Event()
        """Sequences wait for it; open unless a test closes it."""
        self.gate.set()
        self.scored: list[list[int]] = []
        """Sequences that were asked for, those of proofs among them, in order."""
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.most_in_flight = 0
        self.hung_up = 0
        """Requests whose sender went away."""
        self._port = port
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def listens(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        """Again after stop(): on the port it had."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Nothing listens on the port any more, and what it worked on has no answer."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _model_info(self, _request: web.Request) -> web.Response:
        info = {"model_path": str(self.model), "weight_version": self.weight_version}
        return web.json_response({**info, "architectures": [self.architecture]})

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"context_length": None})

    async def _generate(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        ids: list[int] = body["input_ids"]
        if body["sampling_params"]["max_new_tokens"] == 1:
            return web.json_response(self._sampled())
        if ids[:2] == [self.poison] * 2:
            await self._die()
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": {"message": "queue is full"}}, status=503)
        self.scored.append(ids)
        self.in_flight += 1
        self.in_flight_tokens += len(ids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight_tokens)
        try:
            await self.gate.wait()
            await asyncio.sleep(self.delay_s + self.delay_per_token_s * len(ids))
        except asyncio.CancelledError:
            self.hung_up += 1
            raise
        finally:
            self.in_flight -= 1
            self.in_flight_tokens -= len(ids)
        return web.json_response(self._scores(ids, body["logprob_start_len"], body["top_logprobs_num"]))

    async def _die(self) -> None:
        if __name__ == "__main__":
            os._exit(1)
        stopping = asyncio.ensure_future(self.stop())
        await asyncio.sleep(60)
        await stopping

    def _sampled(self) -> dict[str, Any]:
        spans = [{"version": self.weight_version, "start": 0, "end": 1}]
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": 1, "weight_versions": spans}
        return {"text": "", "output_ids": [5], "meta_info": {**meta, "output_token_logprobs": [[-1.0, 5, None]]}}

    def _scores(self, ids: list[int], start: int, k: int) -> dict[str, Any]:
        entries: list[list[Any]] = [[None, ids[start], None]]
        rows: list[Any] = [None]
        for at in range(start + 1, len(ids)):
            table = log_probs_after(ids[at - 1], self.seed) - self.lost_nats
            reported = 0 if ids[at] == VOCABULARY - 1 else ids[at]
            entries.append([None if ids[at] == self.null_id else float(table[ids[at]]), reported, None])
            best = np.argsort(-table, kind="stable")[:k]
            rows.append([[float(table[token_id]), int(token_id), None] for token_id in best])
        meta = {"input_token_logprobs": entries, "input_top_logprobs": rows, "weight_version": self.weight_version}
        return {"text": "", "output_ids": [], "meta_info": meta}


async def _serve(arguments: argparse.Namespace) -> None:
    server = ScoringServer(arguments.model, arguments.port)
    server.poison, server.delay_s = arguments.poison, arguments.delay
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--poison", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))
