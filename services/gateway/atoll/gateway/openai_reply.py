"""Answers in OpenAI's shapes, with what Atoll adds under the key "atoll"."""

from collections.abc import Sequence

import orjson
from atoll.common.errors import AtollError
from atoll.gateway.chat_request import Chat
from atoll.gateway.completion import Completion
from atoll.gateway.http_errors import error_body

Json = dict[str, object]

END_OF_STREAM = b"data: [DONE]\n\n"


def completion_id(chat: Chat) -> str:
    return f"chatcmpl-{chat.receipts[0]}"


def receipt_header(chat: Chat) -> dict[str, str]:
    """`x-atoll-receipt`: the receipt; those of several choices in their order, with commas."""
    return {"x-atoll-receipt": ",".join(chat.receipts)}


def atoll_entry(completion: Completion) -> Json:
    """What names the sample. Example: {"receipt": "4f0c...", "weight_version": "1:3"}"""
    return {"receipt": completion.receipt, "weight_version": completion.weight_version}


def usage(chat: Chat, completions: Sequence[Completion]) -> Json:
    prompt, response = len(chat.prompt_ids), sum(completion.token_count for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


def whole_reply(chat: Chat, completions: Sequence[Completion]) -> bytes:
    """Body of a plain answer. One choice: "atoll" stands beside `choices`; several: in each of them."""
    several = len(completions) > 1
    choices: list[Json] = []
    for completion in completions:
        choice: Json = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _finish_reason(completion),
        }
        if several:
            choice["atoll"] = atoll_entry(completion)
        choices.append(choice)
    reply = {
        "id": completion_id(chat),
        "object": "chat.completion",
        "created": int(chat.created_at.timestamp()),
        "model": chat.request.model or chat.scenario,
        "choices": choices,
        "usage": usage(chat, completions),
    }
    if not several:
        reply["atoll"] = atoll_entry(completions[0])
    return orjson.dumps(reply)


class StreamFrames:
    """Frames of one streamed answer, as server-sent events."""

    def __init__(self, chat: Chat) -> None:
        self._several = chat.request.n > 1
        self._with_usage = chat.request.stream_options is not None and chat.request.stream_options.include_usage
        self._chat = chat
        self._head: Json = {
            "id": completion_id(chat),
            "object": "chat.completion.chunk",
            "created": int(chat.created_at.timestamp()),
            "model": chat.request.model or chat.scenario,
        }

    def role(self, index: int) -> bytes:
        """The first frame of a choice."""
        return self._frame(index, {"role": "assistant", "content": ""})

    def text(self, index: int, text: str) -> bytes:
        return self._frame(index, {"content": text})

    def end(self, completion: Completion) -> bytes:
        """The last frame of a choice, sent when its sample is durable."""
        entry = atoll_entry(completion)
        if self._several:
            return self._frame(completion.index, {}, _finish_reason(completion), in_choice={"atoll": entry})
        return self._frame(completion.index, {}, _finish_reason(completion), beside={"atoll": entry})

    def closing(self, completions: Sequence[Completion]) -> bytes:
        """What ends the stream: the usage when it was asked for, then [DONE]."""
        if not self._with_usage:
            return END_OF_STREAM
        return _event({**self._head, "choices": [], "usage": usage(self._chat, completions)}) + END_OF_STREAM

    def _frame(
        self,
        index: int,
        delta: Json,
        finish_reason: str | None = None,
        in_choice: Json | None = None,
        beside: Json | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        frame: Json = {**self._head, "choices": [{**choice, **(in_choice or {})}], **(beside or {})}
        if self._with_usage:
            frame["usage"] = None
        return _event(frame)


def error_frame(error: AtollError) -> bytes:
    """Ends a stream that cannot go on; no [DONE] follows."""
    return _event(error_body(error))


def _event(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _finish_reason(completion: Completion) -> str:
    assert completion.finish is not None
    return completion.finish.reason.value
