"""Bad input: a 4xx in OpenAI's shape that names the field, nothing stored, and a process that lives."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.http_gateway import HELLO, SCENARIO, HttpGateway

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}

# What is sent in place of, or besides, HELLO's fields; status; code; the field that is named.
REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "invalid_field", "messages"),
    ({"messages": None}, 400, "invalid_field", "messages"),
    ({"messages": "hi"}, 400, "invalid_field", "messages"),
    ({"messages": [{"content": "hi"}]}, 400, "invalid_field", "messages.0.role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "invalid_field", "messages.0.role"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_field", "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "invalid_field", "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_field", "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_field", "messages.0.content"),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, 400, "invalid_field", "messages.0.content.0.text"),
    ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, 400, "unsupported", "messages.0.content.0.type"),
    ({"messages": [USER, {"role": "tool", "content": "4"}]}, 400, "unsupported", "messages.1.role"),
    ({"messages": [{**USER, "name": "Ann"}]}, 400, "unsupported", "messages.0.name"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, 400, "unsupported", "messages.0.tool_calls"),
    ({"messages": [{**USER, "mood": "good"}]}, 400, "unknown_field", "messages.0.mood"),
    ({"colour": "blue"}, 400, "unknown_field", "colour"),
    ({"top_k": 5}, 400, "unknown_field", "top_k"),
    ({"tools": [{"type": "function"}]}, 400, "unsupported", "tools"),
    ({"tool_choice": "auto"}, 400, "unsupported", "tool_choice"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported", "response_format"),
    ({"audio": {"voice": "x"}}, 400, "unsupported", "audio"),
    ({"seed": 0}, 400, "unsupported", "seed"),
    ({"logprobs": True}, 400, "unsupported", "logprobs"),
    ({"top_logprobs": 3}, 400, "unsupported", "top_logprobs"),
    ({"store": True}, 400, "unsupported", "store"),
    ({"reasoning_effort": "high"}, 400, "unsupported", "reasoning_effort"),
    ({"functions": [{}]}, 400, "unsupported", "functions"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "unsupported",
     "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "unknown_field", "stream_options.x"),
    ({"temperature": -0.1}, 400, "invalid_field", "temperature"),
    ({"temperature": 2.1}, 400, "invalid_field", "temperature"),
    ({"temperature": "1"}, 400, "invalid_field", "temperature"),
    ({"temperature": True}, 400, "invalid_field", "temperature"),
    ({"temperature": float("nan")}, 400, "invalid_field", "temperature"),
    ({"top_p": 0}, 400, "invalid_field", "top_p"),
    ({"top_p": float("inf")}, 400, "invalid_field", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_field", "max_tokens"),
    ({"max_tokens": 1.5}, 400, "invalid_field", "max_tokens"),
    ({"max_completion_tokens": -1}, 400, "invalid_field", "max_completion_tokens"),
    ({"max_tokens": 100_000}, 400, "sequence_too_long", "max_tokens"),
    ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "sequence_too_long", "messages"),
    ({"n": 0}, 400, "invalid_field", "n"),
    ({"n": 1000}, 400, "invalid_field", "n"),
    ({"stop": 5}, 400, "invalid_field", "stop"),
    ({"stop": [1]}, 400, "invalid_field", "stop.0"),
    ({"presence_penalty": 3}, 400, "invalid_field", "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "invalid_field", "frequency_penalty"),
    ({"logit_bias": {"5": 200}}, 400, "invalid_field", "logit_bias.5"),
    ({"logit_bias": {"1024": 1}}, 400, "invalid_field", "logit_bias.1024"),
    ({"metadata": {"a": 1}}, 400, "invalid_field", "metadata.a"),
    ({"user": 5}, 400, "invalid_field", "user"),
    ({"stream": "yes"}, 400, "invalid_field", "stream"),
    ({"model": 5}, 400, "invalid_field", "model"),
    ({"model": "nobody"}, 404, "scenario_not_found", "model"),
    ({"model": "GPT 4o!"}, 404, "scenario_not_found", "model"),
    ({"model": f"{SCENARIO}@7"}, 404, "version_not_found", "model"),
    ({"model": f"{SCENARIO}@x"}, 404, "version_not_found", "model"),
]  # fmt: skip

# Rules about several fields name them in the message.
REFUSED_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
]

BROKEN: list[tuple[bytes, int, str, str | None]] = [
    (b"", 400, "invalid_json", None),
    (b"{", 400, "invalid_json", None),
    (b"[1]", 400, "invalid_json", None),
    (b'"hi"', 400, "invalid_json", None),
    (b"\xff\xfe", 400, "invalid_json", None),
    (b"[" * 100_000, 400, "invalid_json", None),
    (b'{"temperature": 1e999}', 400, "invalid_field", "temperature"),
    (b'{"messages": [{"content": "\\ud800"}]}', 400, "invalid_field", "messages.0.content"),
    (b'{"\\ud800": 1}', 400, "invalid_field", None),
]


@pytest.fixture
async def intact(web: HttpGateway, engine: FakeEngine) -> AsyncIterator[HttpGateway]:
    """The gateway; afterwards nothing is stored, the engine was not called, and the next request is answered."""
    yield web
    assert await web.samples() == []
    assert engine.requests == []
    assert (await web.chat()).status == 200


async def test_bad_fields_are_refused_by_name(intact: HttpGateway) -> None:
    for fields, status, code, param in REFUSED:
        answer = await intact.chat(**fields)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param), (fields, answer)
        assert len(answer.error["message"]) < 400
        expected_type = "invalid_request_error" if status == 400 else "not_found_error"
        assert answer.error["type"] == expected_type


async def test_rules_over_several_fields_say_which(intact: HttpGateway) -> None:
    for fields, named in REFUSED_TOGETHER:
        answer = await intact.chat(**fields)
        assert (answer.status, answer.error["code"]) == (400, "invalid_field"), fields
        assert named in answer.error["message"], fields


async def test_a_body_that_is_not_a_json_object_is_refused(intact: HttpGateway) -> None:
    for path in (CHAT, "/atoll/report"):
        for body, status, code, param in BROKEN:
            answer = await intact.post(path, body)
            assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param), body[:40]


async def test_without_any_scenario_named_the_request_is_refused(intact: HttpGateway) -> None:
    answer = await intact.chat({"messages": [USER]})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_field", "model")


async def test_an_unknown_scenario_in_the_header_is_404_and_names_the_header(intact: HttpGateway) -> None:
    for name in ("nobody", "No Body", "x" * 1000):
        answer = await intact.post(CHAT, HELLO, {"x-atoll-scenario": name})
        assert (answer.status, answer.error["code"]) == (404, "scenario_not_found")
        assert answer.error["param"] == "x-atoll-scenario"
    answer = await intact.post(CHAT, {**HELLO, "model": f"{SCENARIO}@0"}, {"x-atoll-scenario": "other"})
    assert (answer.status, answer.error["param"]) == (400, "model")


async def test_values_that_ask_for_nothing_are_no_reason_to_refuse(web: HttpGateway) -> None:
    answer = await web.chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        logprobs=False,
        store=False,
        seed=None,
        temperature=None,
        n=None,
        stop=None,
        stream=False,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
            USER,
            # An earlier answer as clients send it back.
            {"role": "assistant", "content": "yo", "refusal": None, "annotations": [], "tool_calls": None},
            USER,
        ],
    )
    assert answer.status == 200, answer


async def test_false_is_not_zero_and_zero_is_not_false(intact: HttpGateway) -> None:
    for fields in ({"top_logprobs": False}, {"logprobs": 0}):
        answer = await intact.chat(**fields)
        assert (answer.status, answer.error["code"]) == (400, "unsupported"), fields


async def test_a_route_that_is_not_there_says_so_in_the_same_shape(intact: HttpGateway) -> None:
    missing = await intact.post("/v1/completions", {})
    assert missing.status == 404 and missing.error["code"] == "no_such_route"
    wrong_method = await intact.get(CHAT)
    assert wrong_method.status == 405 and "POST" in wrong_method.headers["allow"]


async def test_many_bad_requests_at_once_leave_the_good_ones_alone(web: HttpGateway) -> None:
    bad = [web.chat(**fields) for fields, *_ in REFUSED]
    good = [web.chat() for _ in range(10)]
    answers = await asyncio.gather(*bad, *good)
    assert [answer.status for answer in answers[len(bad) :]] == [200] * 10
    assert len(await web.samples()) == 10


def test_the_table_sends_json_that_a_client_could_send() -> None:
    for fields, *_ in REFUSED:
        assert json.loads(json.dumps(fields)).keys() == fields.keys()
