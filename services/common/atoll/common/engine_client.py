"""The one client of SGLang's native HTTP interface. What it knows about SGLang 0.5.23 is said where it is used."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from atoll.common.engine_frames import (
    ChoiceReader,
    Frame,
    loads,
    raise_for_error,
    read_score,
    split_events,
)
from atoll.common.engine_http import EngineHttp, finish_despite_cancel
from atoll.common.engine_types import (
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    Generation,
    GenerationChunk,
    Ids,
    ModelInfo,
    SamplingParams,
    ScoreResult,
    WeightsRefused,
)
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

PROBE_SECONDS = 30.0
"""For answers that cost the engine one token or none."""


class EngineClient:
    """Talks to one engine. Use it as an async context manager, or call close().

    Args:
        base_url: e.g. "http://127.0.0.1:30000".
        vocab_size: of the model being served: an id outside it kills SGLang's server, so the client refuses it first.
        idle_timeout_s: how long a reply may be silent. Publishing makes replies silent for seconds, so not too little.

    Every method raises EngineUnavailable (repeat later), EngineRefused (do not repeat) or EngineProtocolError.
    """

    def __init__(self, base_url: str, vocab_size: int, *, idle_timeout_s: float = 120.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self._http = EngineHttp(self.base_url, idle_timeout_s)
        self._publishing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops all connections; SGLang aborts what was running on them."""
        await self._http.close()

    async def generate(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        *,
        top_k_log_probs: int = 0,
        n: int = 1,
        rid: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Stream n sampled continuations of the prompt; the chunks of different choices interleave.

        Closing the iterator (`async with contextlib.aclosing(...)`) aborts the generation. `rid` names the request for
        abort() and needs n = 1, because SGLang renames the requests of several choices. `timeout_s` bounds the whole.

        When the engine publishes while the reply runs, the reply goes on and `finish.spans` has one span per version.
        """
        body = self._generate_body(input_ids, params, top_k_log_probs, n, rid)
        readers = [ChoiceReader(self.vocab_size, top_k_log_probs) for _ in range(n)]
        unfinished = set(range(n))
        async with self._http.request("POST", "/generate", {**body, "stream": True}, timeout_s) as response:
            async for payload in split_events(response.content.iter_any()):
                frame: Frame = loads(payload)
                if "error" in frame:
                    error = frame["error"]
                    retryable = error.get("retryable", False)
                    raise_for_error(error.get("message", ""), error.get("code", 500), retryable=retryable)
                index = frame.get("index", 0)
                if index not in unfinished:
                    raise EngineProtocolError(f"a frame of choice {index}, of {n}, which is over or was not asked for")
                chunk = readers[index].read(frame)
                if chunk.finish is not None:
                    unfinished.remove(index)
                yield chunk
        if unfinished:
            raise EngineProtocolError(f"the engine ended its stream before choices {sorted(unfinished)} were finished")

    async def generate_once(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        *,
        top_k_log_probs: int = 0,
        rid: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """One sampled continuation of the prompt, answered when it is finished."""
        body = self._generate_body(input_ids, params, top_k_log_probs, 1, rid)
        frame: Frame = loads(await self._http.answer("POST", "/generate", body, timeout_s))
        chunk = ChoiceReader(self.vocab_size, top_k_log_probs).read(frame)
        if chunk.finish is None:
            raise EngineProtocolError("the engine answered with a reply that is not finished")
        return Generation(0, chunk.token_ids, chunk.log_probs, chunk.text, chunk.top_k, chunk.finish)

    async def score(
        self,
        prompt_ids: Sequence[int] | Ids,
        response_ids: Sequence[int] | Ids,
        top_k: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> ScoreResult:
        """Log-probs at temperature 1 of the given response after the given prompt, and the top_k likeliest tokens.

        Both must have at least one token: the engine has no log-prob for a first token.
        """
        prompt = self._checked_ids(prompt_ids, "prompt_ids")
        response = self._checked_ids(response_ids, "response_ids")
        self._check_top_k(top_k)
        body = {
            "input_ids": [*prompt.tolist(), *response.tolist()],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            # From the last prompt token on: SGLang's first entry has no log-prob.
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": top_k,
        }
        try:
            frame: Frame = loads(await self._http.answer("POST", "/generate", body, timeout_s))
        except ValueError as error:
            raise EngineProtocolError(f"the engine's answer is not JSON: {error}") from error
        return read_score(frame, response, top_k, self.vocab_size)

    async def model_info(self) -> ModelInfo:
        """What the engine says it serves. Costs no token and answers while generation is paused: the liveness probe."""
        answer = await self._facts("/model_info")
        try:
            return ModelInfo(answer["model_path"], answer["weight_version"], tuple(answer["architectures"] or ()))
        except (KeyError, TypeError) as error:
            raise EngineProtocolError(f"/model_info lacks or garbles {error}") from error

    async def context_length(self) -> int | None:
        """Most tokens of prompt and reply together, None when the engine takes the model's own limit.

        SGLang keeps seven of them free: a longer prompt is refused.
        """
        length = (await self._facts("/server_info")).get("context_length")
        return length if isinstance(length, int) else None

    async def _facts(self, path: str) -> dict[str, Any]:
        """A JSON object that the engine tells about itself."""
        body = await self._http.answer("GET", path, None, PROBE_SECONDS)
        try:
            answer = loads(body)
        except ValueError as error:
            raise EngineProtocolError(f"{path} is not JSON: is {self.base_url} an engine?") from error
        if not isinstance(answer, dict):
            raise EngineProtocolError(f"{path} holds a {type(answer).__name__}, expected an object")
        return answer

    async def weight_version(self, *, timeout_s: float = PROBE_SECONDS) -> str:
        """The version of the weights that sample, found by sampling one token; /model_info may be ahead of them."""
        reply = await self.generate_once([0], SamplingParams(max_new_tokens=1, ignore_eos=True), timeout_s=timeout_s)
        if len(reply.finish.spans) != 1:
            raise EngineProtocolError(f"one token has weight versions {reply.finish.spans}")
        return reply.finish.spans[0].weight_version

    async def update_weights(self, model_path: Path, weight_version: str, *, timeout_s: float = 600.0) -> None:
        """Serve the weights in `model_path` (a directory that the engine can read) as `weight_version`.

        Running replies are set back to their tokens, wait, and go on under the new weights. The engine is told to go on
        in every case, also when this call fails or is cancelled.

        Raises:
            WeightsRefused: it does not load them. It should keep the old weights and the old version; update it again.
            EngineRefused: it does not let itself be updated.
            EngineProtocolError: it says it took the weights and does not sample from them.
            EngineUnavailable: not known which weights it has; update again.
        """
        async with self._publishing:
            body = {
                "model_path": str(model_path),
                "weight_version": weight_version,
                # A kept cache would mix the old weights' keys and values into new replies.
                "flush_cache": True,
                "abort_all_requests": False,
            }
            try:
                # Measured: "in_place" goes on with a mixture of both models, "abort" cuts the replies.
                await self._http.answer("POST", "/pause_generation", {"mode": "retract"}, PROBE_SECONDS)
                answer = loads(await self._load_weights(body, timeout_s))
            finally:
                await finish_despite_cancel(self.continue_generation())
            if answer.get("success") is not True:
                raise WeightsRefused(f"the engine kept its weights: {answer.get('message')}", field="model_path")
            served = await self.weight_version()
            if served != weight_version:
                raise EngineProtocolError(f"the engine was updated to {weight_version} and samples from {served}")

    async def _load_weights(self, body: Mapping[str, object], timeout_s: float) -> bytes:
        try:
            return await self._http.answer("POST", "/update_weights_from_disk", body, timeout_s)
        except EngineRefused as refusal:
            raise WeightsRefused(refusal.message, field="model_path") from refusal

    async def continue_generation(self) -> None:
        """End a pause; harmless without one. A publisher that was killed half way leaves an engine that needs this."""
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(5),
            wait=wait_exponential(multiplier=0.2, max=2),
            retry=retry_if_exception_type(EngineUnavailable),
            reraise=True,
        ):
            with attempt:
                await self._http.answer("POST", "/continue_generation", {}, PROBE_SECONDS)

    async def abort(self, rid: str) -> None:
        """Cut the reply named `rid`; it ends with FinishReason.ABORT and what it had. An unknown name is no error.

        While generation is paused SGLang ignores this for replies that had not started.
        """
        if not rid:
            raise EngineRefused("rid is empty, and SGLang would abort every request", field="rid")
        async with self._http.request("POST", "/abort_request", {"rid": rid}, PROBE_SECONDS):
            pass

    def _generate_body(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        top_k_log_probs: int,
        n: int,
        rid: str | None,
    ) -> dict[str, object]:
        ids = self._checked_ids(input_ids, "input_ids")
        self._check_top_k(top_k_log_probs)
        if n < 1 or (n > 1 and rid is not None):
            raise EngineRefused(f"n is {n}, expected at least 1, and 1 with a rid", field="n")
        if params.max_new_tokens < 1:
            raise EngineRefused(
                f"max_new_tokens is {params.max_new_tokens}, expected at least 1", field="max_new_tokens"
            )
        body: dict[str, object] = {
            "input_ids": ids.tolist(),
            "sampling_params": params.to_wire(n),
            "return_logprob": True,
            "top_logprobs_num": top_k_log_probs,
        }
        if rid is not None:
            body["rid"] = rid
        return body

    def _checked_ids(self, ids: Sequence[int] | Ids, field: str) -> Ids:
        array = np.asarray(ids)
        if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
            raise EngineRefused(
                f"{field} has shape {array.shape} and type {array.dtype}, expected [>= 1] integers",
                field=field,
            )
        outside = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise EngineRefused(
                f"{field}[{at}] is {array[at]}, outside the vocabulary of {self.vocab_size}",
                field=f"{field}[{at}]",
            )
        return array.astype(np.int32)

    def _check_top_k(self, top_k: int) -> None:
        """More than the vocabulary kills SGLang's server."""
        if not 0 <= top_k <= self.vocab_size:
            raise EngineRefused(f"top_k is {top_k}, expected 0 to {self.vocab_size}", field="top_k")
