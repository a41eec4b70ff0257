"""Jobs of several families on the same Megatron workers, one family of another package among them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from atoll.common.errors import InvalidInput
from atoll.families.catalog import make_family
from atoll.families.rows import Batch
from atoll.families.run_settings import RunSettings
from atoll.families.steps import build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.training import train_steps
from pydantic import JsonValue

from tests.trainer.megatron_support import GRPO_OPTIONS, VOCAB, ModelKind, Pool, make_rows

KIND = ModelKind("qwen3", tied=True)
RUN = RunSettings(VOCAB, 64, has_reference=True)
HERE = "tests.trainer.brought_families"
JOBS: tuple[tuple[str, Mapping[str, JsonValue]], ...] = (
    ("grpo", dict(GRPO_OPTIONS)),
    ("sft", {"batch_size": 16}),
    (f"{HERE}:CountingFamily", {"batch_size": 16}),
    ("grpo", dict(GRPO_OPTIONS)),
)


def switched(pool: Pool, layout: ParallelLayout, model: Path) -> list[Mapping[str, float]]:
    """Metrics of a job of each family in turn, on workers that stay."""
    backend = pool.of(layout, MicroBatchLimit(rows=4))
    backend.load(model, None, model)
    found: list[Mapping[str, float]] = []
    for name, options in JOBS:
        binding = FamilyBinding(make_family(name, options).reference(), options, RUN)
        family = make_family(name, options).bind(RUN)
        backend.check_family(binding)
        batch = Batch("job-test", 1, make_rows())
        steps = build_train_steps(family, batch, family.prepare(batch, {}))
        metrics = train_steps(backend, family, binding, RateSchedule(1e-3), steps)
        found.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
    assert backend.steps_taken() == len(JOBS)
    return found


def test_workers_switch_families_and_go_back_on_two_ranks_like_on_one(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    one = switched(megatron_pool, ParallelLayout(), tiny_model(KIND))
    two = switched(megatron_pool, ParallelLayout(tensor=2), tiny_model(KIND))
    for expected, got in zip(one, two, strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert "train/nll" in one[1]
    assert "train/nll" not in one[3]
    # The weights have moved under the other families.
    assert one[3]["train/entropy"] != pytest.approx(one[0]["train/entropy"], rel=1e-4)


def test_a_family_without_its_hook_is_refused_by_the_workers_which_live_on(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    backend = megatron_pool.of(ParallelLayout(tensor=2))
    backend.load(tiny_model(KIND), None, None)
    with pytest.raises(InvalidInput, match=r"bareone: .* must have hooks for custom_loss_function, got none"):
        backend.check_family(FamilyBinding(f"{HERE}:HooklessFamily", {}, RUN))
    assert backend.healthy()
    assert backend.steps_taken() == 0
