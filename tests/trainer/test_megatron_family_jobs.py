"""sft, tttd and openclawrl through the real workers: every layout of two ranks trains like one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from atoll.families.catalog import make_family
from atoll.families.openclawrl.spec import HINT_LENGTHS, HINT_TOKENS, SAMPLER_IDS
from atoll.families.rows import Batch, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.training import train_steps
from pydantic import JsonValue

from tests.trainer.megatron_support import VOCAB, ModelKind, Pool, make_rows

TinyModel = Callable[[ModelKind], Path]

KIND = ModelKind("qwen3", tied=True)
ALONE = ParallelLayout()
LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(data=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)]
TOP_K = 4
OPTIONS: dict[str, dict[str, JsonValue]] = {
    "sft": {},
    "tttd": {"groups_per_step": 4, "rollouts_per_group": 4, "groups_per_optimizer_step": 2, "kl_coef": 0.1},
    "openclawrl": {"top_k": TOP_K, "subset": "overlap", "hint_selection": "token_optimal", "adv_diff_clip": 0.0},
}


def rows_of(name: str) -> tuple[Row, ...]:
    rows = make_rows()
    return tuple(with_hints(number, row) for number, row in enumerate(rows)) if name == "openclawrl" else rows


def with_hints(number: int, row: Row) -> Row:
    """None, one or two hinted prompts; a few ids that the engine found likely, most of them of the base's liking."""
    draw = np.random.default_rng(number)
    lengths = [(), (3,), (1, 8)][number % 3]
    columns = {
        SAMPLER_IDS: np.stack([draw.choice(VOCAB, TOP_K, replace=False) for _ in range(row.response_length)]),
        HINT_TOKENS: draw.integers(0, VOCAB, sum(lengths)),
        HINT_LENGTHS: np.asarray(lengths),
    }
    return replace(row, columns={key: value.astype(np.int32) for key, value in columns.items()})


def jobs(pool: Pool, layout: ParallelLayout, model: Path, name: str, count: int) -> list[Mapping[str, float]]:
    """Metrics of jobs in a row, from the same weights."""
    binding = FamilyBinding(name, OPTIONS[name], RunSettings(VOCAB, 64, has_reference=True))
    family = make_family(name, OPTIONS[name]).bind(binding.run)
    batch = Batch("job-test", 1, rows_of(name))
    backend = pool.of(layout, MicroBatchLimit(rows=3))
    backend.load(model, None, model)
    steps = build_train_steps(family, batch, family.prepare(batch, {}))
    found = [train_steps(backend, family, binding, RateSchedule(1e-3), steps) for _ in range(count)]
    return [{key: value for key, value in each.items() if not key.startswith("perf/")} for each in found]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_trains_a_family_like_one_rank(
    name: str, layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    one = jobs(megatron_pool, ALONE, tiny_model(KIND), name, 2)
    other = jobs(megatron_pool, layout, tiny_model(KIND), name, 2)
    for expected, got in zip(one, other, strict=True):
        # The sum of tttd's tokens cancels: its parts are up to a thousand times as large.
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert got["train/grad_norm"] > 0


def test_sft_learns_what_was_reported(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    losses = [metrics["train/nll"] for metrics in jobs(megatron_pool, ALONE, tiny_model(KIND), "sft", 4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.02


def test_the_advantages_of_tttd_know_the_base(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    first, second = jobs(megatron_pool, ALONE, tiny_model(KIND), "tttd", 2)
    # Of a job's two optimizer steps the first is that of the base itself.
    assert abs(first["train/base_kl"]) < abs(second["train/base_kl"])
