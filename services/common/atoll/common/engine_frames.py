"""Reads SGLang's /generate answers: JSON in, checked arrays out."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypedDict

import numpy as np
from atoll.common.engine_types import (
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    Finish,
    FinishReason,
    GenerationChunk,
    Ids,
    LogProbs,
    ScoreResult,
    TopK,
    Usage,
    WeightSpan,
)

try:
    from orjson import loads
except ImportError:  # the standard library reads the same documents, several times slower
    from json import loads  # type: ignore[assignment]

__all__ = ["ChoiceReader", "Frame", "loads", "raise_for_error", "read_score", "split_events"]

GARBLED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading an answer of another shape may raise; OverflowError: an id that is no int32."""

# [log-prob, token id, text or null]; the log-prob of the first position of a prompt is null.
Entry = tuple[float | None, int, str | None]


class _FinishWire(TypedDict, total=False):
    type: str
    matched: int | str
    message: str
    status_code: int | None


class _SpanWire(TypedDict):
    version: str
    start: int
    end: int


class _Meta(TypedDict, total=False):
    finish_reason: _FinishWire | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[_SpanWire]
    input_token_logprobs: list[Entry]
    input_top_logprobs: list[list[Entry] | None]
    output_token_logprobs: list[Entry]
    output_top_logprobs: list[list[Entry]]


class _ErrorWire(TypedDict, total=False):
    message: str
    code: int
    retryable: bool


class Frame(TypedDict, total=False):
    """One answer, or one `data:` frame of a streamed answer."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: _Meta
    error: _ErrorWire


async def split_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payloads of the `data:` lines of a server-sent event stream, until `[DONE]`.

    Frames are not limited in size (one with many log-probs is hundreds of kilobytes), unlike a stream reader's lines.

    Raises:
        EngineUnavailable: the stream ended before `[DONE]`.
    """
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                return
            yield payload
    raise EngineUnavailable("the engine ended its stream before [DONE]")


def raise_for_error(message: str, status: int, *, retryable: bool = False) -> None:
    """Raise what an HTTP status, or the code in an error frame, stands for."""
    if retryable or status in (408, 429) or status >= 500:
        raise EngineUnavailable(f"the engine answered {status}: {message}")
    raise EngineRefused(f"the engine refused ({status}): {message}")


@dataclass
class ChoiceReader:
    """Turns the frames of one choice into chunks and checks that they add up."""

    vocab_size: int
    top_k: int
    seen: int = 0

    def read(self, frame: Frame) -> GenerationChunk:
        """Raises EngineProtocolError for a frame that does not add up, EngineRefused for the engine's own refusal."""
        try:
            meta = frame["meta_info"]
            finish = meta["finish_reason"]
            if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
                # Such a frame also holds a token that was never sampled.
                raise_for_error(finish.get("message", ""), int(finish["status_code"] or 500))
            ids = _ids(frame["output_ids"])
            entries = meta.get("output_token_logprobs", [])
            rows = meta["output_top_logprobs"] if self.top_k and len(ids) else []
            if finish is not None and finish["type"] == "abort" and self.seen == meta["completion_tokens"]:
                # Cut while it waited in the queue: the frame repeats the last token, if there was one.
                ids, entries, rows = _ids([]), [], []
            self.seen += len(ids)
            if self.seen != meta["completion_tokens"]:
                raise EngineProtocolError(
                    f"the engine streamed {self.seen} tokens and counts {meta['completion_tokens']}; "
                    "it must run with --incremental-streaming-output (python -m atoll.engine does)"
                )
            _check_entry_ids(entries, ids, self.vocab_size)
            return GenerationChunk(
                index=frame.get("index", 0),
                token_ids=ids,
                log_probs=_log_probs(entries),
                text=frame["text"],
                top_k=_top_k(rows, len(ids), self.top_k, self.vocab_size) if self.top_k else None,
                finish=None if finish is None else self._finish(finish, meta),
            )
        except GARBLED as error:
            raise EngineProtocolError(f"an answer of /generate lacks or garbles {error}") from error

    def _finish(self, finish: _FinishWire, meta: _Meta) -> Finish:
        # A reply that was cut before it started has no spans and no count of the prompt.
        reported = meta.get("weight_versions") or []
        spans = tuple(WeightSpan(span["version"], span["start"], span["end"]) for span in reported)
        position = 0
        for span in spans:
            if span.start != position or span.end < span.start:
                raise EngineProtocolError(f"weight versions {spans} do not follow each other from token 0")
            position = span.end
        if position != self.seen:
            raise EngineProtocolError(f"weight versions {spans} cover {position} of {self.seen} tokens")
        return Finish(
            reason=FinishReason(finish["type"]),
            matched=finish.get("matched"),
            detail=finish.get("message") or "",
            spans=spans,
            usage=Usage(meta.get("prompt_tokens", 0), meta["completion_tokens"], meta.get("cached_tokens", 0)),
        )


