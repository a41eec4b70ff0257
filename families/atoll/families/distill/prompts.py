"""What a teacher reads in place of the student's prompt: the same conversation with something more in it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.common.errors import BadConfiguration
from atoll.families.refusals import sample_refused
from atoll.families.rows import Int32
from atoll.families.samples import PromptRenderer, RowContext, SampleView
from pydantic import JsonValue

Message = Mapping[str, JsonValue]

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class TeacherPrompt:
    """A teacher's prompt for one sample. Example: `TeacherPrompt(np.asarray([1, 5, 9], dtype=np.int32))`."""

    tokens: Int32
    """[P]"""
    sample_weight: float = 1.0
    """Multiplies the sample's token losses, never a denominator: 0 for a sample that its teacher says nothing about."""


def renderer_of(family: str, context: RowContext) -> PromptRenderer:
    """Raises: BadConfiguration where the driver has no renderer."""
    if context.renderer is None:
        raise BadConfiguration(
            f"{family} renders prompts for its teacher, and the driver has no chat template; "
            "train a model whose directory holds its tokenizer and chat template",
            field="family",
        )
    return context.renderer


def with_context(sample: SampleView, context: str) -> list[Message]:
    """The request's messages, with a text added to the last user message after an empty line.

    Raises: InvalidInput naming the sample when its request has no user message.
    """
    messages = sample.request.get("messages")
    if not isinstance(messages, list):
        raise sample_refused(sample.sample_id, "its request has no messages", field="request.messages")
    conversation = [dict(message) for message in messages if isinstance(message, dict)]
    for message in reversed(conversation):
        if message.get("role") == "user":
            message["content"] = _extended(message.get("content"), context)
            return list(conversation)
    raise sample_refused(
        sample.sample_id,
        "its request has no user message that a teacher's context could be added to",
        field="request.messages",
    )


def _extended(content: JsonValue, context: str) -> JsonValue:
    if isinstance(content, list):
        # Parts are joined line by line.
        return [*content, {"type": "text", "text": f"\n{context}"}]
    return f"{content or ''}\n\n{context}"


def without_thinking(text: str) -> str:
    """A reply without its thinking blocks, an unfinished one and one that the prompt had opened among them."""
    return _THINKING.sub("", text).rpartition("</think>")[2].strip()


def first_text(texts: Sequence[str]) -> str | None:
    """The first text that is not empty."""
    return next((text for text in texts if text), None)
