"""Lifecycle hooks: kept weights, their forward-only passes, moving averages, and other models, on every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.rows import Batch, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import RowWeights, TrainStep, build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout

from tests.trainer.megatron_oracle import Oracle
from tests.trainer.megatron_support import VOCAB, ModelKind, Pool, grpo_binding, grpo_steps, make_rows
from tests.trainer.taught.spec import FIRST, OTHER, SLOW, TaughtFamily, TaughtOptions

TinyModel = Callable[[ModelKind], Path]
Weights = dict[str, npt.NDArray[np.float32]]

LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(data=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)]
KIND = ModelKind("qwen3", tied=True)


def binding_of(**options: float | str) -> FamilyBinding:
    return FamilyBinding("tests.trainer.taught.spec:TaughtFamily", options, RunSettings(VOCAB, 64))


def step_of(rows: tuple[Row, ...]) -> TrainStep:
    family = TaughtFamily(TaughtOptions())
    batch = Batch("job-test", 1, rows)
    return build_train_steps(family, batch, family.prepare(batch, {}))[0]


def mean_of(step: TrainStep, oracle: Oracle) -> float:
    """The metric's mean of an oracle's log-probs."""
    return sum(
        float((oracle.log_probs(item.row).detach().numpy() * item.mask).sum()) * item.weights.metric
        for item in step.rows
    )


def kept(pool: Pool, layout: ParallelLayout, name: str) -> Weights:
    group = pool.groups[layout]
    found: Weights = group.call("kept", [(name,)] * group.size, 60.0)[0]  # type: ignore[assignment]
    return found


def test_hooks_see_first_slow_and_other_weights_as_they_are(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    alone = ParallelLayout()
    backend = megatron_pool.of(alone, MicroBatchLimit(rows=3))
    model, other = tiny_model(KIND), tiny_model(ModelKind("qwen3", tied=True, seed=1))
    backend.load(model, None, None)
    start = megatron_pool.probe_of(alone, "weights")
    step = step_of(make_rows())
    binding = binding_of(rate=0.25, other_model=str(other))
    slow = {name: weight.astype(np.float32) for name, weight in start.items()}
    students = []

    for _ in range(3):
        metrics = backend.train(binding, [step], [1e-2]).metrics[0]
        assert metrics[FIRST] == pytest.approx(mean_of(step, Oracle(model)), rel=1e-5)
        assert metrics[OTHER] == pytest.approx(mean_of(step, Oracle(other)), rel=1e-5)
        now = megatron_pool.probe_of(alone, "weights")
        slow = {name: weight + np.float32(0.25) * (now[name] - weight) for name, weight in slow.items()}
        students.append((metrics["student"], metrics[SLOW]))

    assert students[0][0] == pytest.approx(students[0][1], rel=1e-5)
    assert abs(students[2][0] - students[0][0]) > abs(students[2][1] - students[0][1]) > 1e-3
    assert all(np.array_equal(start[name], weight) for name, weight in kept(megatron_pool, alone, "first").items())
    for name, weight in kept(megatron_pool, alone, "slow").items():
        assert np.abs(weight - slow[name]).max() < 1e-6, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_hooks_the_same(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    step = step_of(make_rows(groups=2))
    found = {}
    for each in (ParallelLayout(), layout):
        backend = megatron_pool.of(each, MicroBatchLimit(rows=3))
        backend.load(tiny_model(KIND), None, None)
        found[each] = backend.train(binding_of(), [step, step], [1e-2, 1e-2]).metrics
    for one, other in zip(found[ParallelLayout()], found[layout], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    expected = kept(megatron_pool, ParallelLayout(), "slow")
    for name, weight in kept(megatron_pool, layout, "slow").items():
        assert np.abs(weight - expected[name]).max() < 1e-5, name


@pytest.mark.parametrize("layout", [ParallelLayout(), *LAYOUTS], ids=str)
def test_kept_weights_are_part_of_the_checkpoint_and_of_nothing_else(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, step = tiny_model(KIND), step_of(make_rows(groups=1))
    backend = megatron_pool.of(layout)
    backend.load(model, None, None)
    backend.train(binding_of(), [step], [1e-2])
    backend.stage(None, tmp_path / "checkpoint", b"")
    before = {name: kept(megatron_pool, layout, name) for name in ("first", "slow")}
    expected = backend.train(binding_of(), [step], [1e-2]).metrics

    backend.load(model, None, None)  # forgets them
    fresh = backend.train(binding_of(), [step], [1e-2]).metrics[0]
    assert fresh[SLOW] == pytest.approx(fresh[FIRST], rel=1e-6)
    backend.load(model, tmp_path / "checkpoint", None)

    for name, weights in before.items():
        again = kept(megatron_pool, layout, name)
        assert all(np.array_equal(weights[key], again[key]) for key in weights)
    assert backend.train(binding_of(), [step], [1e-2]).metrics == expected


def not_finite() -> TrainStep:
    weights = RowWeights(float("nan"), 0.0, 0.0)
    return TrainStep(tuple(replace(item, weights=weights) for item in step_of(make_rows(groups=1)).rows))


def test_a_family_starts_from_the_weights_of_its_first_job_that_trained(
    megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    alone = ParallelLayout()
    backend = megatron_pool.of(alone)
    backend.load(tiny_model(KIND), None, None)
    with pytest.raises(InvalidInput, match="not finite"):
        backend.train(binding_of(), [not_finite()], [1e-2])
    grpo = grpo_binding(groups_per_step=1)
    backend.train(grpo, grpo_steps(make_rows(groups=1), grpo), [1e-2])
    start = megatron_pool.probe_of(alone, "weights")
    backend.train(binding_of(), [step_of(make_rows(groups=1))], [1e-2])
    first = kept(megatron_pool, alone, "first")
    assert all(np.array_equal(start[name], first[name]) for name in start)


def test_a_step_that_is_refused_moves_no_average(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    alone = ParallelLayout()
    backend = megatron_pool.of(alone)
    backend.load(tiny_model(KIND), None, None)
    step = step_of(make_rows(groups=1))
    backend.train(binding_of(), [step], [1e-2])
    before = kept(megatron_pool, alone, "slow")
    with pytest.raises(InvalidInput, match="not finite"):
        backend.train(binding_of(), [not_finite()], [1e-2])
    after = kept(megatron_pool, alone, "slow")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_teacher_of_another_architecture_is_refused_and_the_workers_live_on(
    megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    backend = megatron_pool.of(ParallelLayout(tensor=2))
    backend.load(tiny_model(KIND), None, None)
    step = step_of(make_rows(groups=1))
    with pytest.raises(InvalidInput, match=r"config\.json: expected the actor's"):
        backend.train(binding_of(other_model=str(tiny_model(ModelKind("llama")))), [step], [1e-2])
    assert backend.healthy()
    assert backend.train(binding_of(), [step], [1e-2]).metrics[0]["grad_norm"] > 0
