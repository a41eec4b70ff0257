"""What OpenAI's API has and the gateway does not do: refused by name with the reason, never ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.gateway.openai_schema import ROLES
from pydantic import JsonValue


@dataclass(frozen=True)
class Unsupported:
    """why: said to the client. neutral: values that ask for nothing, besides null. Example: Unsupported("no audio")"""

    why: str
    neutral: tuple[JsonValue, ...] = ()


_NO_TOOLS = Unsupported("tools are not supported yet", neutral=([],))
_ONLY_TEXT = Unsupported("only text goes in and comes out")
_NOT_STORED_HERE = Unsupported("it concerns OpenAI's own platform")

REQUEST_FIELDS: Mapping[str, Unsupported] = {
    "audio": _ONLY_TEXT,
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "logprobs": Unsupported(
        "log-probs are recorded with the sample: read them with SampleService.GetSample", neutral=(False,)
    ),
    "modalities": Unsupported("only text goes in and comes out", neutral=(["text"],)),
    "moderation": _NOT_STORED_HERE,
    "parallel_tool_calls": _NO_TOOLS,
    "prediction": Unsupported("the engine does not take predicted output"),
    "prompt_cache_key": _NOT_STORED_HERE,
    "prompt_cache_options": _NOT_STORED_HERE,
    "prompt_cache_retention": _NOT_STORED_HERE,
    "reasoning_effort": Unsupported("the model has no reasoning levels"),
    "response_format": Unsupported("grammars are not supported yet", neutral=({"type": "text"},)),
    "safety_identifier": _NOT_STORED_HERE,
    "seed": Unsupported("the engine does not sample deterministically, so a seed would have no effect"),
    "service_tier": Unsupported("there is one tier", neutral=("auto", "default")),
    "store": Unsupported("every completion is recorded by Atoll and none by OpenAI", neutral=(False,)),
    "tool_choice": Unsupported("tools are not supported yet", neutral=("none",)),
    "tools": _NO_TOOLS,
    "top_logprobs": Unsupported(
        "log-probs are recorded with the sample: read them with SampleService.GetSample", neutral=(0,)
    ),
    "verbosity": Unsupported("the model has no verbosity levels"),
    "web_search_options": Unsupported("the gateway does not search"),
}

STREAM_OPTION_FIELDS: Mapping[str, Unsupported] = {
    "include_obfuscation": Unsupported("frames are not padded", neutral=(False,)),
}

MESSAGE_FIELDS: Mapping[str, Unsupported] = {
    "annotations": Unsupported("the chat template has no place for them", neutral=([],)),
    "audio": _ONLY_TEXT,
    "function_call": _NO_TOOLS,
    "name": Unsupported("the chat template has no place for it"),
    "refusal": Unsupported("the chat template has no place for it"),
    "tool_call_id": _NO_TOOLS,
    "tool_calls": _NO_TOOLS,
}

ROLES_OF_TOOLS = ("tool", "function")
PART_TYPES = ("image_url", "input_audio", "file", "refusal")


def without_unsupported(body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The body without fields that ask for nothing, e.g. `"tools": null`, which clients send back and forth.

    Raises InvalidInput(UNSUPPORTED) for the first field that asks for something.
    """
    cleaned = _checked(body, REQUEST_FIELDS, "")
    options = cleaned.get("stream_options")
    if isinstance(options, dict):
        cleaned["stream_options"] = _checked(options, STREAM_OPTION_FIELDS, "stream_options.")
    messages = cleaned.get("messages")
    if isinstance(messages, list):
        cleaned["messages"] = [_checked_message(message, index) for index, message in enumerate(messages)]
    # A null says "the default", which the schema's own defaults are.
    return {name: value for name, value in cleaned.items() if value is not None}


def _checked(fields: Mapping[str, JsonValue], table: Mapping[str, Unsupported], prefix: str) -> dict[str, JsonValue]:
    kept: dict[str, JsonValue] = {}
    for name, value in fields.items():
        entry = table.get(name)
        if entry is None:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in entry.neutral):
            raise _refusal(f"{prefix}{name}", entry.why)
    return kept


def _same(value: JsonValue, neutral: JsonValue) -> bool:
    return type(value) is type(neutral) and value == neutral  # False == 0 in Python, not in JSON


def _checked_message(message: JsonValue, index: int) -> JsonValue:
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if role in ROLES_OF_TOOLS:
        raise _refusal(f"messages.{index}.role", f"{role!r} is not; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        _check_parts(content, index)
    return _checked(message, MESSAGE_FIELDS, f"messages.{index}.")


def _check_parts(parts: Sequence[JsonValue], index: int) -> None:
    for place, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") in PART_TYPES:
            raise _refusal(f"messages.{index}.content.{place}.type", "only text goes in")


def _refusal(field: str, why: str) -> InvalidInput:
    return InvalidInput(f"{field} is not supported: {why}", field=field, reason=errors_pb2.REASON_UNSUPPORTED)
