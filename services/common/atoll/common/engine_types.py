"""What goes to an engine and what comes back. Ids are int32; log-probs are float32, as SGLang gives them, in nats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, InternalError, Unavailable
from numpy.typing import NDArray

Ids = NDArray[np.int32]
LogProbs = NDArray[np.float32]


class EngineUnavailable(Unavailable):
    """Raised when the engine is down, does not answer in time, or drops the connection; the call may be repeated."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=errors_pb2.REASON_ENGINE_UNAVAILABLE)


class EngineRefused(AtollError):
    """Raised when the engine will not do what was asked, or would die of it; the same call is refused again."""

    def __init__(self, message: str, *, field: str = "") -> None:
        too_long = "context length" in message or "maximum allowed length" in message
        reason = errors_pb2.REASON_SEQUENCE_TOO_LONG if too_long else errors_pb2.REASON_ENGINE_REFUSED
        super().__init__(message, reason=reason, field=field)


class WeightsRefused(EngineRefused):
    """Raised when the engine answers that it does not load a model directory; it may have taken some of it."""


class EngineProtocolError(InternalError):
    """Raised when an answer does not fit what was sent: other ids, missing rows, uncovered tokens, other weights."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=errors_pb2.REASON_ENGINE_PROTOCOL)


class FinishReason(StrEnum):
    """Why a reply ended. ABORT: it was cut, by abort() or by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, in SGLang's terms. Example: SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | None = None
    """A JSON schema, as text, that the reply must match."""
    regex: str | None = None
    seed: int | None = None
    """Has no effect on an engine without deterministic inference, e.g. on a CPU."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text; the ids keep them."""

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs are those of a plain softmax at this temperature.

        Filters (top_p, top_k, min_p) leave them alone; the engine applies everything else before it takes them, and at
        temperature 0 it reports those of temperature 1.
        """
        return (
            self.temperature > 0
            and self.frequency_penalty == 0
            and self.presence_penalty == 0
            and self.repetition_penalty == 1
            and self.min_new_tokens == 0
            and not self.logit_bias
            and self.json_schema is None
            and self.regex is None
        )

    def to_wire(self, n: int = 1) -> dict[str, object]:
        """The `sampling_params` of /generate. Every knob is sent, so no default of the model or the engine slips in."""
        wire: dict[str, object] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "n": n,
        }
        if self.stop:
            wire["stop"] = list(self.stop)
        if self.stop_token_ids:
            wire["stop_token_ids"] = list(self.stop_token_ids)
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.json_schema is not None:
            wire["json_schema"] = self.json_schema
        if self.regex is not None:
            wire["regex"] = self.regex
        if self.seed is not None:
            wire["sampling_seed"] = self.seed
        return wire


@dataclass(frozen=True)
class WeightSpan:
    """Which weights sampled response tokens start <= t < end. Example: WeightSpan("1:7", 0, 42)."""

    weight_version: str
    start: int
    end: int


@dataclass(frozen=True)
class Usage:
    """Token counts of one choice; the prompt counts 0 when the reply was cut before it started.

    Example: Usage(prompt_tokens=12, completion_tokens=42, cached_tokens=8)
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class TopK:
    """The K likeliest tokens at each of T positions, likeliest first. Example: TopK(ids [T, K], log_probs [T, K])."""

    ids: Ids
    log_probs: LogProbs


@dataclass(frozen=True)
class Finish:
    """How one choice ended.

    Example: Finish(FinishReason.STOP, 2, "", (WeightSpan("1:7", 0, 42),), Usage(12, 42, 8))
    """

    reason: FinishReason
    matched: int | str | None
    """The token id or stop string that ended it, None otherwise."""
    detail: str
    """The engine's words when it aborted, else empty."""
    spans: tuple[WeightSpan, ...]
    """Cover all response tokens, in order, without a gap."""
    usage: Usage


@dataclass(frozen=True)
class GenerationChunk:
    """What is new in one frame of one choice: T tokens (0 is possible) and the text that became certain.

    Example: GenerationChunk(index=0, token_ids=[492], log_probs=[-2.15], text=" space", top_k=None, finish=None)
    """

    index: int
    """Which of the n choices."""
    token_ids: Ids
    """[T]"""
    log_probs: LogProbs
    """[T] of the sampled tokens: see SamplingParams.exact."""
    text: str
    """May lag behind the ids: half a character is held back, and a stop string is cut off."""
    top_k: TopK | None
    """[T, K] when asked for."""
    finish: Finish | None
    """Set in the last chunk of each choice."""


@dataclass(frozen=True)
class Generation:
    """One finished choice. Example: Generation(0, token_ids [T], log_probs [T], "Paris.", None, Finish(...))."""

    index: int
    token_ids: Ids
    log_probs: LogProbs
    text: str
    top_k: TopK | None
    finish: Finish


@dataclass(frozen=True)
class ScoreResult:
    """Log-probs at temperature 1 of a given response of R tokens. Example: ScoreResult(log_probs [R], None, "0:0")."""

    log_probs: LogProbs
    """[R] of the response tokens themselves."""
    top_k: TopK | None
    """[R, K] when asked for."""
    weight_version: str


@dataclass(frozen=True)
class ModelInfo:
    """What the engine says it serves. Example: ModelInfo("/models/base", "1:0", ("Qwen3ForCausalLM",))."""

    model_path: str
    weight_version: str
    """May run ahead of the weights: EngineClient.weight_version() asks the weights themselves."""
    architectures: tuple[str, ...]
