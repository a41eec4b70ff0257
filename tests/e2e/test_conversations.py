"""Conversations become rows of a version, and a command takes the version back, with every service real."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll.api.gateway.v1 import sample_pb2
from atoll.api.registry.v1 import version_pb2

from tests.e2e.live_stack import BATCH, GROUP_SIZE, SCENARIO, LiveStack, wait_for
from tests.e2e.test_commands import atoll

pytestmark = pytest.mark.slow

MAX_TOKENS = 12
TRAIN_SECONDS = 180.0


@pytest.fixture
def stack(tmp_path: Path, tiny_models: Path) -> Iterator[LiveStack]:
    """A stack of its own: a rollback changes the incarnation."""
    running = LiveStack(tmp_path / "run", tiny_models / "student")
    running.start()
    try:
        yield running
    finally:
        running.close()


def converse(stack: LiveStack, question: str) -> list[str]:
    """Receipts of two turns."""
    messages = [{"role": "user", "content": question}]
    receipts: list[str] = []
    for follow_up in ("And now?", ""):
        body = {"model": SCENARIO, "messages": messages, "max_tokens": MAX_TOKENS}
        answer = stack.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        receipts.append(answer.headers["x-atoll-receipt"])
        reply = {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
        messages = [*messages, reply, {"role": "user", "content": follow_up}]
    return receipts


def train_conversations(stack: LiveStack, name: str) -> str:
    """Reports on two turns at a time until a batch is complete; its job."""
    job = ""
    for number in range(BATCH):
        group = f"{name}-{number // GROUP_SIZE}"
        body = {
            "receipts": converse(stack, f"{group}?"),
            "score": float(number % GROUP_SIZE),
            "metadata": {"group": group},
        }
        answer = stack.http.post("/atoll/report", json=body)
        assert answer.status_code == 200, answer.text
        job = answer.json()["job_id"]
    return job


def test_conversations_are_trained_as_rows_and_a_rollback_gives_the_weights_back(stack: LiveStack) -> None:
    at = ("--gateway", stack.gateway_url)
    job = train_conversations(stack, "first")
    watched = json.loads(atoll("job", job, "--watch", "--json", *at))
    assert watched["state"] == "served" and watched["version"] == 1 and len(watched["samples"]) == 2 * BATCH
    # A reply that ends in half a character is no text that a client could send back, and makes a row of its own.
    assert BATCH <= watched["metrics"]["train/rows"] < 2 * BATCH
    assert watched["metrics"]["train/trained_tokens"] <= 2 * BATCH * MAX_TOKENS
    assert watched["metrics"]["train/rollout_log_prob_abs_diff"] < 1e-4, "the rows are what the engine sampled"
    wait_for(
        lambda: {sample.state for sample in stack.samples()} == {sample_pb2.SAMPLE_STATE_CONSUMED},
        "samples consumed",
        TRAIN_SECONDS,
    )

    (left_over, *_) = converse(stack, "Left over?")
    stack.report(left_over, 1.0, "left-over")
    rolled_back = json.loads(atoll("rollback", SCENARIO, "0", "--request-id", "r1", "--watch", "--json", *at))
    assert (rolled_back["state"], rolled_back["version"], rolled_back["restores"]) == ("served", 2, 0)
    versions = stack.versions()
    assert [version.weight_version for version in versions] == ["1:0", "1:1", "2:2"]
    assert versions[2].operation == version_pb2.OPERATION_ROLLBACK
    assert versions[2].model_digest == versions[0].model_digest
    assert stack.chat("After the rollback?").weight_version == "2:2"
    wait_for(lambda: stack.sample(left_over).sample.settled_reason, "left-over report settled", TRAIN_SECONDS)
    assert "of another incarnation" in stack.sample(left_over).sample.settled_reason

    again = json.loads(atoll("job", train_conversations(stack, "second"), "--watch", "--json", *at))
    assert again["state"] == "served" and stack.versions()[-1].weight_version == "2:3"
    table = atoll("jobs", *at)
    assert "rollback to 0" in table and job in table
    said = atoll("rollback", SCENARIO, "99", *at, status=1)
    assert "99" in said and said.count("\n") == 1
