"""Bad input through the whole stack: a refusal in OpenAI's shape that names the field, nothing stored, nobody dies."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.live_stack import SCENARIO, LiveStack

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": SCENARIO, "messages": MESSAGES, "max_tokens": 4}


@pytest.fixture
def unchanged(live_stack: LiveStack) -> Iterator[LiveStack]:
    """Fails a test after which a sample, a report or a version more is stored, or the gateway does not answer."""
    samples, status = len(live_stack.samples()), live_stack.status()
    yield live_stack
    assert len(live_stack.samples()) == samples
    assert live_stack.status() == status


def refusal(answer: httpx.Response, status: int, code: str, param: str | None) -> str:
    """Checks OpenAI's error shape; returns the message."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    message: str = error["message"]
    return message


def chat_with(stack: LiveStack, **fields: object) -> httpx.Response:
    return stack.http.post("/v1/chat/completions", json=CHAT | fields)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"messages": []}, 400, "invalid_field", "messages"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_field", "messages.0.content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_field", "messages.0.role"),
        ({"model": "no-such-scenario"}, 404, "scenario_not_found", "model"),
        ({"temperature": -1}, 400, "invalid_field", "temperature"),
        ({"max_tokens": 0}, 400, "invalid_field", "max_tokens"),
        ({"max_tokens": 10_000_000}, 400, "sequence_too_long", "max_tokens"),
        ({"temprature": 1}, 400, "unknown_field", "temprature"),
        ({"logprobs": True}, 400, "unsupported", "logprobs"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused_with_the_field(
    unchanged: LiveStack, fields: dict[str, object], status: int, code: str, param: str
) -> None:
    assert refusal(chat_with(unchanged, **fields), status, code, param)


def test_a_chat_for_an_unknown_scenario_is_refused(unchanged: LiveStack) -> None:
    answer = unchanged.http.post("/v1/chat/completions", json=CHAT, headers={"x-atoll-scenario": "nowhere"})
    assert "nowhere" in refusal(answer, 404, "scenario_not_found", "x-atoll-scenario")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/atoll/report"])
@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"\xff\xfe"], ids=repr)
def test_a_body_that_is_not_a_json_object_is_refused(unchanged: LiveStack, path: str, body: bytes) -> None:
    answer = unchanged.http.post(path, content=body, headers={"content-type": "application/json"})
    refusal(answer, 400, "invalid_json", None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/atoll/report"])
@pytest.mark.parametrize("announced", [True, False], ids=["with-length", "chunked"])
def test_a_body_of_100_megabytes_is_refused_before_it_is_read(unchanged: LiveStack, path: str, announced: bool) -> None:
    piece = b" " * 1_000_000

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield piece

    try:
        answer = unchanged.http.post(path, content=piece * 100 if announced else pieces())
    except httpx.WriteError:
        # The server may answer and close while the client still writes.
        return
    refusal(answer, 413, "body_too_large", None)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic end-to-end-token", "end-to-end-token"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/atoll/report", "/v1/models", "/atoll/status"])
def test_a_wrong_token_is_refused_everywhere(unchanged: LiveStack, path: str, header: str | None) -> None:
    method = "GET" if path in ("/v1/models", "/atoll/status") else "POST"
    headers = {} if header is None else {"authorization": header}
    answer = httpx.request(
        method, unchanged.gateway_url + path, headers=headers, json=CHAT if method == "POST" else None
    )
    refusal(answer, 401, "unauthenticated", "authorization")


def test_health_needs_no_token(live_stack: LiveStack) -> None:
    assert httpx.get(live_stack.gateway_url + "/healthz").status_code == 200


@pytest.fixture(scope="module")
def receipt(live_stack: LiveStack) -> str:
    """A sample that may be reported on; every report of this module about it is refused."""
    return live_stack.chat("To be reported on.").receipt


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"receipt": "0" * 32}, 404, "receipt_not_found", "receipt"),
        ({"score": "high"}, 400, "invalid_field", "score"),
        ({"scroe": 1.0}, 400, "unknown_field", "scroe"),
        ({"metadata": {}}, 400, "report_refused", "metadata.group"),
        ({"score": None}, 400, "report_refused", "score"),
        ({"scenario": "nowhere"}, 404, "scenario_not_found", "scenario"),
        ({"receipts": []}, 400, "invalid_field", "receipts"),
    ],
)
def test_a_report_that_cannot_be_taken_is_refused_with_the_field(
    unchanged: LiveStack, receipt: str, change: dict[str, object], status: int, code: str, param: str
) -> None:
    body = {"receipt": receipt, "score": 1.0, "metadata": {"group": "never"}} | change
    refusal(unchanged.http.post("/atoll/report", json=body), status, code, param)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_score_that_is_not_finite_is_refused(unchanged: LiveStack, receipt: str, number: str) -> None:
    body = json.dumps({"receipt": receipt, "metadata": {"group": "never"}})[:-1] + f', "score": {number}}}'
    answer = unchanged.http.post("/atoll/report", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_field")


def test_a_second_report_for_a_consumed_receipt_is_refused_and_a_replay_is_answered(live_stack: LiveStack) -> None:
    number = live_stack.versions()[-1].number
    chats, job = live_stack.feed_batch("consumed")
    live_stack.wait_until_served(number + 1)
    last = chats[-1].receipt
    body = {"receipt": last, "score": 1.0, "metadata": {"group": "consumed-1"}}
    refused = live_stack.http.post("/atoll/report", json=body | {"request_id": "another"})
    refusal(refused, 409, "already_consumed", "receipts")
    assert live_stack.report(last, 1.0, "consumed-1")["job_id"] == job, "the first answer, under its request id"
    changed = live_stack.http.post("/atoll/report", json=body | {"score": 0.5, "request_id": f"r-{last}"})
    refusal(changed, 409, "request_id_reused", "request_id")
    assert live_stack.versions()[-1].number == number + 1