def read_score(frame: Frame, response_ids: Ids, top_k: int, vocab_size: int) -> ScoreResult:
    """Read an answer that was asked from the last prompt token on, so that entry 0 is that token, without a log-prob.

    Raises:
        EngineProtocolError: the entries are not those of `response_ids`.
    """
    try:
        meta = frame["meta_info"]
        entries = meta["input_token_logprobs"]
        if len(entries) != len(response_ids) + 1:
            raise EngineProtocolError(f"expected {len(response_ids) + 1} input log-probs, got {len(entries)}")
        _check_entry_ids(entries[1:], response_ids, vocab_size)
        rows = meta["input_top_logprobs"][1:] if top_k else []
        if None in rows:
            raise EngineProtocolError("the engine returned no top-k for a response token")
        full = [row for row in rows if row is not None]
        return ScoreResult(
            log_probs=_log_probs(entries[1:]),
            top_k=_top_k(full, len(response_ids), top_k, vocab_size) if top_k else None,
            weight_version=meta["weight_version"],
        )
    except GARBLED as error:
        raise EngineProtocolError(f"an answer of /generate lacks or garbles {error}") from error


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.int32)


def _check_entry_ids(entries: Sequence[Entry], sent: Ids, vocab_size: int) -> None:
    """SGLang reports the last id of the vocabulary as 0 (its log-prob is right), so 0 may stand for either."""
    got = np.array([entry[1] for entry in entries], dtype=np.int32)
    if len(got) != len(sent):
        raise EngineProtocolError(f"expected {len(sent)} log-probs, got {len(got)}")
    wrong = np.flatnonzero((got != sent) & ~((got == 0) & (sent == vocab_size - 1)))
    if len(wrong):
        at = int(wrong[0])
        raise EngineProtocolError(f"log-prob {at} is of token {got[at]}, expected token {sent[at]}")


def _log_probs(entries: Sequence[Entry]) -> LogProbs:
    log_probs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if not np.isfinite(log_probs).all():
        raise EngineProtocolError(f"log-probs are not finite: {log_probs}")
    return log_probs


def _top_k(rows: Sequence[Sequence[Entry]], count: int, k: int, vocab_size: int) -> TopK:
    if len(rows) != count or any(len(row) != k for row in rows):
        raise EngineProtocolError(f"expected {count} rows of {k} likeliest tokens, got {[len(row) for row in rows]}")
    flat = list(chain.from_iterable(chain.from_iterable(rows)))
    log_probs = np.array(flat[0::3], dtype=np.float32)
    # A null becomes NaN; -inf is a token that the model rules out.
    if np.isnan(log_probs).any() or np.isposinf(log_probs).any():
        raise EngineProtocolError(f"log-probs of the {k} likeliest tokens are not numbers")
    ids = np.array(flat[1::3], dtype=np.int32)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise EngineProtocolError(
            f"id {ids[outside[0]]} is among the likeliest, outside the vocabulary of {vocab_size}"
        )
    return TopK(ids=ids.reshape(count, k), log_probs=log_probs.reshape(count, k))


def text_of_error(body: bytes) -> str:
    """The message in an error answer; SGLang has three shapes for it."""
    try:
        document = loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]
    if isinstance(document, Mapping):
        error = document.get("error", document)
        if isinstance(error, Mapping):
            error = error.get("message", error)
        return str(error)
    return str(document)
