"""Every family takes the same two jobs, of one optimizer step each, on one rank and on every layout of two."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from atoll.families.catalog import BUNDLED, make_family
from atoll.families.rows import Batch, Column, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.training import train_steps
from pydantic import JsonValue

from tests.trainer.critic_support import sao_rows
from tests.trainer.megatron_support import VOCAB, ModelKind, Pool, make_rows

TinyModel = Callable[[ModelKind], Path]

LAYOUTS = {
    "TP2": ParallelLayout(tensor=2),
    "DP2": ParallelLayout(data=2),
    "PP2": ParallelLayout(pipeline=2),
    "CP2": ParallelLayout(context=2),
}
OPTIONS: Mapping[str, Mapping[str, JsonValue]] = {
    "grpo": {"groups_per_step": 4, "n_samples_per_prompt": 4, "kl_loss_coef": 0.1},
    "openclawrl": {"top_k": 5, "hint_selection": "sequence_optimal", "subset": "overlap", "kl_loss_coef": 0.1},
    "opd": {},
    "sao": {"eps_clip": 0.5, "eps_clip_high": 5.0, "critic_lr": 1e-3},
    "sdft": {"skip_response_tokens": 3},
    "sdpo": {"groups_per_step": 4, "rollouts_per_group": 4, "top_k": 7},
    "sft": {},
    "tttd": {"groups_per_step": 4, "rollouts_per_group": 4},
}


def with_columns(family: str, row: Row) -> Row:
    """The row with what the family's own shaping would have found in the sample and its report."""
    draw = np.random.default_rng(len(row.tokens))
    columns: dict[str, Column] = {}
    if family in ("opd", "sdft", "sdpo"):
        added = () if family == "opd" else draw.integers(0, VOCAB, 5)
        columns["teacher_tokens"] = np.concatenate([added, row.tokens]).astype(np.int32)
        columns["sample_weight"] = np.asarray([1.0], dtype=np.float32)
    if family == "openclawrl":
        lengths = draw.integers(1, 6, int(draw.integers(0, 3)))
        columns["engine_top_k_ids"] = np.stack(
            [draw.permutation(VOCAB)[:5] for _ in range(row.response_length)], dtype=np.int32
        )
        columns["hint_tokens"] = draw.integers(0, VOCAB, int(lengths.sum())).astype(np.int32)
        columns["hint_lengths"] = lengths.astype(np.int32)
    return replace(row, columns=columns)


def two_jobs(name: str, layout: ParallelLayout, pool: Pool, tiny_model: TinyModel) -> list[dict[str, float]]:
    model, other = (tiny_model(ModelKind("qwen3", tied=True, seed=seed)) for seed in (0, 1))
    options = {**OPTIONS[name], **({"teacher_checkpoint": str(other)} if name == "opd" else {})}
    binding = FamilyBinding(name, options, RunSettings(VOCAB, 64, has_reference=True))
    family = make_family(name, options).bind(binding.run)
    rows = sao_rows() if name == "sao" else tuple(with_columns(name, row) for row in make_rows())
    batch = Batch("job-test", 1, rows)
    steps = build_train_steps(family, batch, family.prepare(batch, {}))
    backend = pool.of(layout, MicroBatchLimit(rows=3))
    backend.load(model, None, other)
    found = [train_steps(backend, family, binding, RateSchedule(1e-3), steps) for _ in range(2)]
    return [{key: value for key, value in job.items() if not key.startswith("perf/")} for job in found]


def check(name: str, layout: ParallelLayout, pool: Pool, tiny_model: TinyModel) -> None:
    expected = two_jobs(name, ParallelLayout(), pool, tiny_model)
    found = two_jobs(name, layout, pool, tiny_model)
    assert found[0] == pytest.approx(expected[0], rel=2e-5, abs=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-5)
    assert found[0]["train/grad_norm"] > 0


def test_every_bundled_family_has_a_case() -> None:
    assert set(OPTIONS) == set(BUNDLED)


@pytest.mark.parametrize("layout", ["TP2", "CP2"])
def test_a_self_teacher_of_the_whole_vocabulary_is_the_same(
    layout: str, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    check("sdft", LAYOUTS[layout], megatron_pool, tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_family_is_the_same_on_every_layout(
    name: str, layout: str, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    check(name, LAYOUTS[layout], megatron_pool, tiny_model)
