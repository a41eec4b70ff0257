"""Every loss family trains once through the whole loop: chats, reports, a job, a commit, and the engine serves it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from atoll.api.gateway.v1 import sample_pb2

from tests.e2e.live_stack import Chat, Json, LiveStack
from tests.engines import RunningEngine

TEACHER = "<teacher>"
"""Stands in options for the directory of the second tiny model."""
SAMPLES = 4
GRID = {"groups_per_step": 2, "rollouts_per_group": 2}


@dataclass(frozen=True)
class Case:
    """How one family is set up and told what it learns from. Example: Case("sft", {"batch_size": 4}, unscored)"""

    family: str
    options: Mapping[str, object]
    report: Callable[[int], Json]
    """Of the n-th sample: everything but the receipt."""
    metrics: Sequence[str] = field(default=())
    """Names that the version's metrics must hold."""
    top_k: int = 0
    """Ids recorded with every token."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further ones of the stack."""
    name: str = ""
    """Where it is not the family's."""


def unscored(_: int) -> Json:
    return {}


def scored(number: int) -> Json:
    return {"score": float(number % 2)}


def in_group(number: int) -> Json:
    return {**scored(number), "metadata": {"group": f"g{number // 2}"}}


def in_grid(number: int) -> Json:
    return {**scored(number), "metadata": {"step": 0, "group": number // 2, "rollout": number % 2, **GRID}}


def taught(number: int) -> Json:
    return {"metadata": {"teacher_context": f"Hint {number}: the answer is short."}}


def judged(number: int) -> Json:
    return {"score": float(number % 3 - 1), "metadata": HINTS if number % 2 else {}}


HEAD = 8
CENTERED = {
    "services__gateway__env__ATOLL_GATEWAY_CAPTURE_TOP_K": str(HEAD),
    "services__trainer__env__ATOLL_TRAINER_SCORE_CENTERING": "true",
    "services__trainer__env__ATOLL_TRAINER_SCORE_CENTERING_TOP_K": str(HEAD),
}
HINTS: Json = {"hint_candidates": [[1, 100, 200, 300], [1, 100, 200, 300, 400]]}

CASES = (
    Case("grpo", {"groups_per_step": 2, "n_samples_per_prompt": 2}, in_group, ["grpo/reward_std"]),
    Case("sft", {"batch_size": SAMPLES}, unscored, ["train/nll"]),
    Case("sao", {"batch_size": SAMPLES, "eps_clip_high": 5.0}, scored, ["critic/loss", "rollout/policy_lag_mean"]),
    Case(
        "sao",
        {"batch_size": SAMPLES, "eps_clip_high": 5.0},
        scored,
        ["train/score_centering_sampler_head_mass"],
        top_k=HEAD,
        settings=CENTERED,
        name="sao with score centering",
    ),
    Case("tttd", {**GRID, "advantage_clip": 4.0}, in_grid, ["tttd/best_reward"]),
    Case("sdft", {"batch_size": SAMPLES}, taught, ["train/divergence", "sdft/taught_rate"]),
    Case("sdpo", GRID, in_grid, ["train/divergence", "sdpo/taught_rate"]),
    Case("opd", {"batch_size": SAMPLES, "teacher_checkpoint": TEACHER}, unscored, ["train/divergence"]),
    Case(
        "openclawrl", {"batch_size": SAMPLES, "top_k": 8}, judged, ["train/opd_loss", "openclawrl/hinted_rate"], top_k=8
    ),
)


def text_of(options: Mapping[str, object], teacher: Path) -> str:
    return json.dumps({name: str(teacher) if value == TEACHER else value for name, value in options.items()})


def beside(engine: RunningEngine) -> dict[str, str]:
    """Settings of a stack that takes a running engine for its own: starting one takes longer than all the rest."""
    return {
        "vars__engines": json.dumps([engine.base_url]),
        "services__engine__command": "[sleep, infinity]",
        "services__engine__ready": "null",
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name or case.family)
def test_a_family_trains_from_served_chats_and_their_reports(
    case: Case, tmp_path: Path, tiny_models: Path, student_engine: RunningEngine
) -> None:
    stack = LiveStack(
        tmp_path / "run",
        tiny_models / "student",
        vars__family=case.family,
        vars__options=text_of(case.options, tiny_models / "teacher"),
        engine_url=student_engine.base_url,
        **beside(student_engine),
        **case.settings,
    )
    try:
        stack.start()
        train_once(stack, case)
    finally:
        stack.close()


def train_once(stack: LiveStack, case: Case) -> None:
    """One batch through the loop, and what must be true after it."""
    chats: list[Chat] = []
    job = ""
    for number in range(SAMPLES):
        chat = stack.chat(f"Question {number // 2}?")
        chats.append(chat)
        body = {"receipt": chat.receipt, "request_id": f"r-{number}", **case.report(number)}
        answer = stack.http.post("/atoll/report", json=body)
        assert answer.status_code == 200, answer.text
        job = answer.json()["job_id"]
        assert bool(job) == (number == SAMPLES - 1)
    for chat in chats:
        tensors = stack.sample(chat.receipt).tensors
        assert tensors["top_k_ids"].shape[1] == case.top_k if case.top_k else "top_k_ids" not in tensors
    stack.wait_until_served(1)

    first, head = stack.versions()
    assert (head.number, head.parent, head.job_id) == (1, 0, job)
    assert sorted(head.consumed_sample_ids) == sorted(chat.receipt for chat in chats)
    assert head.metrics["train/rows"] == SAMPLES
    assert head.model_digest != first.model_digest, "the job changed no weight"
    assert all(np.isfinite(value) for value in head.metrics.values()), head.metrics
    assert set(case.metrics) <= set(head.metrics), sorted(head.metrics)
    states = {sample.receipt: sample.state for sample in stack.samples()}
    assert {states[chat.receipt] for chat in chats} == {sample_pb2.SAMPLE_STATE_CONSUMED}
    assert stack.chat("And now?").weight_version == head.weight_version
