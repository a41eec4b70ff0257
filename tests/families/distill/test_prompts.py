"""What a teacher reads: the last user message with a block more, and attempts without their thinking."""

from dataclasses import replace

import pytest
from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.families.distill.prompts import first_text, renderer_of, with_context, without_thinking
from atoll.families.samples import RowContext
from pydantic import JsonValue

from tests.families.reported import reported

SAMPLE = reported("a").sample


def messages(*pairs: tuple[str, JsonValue]) -> JsonValue:
    return [{"role": role, "content": content} for role, content in pairs]


def test_the_context_goes_behind_the_last_user_message_and_the_request_stays_as_it_was() -> None:
    request: dict[str, JsonValue] = {
        "messages": messages(("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"))
    }
    sample = replace(SAMPLE, request=request)
    got = with_context(sample, "a hint")
    assert got == messages(("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two\n\na hint"))
    assert request["messages"] == messages(("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"))


def test_a_message_of_parts_gets_a_part_more() -> None:
    part: JsonValue = {"type": "text", "text": "two"}
    sample = replace(SAMPLE, request={"messages": messages(("user", [part]))})
    assert with_context(sample, "a hint") == messages(("user", [part, {"type": "text", "text": "\na hint"}]))


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({}, "sample sample-of-a: its request has no messages"),
        ({"messages": "hello"}, "its request has no messages"),
        ({"messages": []}, "has no user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "has no user message"),
    ],
)
def test_a_request_without_a_user_message_is_refused(request_body: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        with_context(replace(SAMPLE, request=request_body), "a hint")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<think>hm\nhm</think>\n\nyes", "yes"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("begun in the prompt</think> yes", "yes"),
        ("yes <think>never ends", "yes"),
        ("<think>only this", ""),
        ("", ""),
    ],
)
def test_thinking_blocks_are_removed(text: str, expected: str) -> None:
    assert without_thinking(text) == expected


def test_the_first_text_that_is_not_empty_counts() -> None:
    assert first_text(["", "b", "c"]) == "b"
    assert first_text(["", ""]) is None


def test_a_driver_without_a_chat_template_is_told_what_is_missing() -> None:
    with pytest.raises(BadConfiguration, match="sdft renders prompts for its teacher"):
        renderer_of("sdft", RowContext(()))
