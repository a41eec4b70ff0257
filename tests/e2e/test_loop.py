"""One chat becomes a served version, and the numbers agree all the way round the ring."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from atoll.api.gateway.v1 import sample_pb2
from atoll.api.registry.v1 import version_pb2
from atoll.common.engine_client import EngineClient
from atoll.families.rows import Float32, Row
from atoll.trainer.backend import TrainingBackend
from atoll.trainer.backends import make_backend
from atoll.trainer.settings import TrainerSettings
from numpy.typing import NDArray

from tests.e2e.live_stack import BATCH, LiveStack, RecordedSample
from tests.engines import VOCAB_SIZE

TOLERANCE = 1e-3
"""Nats, between two programs that compute the same float32 forward."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBackend]:
    """A backend like the stack's own, to ask it for log-probs."""
    settings = TrainerSettings(scenario="x", registry="h:1", gateway="h:1", run_dir=tmp_path_factory.mktemp("backend"))
    backend = make_backend(settings)
    try:
        yield backend
    finally:
        backend.close()


def row_of(recorded: RecordedSample) -> Row:
    sample, tensors = recorded.sample, recorded.tensors
    return Row(
        sample_id=sample.receipt,
        rollout_id=sample.receipt,
        group_id=sample.receipt,
        tokens=tensors["token_ids"].astype(np.int32),
        prompt_length=sample.prompt_length,
        loss_mask=tensors["loss_mask"].astype(np.uint8),
        rollout_log_probs=tensors["log_probs"].astype(np.float32),
        temperature=sample.temperature,
        reward=0.0,
    )


def engine_scores(stack: LiveStack, rows: Sequence[Row]) -> list[tuple[NDArray[np.float32], str]]:
    """Log-probs at temperature 1 and the weight version of each row's response, from the serving engine."""

    async def score() -> list[tuple[NDArray[np.float32], str]]:
        async with EngineClient(stack.engine_url, VOCAB_SIZE) as engine:
            results = [await engine.score(row.tokens[: row.prompt_length], row.response_tokens) for row in rows]
        return [(result.log_probs, result.weight_version) for result in results]

    return asyncio.run(score())


def largest_difference(left: Sequence[Float32], right: Sequence[Float32]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def test_chats_and_reports_become_a_version_that_the_engine_serves(live_stack: LiveStack) -> None:
    before = live_stack.versions()[-1]
    chats, job = live_stack.feed_batch("becomes-a-version")
    assert {chat.weight_version for chat in chats} == {before.weight_version}
    live_stack.wait_until_served(before.number + 1)

    head = live_stack.versions()[-1]
    assert (head.number, head.parent, head.job_id) == (before.number + 1, before.number, job)
    assert head.operation == version_pb2.OPERATION_TRAINING
    assert head.model_digest != before.model_digest
    assert list(head.consumed_sample_ids) == [chat.receipt for chat in chats]
    assert head.metrics["train/rows"] == BATCH
    assert live_stack.chat().weight_version == head.weight_version
    states = {sample.receipt: sample.state for sample in live_stack.samples()}
    assert {states[chat.receipt] for chat in chats} == {sample_pb2.SAMPLE_STATE_CONSUMED}


def test_recorded_and_served_log_probs_are_those_of_the_trainer_before_and_after_a_step(
    live_stack: LiveStack, trainer: TrainingBackend
) -> None:
    before = live_stack.versions()[-1]
    chats, _ = live_stack.feed_batch("log-probs")
    rows = [row_of(live_stack.sample(chat.receipt)) for chat in chats]
    live_stack.wait_until_served(before.number + 1)
    after = live_stack.versions()[-1]

    load(trainer, live_stack, before)
    old = trainer.log_probs(rows)
    assert largest_difference(old, [row.rollout_log_probs for row in rows]) < TOLERANCE

    # From the checkpoint, not from the export that the engine loaded.
    load(trainer, live_stack, after)
    new = trainer.log_probs(rows)
    scores = engine_scores(live_stack, rows)
    assert {version for _, version in scores} == {after.weight_version}
    assert largest_difference(new, [log_probs for log_probs, _ in scores]) < TOLERANCE
    assert largest_difference(new, old) > 5 * TOLERANCE, "the step is too small for this test to see"


def load(trainer: TrainingBackend, stack: LiveStack, version: version_pb2.Version) -> None:
    checkpoint: Path | None = stack.artifact(version.checkpoint_digest) if version.checkpoint_digest else None
    trainer.load(stack.artifact(version.model_digest), checkpoint, None)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.9), (0.7, 0.9)])
def test_a_sample_keeps_the_log_probs_of_its_temperature_before_the_filters(
    live_stack: LiveStack, trainer: TrainingBackend, temperature: float, top_p: float
) -> None:
    chat = live_stack.chat("A filtered reply.", temperature=temperature, top_p=top_p)
    recorded = live_stack.sample(chat.receipt)
    assert recorded.sample.exact and recorded.sample.temperature == temperature
    (version,) = [one for one in live_stack.versions() if one.weight_version == chat.weight_version]
    load(trainer, live_stack, version)
    row = row_of(recorded)
    assert largest_difference(trainer.log_probs([row]), [row.rollout_log_probs]) < TOLERANCE


def test_a_streamed_reply_is_recorded_like_a_plain_one(live_stack: LiveStack) -> None:
    pieces, receipt = [], ""
    with live_stack.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Stream it."}], max_tokens=12, stream=True
    ) as stream:
        for frame in stream:
            noted = (frame.model_extra or {}).get("atoll")
            receipt = noted["receipt"] if noted else receipt
            pieces += [choice.delta.content or "" for choice in frame.choices]
    recorded = live_stack.sample(receipt)
    assert recorded.sample.text == "".join(pieces)
    assert recorded.sample.response_length == len(recorded.tensors["log_probs"]) > 0
