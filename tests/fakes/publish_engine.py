"""What publishing sees of an SGLang server, over real HTTP: versions and updates, one sampled token, no model."""

import json
from pathlib import Path

from aiohttp import web

WIRE_FINISH = {"type": "length", "length": 1}


class PublishEngine:
    """`served` samples; /model_info says `reported`, which may run ahead; `updates` lists (path, version).

    `refuse_updates` answers the next updates with HTTP 400 and keeps the weights; with `takes_what_it_refuses` it
    says that it serves them all the same, and samples from neither. `refuse_paths` refuses these model directories.
    """

    def __init__(self, weight_version: str = "1:0") -> None:
        self.served = self.reported = weight_version
        self.paused = False
        self.refuse_updates = 0
        self.takes_what_it_refuses = False
        self.refuse_paths: set[Path] = set()
        self.refused: list[str] = []
        self.probes = 0
        self.updates: list[tuple[Path, str]] = []
        self.weights_at_update: list[str] = []
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._go_on)
        app.router.add_post("/update_weights_from_disk", self._update)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _model_info(self, request: web.Request) -> web.Response:
        return _answer({"model_path": "/model", "weight_version": self.reported, "architectures": ["Fake"]})

    async def _generate(self, request: web.Request) -> web.Response:
        assert not self.paused, "a paused engine would never answer"
        self.probes += 1
        meta = {
            "finish_reason": WIRE_FINISH,
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "cached_tokens": 0,
            "weight_version": self.served,
            "weight_versions": [{"version": self.served, "start": 0, "end": 1}],
            "output_token_logprobs": [[-0.5, 3, None]],
        }
        return _answer({"text": "x", "output_ids": [3], "meta_info": meta})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return _answer({})

    async def _go_on(self, request: web.Request) -> web.Response:
        self.paused = False
        return _answer({})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuse_updates > 0 or Path(body["model_path"]) in self.refuse_paths:
            self.refuse_updates = max(0, self.refuse_updates - 1)
            self.refused.append(body["weight_version"])
            if self.takes_what_it_refuses:
                self.served = self.reported = body["weight_version"]
            return _answer({"success": False, "message": "told to refuse"}, status=400)
        self.served = self.reported = body["weight_version"]
        path = Path(body["model_path"])
        self.updates.append((path, self.served))
        weights = path / "weights.json"
        self.weights_at_update.append(weights.read_text() if weights.exists() else "")
        return _answer({"success": True, "message": ""})


def _answer(body: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(body), status=status, content_type="application/json")
