"""Training through the teacher service gives the gradients of training with the teacher's checkpoint."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from atoll.common.channels import open_channel
from atoll.families.catalog import make_family
from atoll.families.driver import JobContext
from atoll.families.rows import Batch, Column, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from atoll.trainer.preparation import score_batch
from atoll.trainer.retries import Patience
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.teacher_client import TeacherClient
from atoll.trainer.training import train_steps
from numpy.typing import NDArray
from pydantic import JsonValue

from tests.engines import VOCAB_SIZE, RunningEngine
from tests.forward import all_log_probs
from tests.teacher.teacher_world import running
from tests.trainer.megatron_support import Pool, make_rows

ALONE = ParallelLayout()
RUN = RunSettings(VOCAB_SIZE, 64, has_reference=True)
SEPARATE: dict[str, JsonValue] = {"teacher": "separate", "teacher_update_rate": 0.0, "top_k_source": "teacher"}
CASES: dict[str, tuple[str, dict[str, JsonValue]]] = {
    "opd": ("opd", {}),
    "opd, jsd with a tail": ("opd", {"divergence": "jsd", "top_k": 8, "top_k_distribution": "tail"}),
    "sdft": ("sdft", {**SEPARATE, "top_k": 8}),
    "sdpo": ("sdpo", {**SEPARATE, "top_k": 8, "groups_per_step": 4, "rollouts_per_group": 4}),
}
HINTED: dict[str, JsonValue] = {"top_k": 5, "hint_selection": "token_optimal"}


def rows() -> tuple[Row, ...]:
    """At temperature 1; the teacher reads a prefix that the student did not."""
    draw = np.random.default_rng(4)
    made = []
    for row in make_rows():
        tokens = row.tokens % VOCAB_SIZE
        tokens[-1] = VOCAB_SIZE - 1
        row = replace(row, tokens=tokens, temperature=1.0)
        columns: dict[str, Column] = {
            "teacher_tokens": np.concatenate([draw.integers(0, VOCAB_SIZE, 5), tokens]).astype(np.int32),
            "sample_weight": np.asarray([1.0], dtype=np.float32),
        }
        made.append(replace(row, columns=columns))
    return tuple(made)


def scored(engine: RunningEngine, batch: Batch, name: str, options: dict[str, JsonValue]) -> Batch:
    """As the driver does: before anything is trained, through the service."""
    family = make_family(name, options).bind(RUN)

    async def ask() -> Batch:
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(running(engine.base_url, watch_s=30))
            address = f"127.0.0.1:{world.teacher.server.port}"
            teacher = TeacherClient(await stack.enter_async_context(open_channel(address)), Patience(0.1, 1.0))
            context = JobContext("1:0", datetime.now(UTC), teacher)
            return await asyncio.to_thread(score_batch, batch, family, context)

    return asyncio.run(ask())


def gradients(
    pool: Pool, model: Path, batch: Batch, name: str, options: dict[str, JsonValue]
) -> tuple[dict[str, float], dict[str, NDArray[np.float32]]]:
    binding = FamilyBinding(name, options, RUN)
    family = make_family(name, options).bind(RUN)
    steps = build_train_steps(family, batch, family.prepare(batch, {}))
    backend = pool.of(ALONE, MicroBatchLimit(rows=5))
    backend.load(model, None, None)
    metrics = train_steps(backend, family, binding, RateSchedule(1e-3), steps)
    return dict(metrics), pool.probe_of(ALONE, "gradients")


def hinted_rows(model: Path) -> tuple[Row, ...]:
    """With none, one or two hinted prompts; of the engine's ids three are likely ones and two are not."""
    made = []
    for number, row in enumerate(rows()):
        draw = np.random.default_rng(number)
        lengths = draw.integers(1, 6, number % 3).astype(np.int32)
        prompt = row.tokens[: row.prompt_length].tolist()
        likely = np.argsort(-all_log_probs(model, prompt, row.response_tokens, 1.0), axis=1)[:, :3]
        others = np.argsort(draw.random((row.response_length, VOCAB_SIZE)), axis=1)[:, :8]
        chosen = zip(likely, others, strict=True)
        ids = np.stack([[*best, *[v for v in more if v not in best][:2]] for best, more in chosen]).astype(np.int32)
        hints = draw.integers(0, VOCAB_SIZE, int(lengths.sum())).astype(np.int32)
        made.append(replace(row, columns={"engine_top_k_ids": ids, "hint_tokens": hints, "hint_lengths": lengths}))
    return tuple(made)


def check(wanted: dict[str, NDArray[np.float32]], got: dict[str, NDArray[np.float32]]) -> None:
    assert set(got) == set(wanted)
    worst = max(np.abs(got[key] - wanted[key]).max() / np.abs(wanted[key]).max() for key in wanted)
    print(f"gradients differ by {worst:.2g}")
    assert worst < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["teacher", "overlap"])
def test_openclawrl_gets_the_gradients_of_its_frozen_base_from_a_service_of_the_same_weights(
    subset: str, megatron_pool: Pool, teacher_engine: RunningEngine
) -> None:
    base, batch = teacher_engine.model_path, Batch("job-test", 1, hinted_rows(teacher_engine.model_path))
    options: dict[str, JsonValue] = {**HINTED, "subset": subset}
    metrics, wanted = gradients(megatron_pool, base, batch, "openclawrl", options)
    assert metrics["train/opd_subset_size"] > 0.5
    served: dict[str, JsonValue] = {**options, "teacher": "service"}
    through = scored(teacher_engine, batch, "openclawrl", served)
    _, got = gradients(megatron_pool, base, through, "openclawrl", served)
    check(wanted, got)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_family_gets_the_gradients_of_the_checkpoint_teacher_from_the_service(
    case: str, megatron_pool: Pool, tiny_models: Path, teacher_engine: RunningEngine
) -> None:
    name, options = CASES[case]
    batch = Batch("job-test", 1, rows())
    checkpoint = {**options, "teacher_checkpoint": str(tiny_models / "teacher")}
    wanted_metrics, wanted = gradients(megatron_pool, tiny_models / "student", batch, name, checkpoint)
    through = scored(teacher_engine, batch, name, options)
    metrics, got = gradients(megatron_pool, tiny_models / "student", through, name, options)
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/divergence"] == pytest.approx(wanted_metrics["train/divergence"], rel=1e-4)
    check(wanted, got)
