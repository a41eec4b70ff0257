"""kill -9 of a service in the worst moment, and a restart: no sample is lost or trained twice, the loop goes on."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll.api.gateway.v1 import sample_pb2

from tests.e2e.live_stack import BATCH, LiveStack, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def stack(tmp_path: Path, tiny_models: Path) -> Iterator[LiveStack]:
    """A deployment of the test's own."""
    stack = LiveStack(tmp_path / "run", tiny_models / "student")
    stack.start()
    try:
        yield stack
    finally:
        stack.close()


def consumed(stack: LiveStack) -> Counter[str]:
    """How often the chain trained each sample."""
    return Counter(receipt for version in stack.versions() for receipt in version.consumed_sample_ids)


def test_samples_outlive_a_gateway_that_dies_between_reply_and_report(stack: LiveStack) -> None:
    chats = [stack.chat(f"question {number // 2}") for number in range(BATCH)]
    recorded = {chat.receipt: stack.sample(chat.receipt) for chat in chats}
    stack.kill("gateway")
    stack.start()

    for chat in chats:
        again = stack.sample(chat.receipt)
        assert again.sample == recorded[chat.receipt].sample
        assert {name: array.tobytes() for name, array in again.tensors.items()} == {
            name: array.tobytes() for name, array in recorded[chat.receipt].tensors.items()
        }
    for number, chat in enumerate(chats):
        stack.report(chat.receipt, float(number % 2), f"group-{number // 2}")
    stack.wait_until_served(1)
    assert consumed(stack) == Counter(chat.receipt for chat in chats)
    assert stack.chat().weight_version == "1:1"


def test_a_report_that_was_answered_outlives_the_gateway_and_its_batch_is_trained(stack: LiveStack) -> None:
    chats = [stack.chat(f"question {number // 2}") for number in range(BATCH)]
    for number, chat in enumerate(chats[:-1]):
        stack.report(chat.receipt, float(number % 2), f"group-{number // 2}")
    stack.kill("gateway")
    stack.start()
    # A client that never saw the answer sends the report again, under the same request id.
    assert stack.report(chats[0].receipt, 0.0, "group-0")["job_id"] is None
    assert str(stack.report(chats[-1].receipt, 1.0, "group-1")["job_id"]).startswith("job-")
    stack.wait_until_served(1)
    assert consumed(stack) == Counter(chat.receipt for chat in chats)


def test_a_trainer_that_dies_in_mid_step_trains_its_job_once_after_the_restart(stack: LiveStack) -> None:
    chats, job = stack.feed_batch("first")
    wait_for(lambda: stack.status()["job_state"] in ("running", "staged"), "the step has begun", 60)
    stack.kill("trainer")
    stack.start()
    stack.wait_until_served(1)
    head = stack.versions()[-1]
    assert (head.number, head.job_id) == (1, job)
    assert consumed(stack) == Counter(chat.receipt for chat in chats)

    more, _ = stack.feed_batch("second")
    stack.wait_until_served(2)
    assert consumed(stack) == Counter(chat.receipt for chat in [*chats, *more])
    states = Counter(sample.state for sample in stack.samples())
    assert states == {sample_pb2.SAMPLE_STATE_CONSUMED: 2 * BATCH}


@pytest.mark.parametrize("service", ["engine", "registry"])
def test_the_loop_goes_on_after_any_other_service_died(stack: LiveStack, service: str) -> None:
    chats, _ = stack.feed_batch("before")
    stack.wait_until_served(1)
    stack.kill(service)
    stack.start()
    assert stack.chat("still 1").weight_version == "1:1", "the engine boots from the head"
    more, _ = stack.feed_batch("after")
    stack.wait_until_served(2)
    assert consumed(stack) == Counter(chat.receipt for chat in [*chats, *more])
