"""The Megatron backend against transformers, on every layout this issue trains."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from atoll.trainer.backend import BackendCrashed, StepRefused
from atoll.trainer.megatron.architecture import UnsupportedModel
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import MegatronSettings, MicroBatchLimit, ParallelLayout
from atoll.trainer.workers.group import WorkerGroup, WorkerPlan

from tests.trainer.megatron_oracle import Oracle, relative_error
from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows, with_advantage

TinyModel = Callable[[ModelKind], Path]

KINDS = [
    ModelKind("llama", tied=True, rope="llama3"),
    ModelKind("llama", rope="linear"),
    ModelKind("qwen2", tied=True),
    ModelKind("qwen2"),
    ModelKind("qwen3", tied=True),
    ModelKind("qwen3"),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1)])
def test_log_probs_equal_transformers(
    kind: ModelKind, tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    backend = megatron_pool.backend(tensor, data)
    backend.load(tiny_model(kind), None, None)
    rows = make_rows()
    oracle = Oracle(tiny_model(kind))
    for row, found in zip(rows, backend.log_probs(rows), strict=True):
        assert found.dtype == np.float32
        assert np.abs(found - oracle.log_probs(row).detach().numpy()).max() < 1e-4


@pytest.mark.parametrize(
    ("tensor", "data", "rows_at_once"), [(1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 4), (1, 2, 1), (1, 2, 4), (1, 2, 256)]
)
def test_one_step_equals_autograd_in_float64(
    tensor: int, data: int, rows_at_once: int, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    model = tiny_model(ModelKind("qwen3", tied=True))
    backend = megatron_pool.backend(tensor, data, MicroBatchLimit(rows=rows_at_once))
    backend.load(model, None, None)
    binding = grpo_binding()
    steps = grpo_steps(make_rows(), binding)
    oracle = Oracle(model)
    expected_loss = oracle.grpo_loss(steps[0])
    expected_norm, expected_gradients = oracle.step(expected_loss, 1e-3)

    (metrics,) = backend.train(binding, steps, [1e-3]).metrics

    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-5, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
    gradients = megatron_pool.probe(tensor, data, "gradients")
    assert max(relative_error(gradients[name], wanted) for name, wanted in expected_gradients.items()) < 1e-5
    weights = megatron_pool.probe(tensor, data, "weights")
    assert max(relative_error(weights[name], wanted) for name, wanted in oracle.weights().items()) < 1e-5


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (1, 2)])
def test_two_steps_against_old_and_reference_log_probs_equal_autograd(
    tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    model, reference = (tiny_model(ModelKind("llama", seed=seed)) for seed in (0, 1))
    backend = megatron_pool.backend(tensor, data, MicroBatchLimit(rows=3))
    backend.load(model, None, reference)
    binding = grpo_binding(groups_per_optimizer_step=2, kl_loss_coef=0.3, kl_loss_type="k3")
    steps = grpo_steps(make_rows(), binding)
    oracle, old, ref = Oracle(model), Oracle(model), Oracle(reference)

    report = backend.train(binding, steps, [1e-2, 1e-3])

    assert len(report.metrics) == 2
    for step, rate, metrics in zip(steps, [1e-2, 1e-3], report.metrics, strict=True):
        loss = oracle.grpo_loss(step, old, ref, kl_coef=0.3)
        norm, gradients = oracle.step(loss, rate)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = megatron_pool.probe(tensor, data, "gradients")
    assert max(relative_error(found[name], wanted) for name, wanted in gradients.items()) < 1e-3
    assert {"old_log_probs", "reference_log_probs"} <= set(report.seconds)


def test_a_rank_without_rows_keeps_in_step(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    model = tiny_model(ModelKind("qwen3", tied=True))
    binding = grpo_binding(groups_per_step=1, n_samples_per_prompt=1, kl_loss_coef=0.1)
    steps = grpo_steps(make_rows(groups=1, per_group=1), binding)
    steps = (with_advantage(steps[0], 0, -1, 2.0),)
    found = {}
    for data in (1, 2):
        backend = megatron_pool.backend(1, data)
        backend.load(model, None, tiny_model(ModelKind("qwen3", tied=True, seed=1)))
        found[data] = backend.train(binding, steps, [1e-3]).metrics[0]
        assert len(backend.log_probs([steps[0].rows[0].row])) == 1
    assert found[1] == pytest.approx(found[2], rel=1e-6)
    assert found[1]["grad_norm"] > 0


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (1, 2)])
def test_an_advantage_that_is_not_a_number_names_the_sample_and_all_ranks_live_on(
    tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    backend = megatron_pool.backend(tensor, data)
    model = tiny_model(ModelKind("qwen3"))
    backend.load(model, None, None)
    before = megatron_pool.probe(tensor, data, "weights")
    binding = grpo_binding()
    steps = grpo_steps(make_rows(), binding)
    with pytest.raises(StepRefused, match="sample sample-5;") as refused:
        backend.train(binding, [with_advantage(steps[0], 5, -1, float("nan"))], [1e-3])
    assert refused.value.sample_ids == ("sample-5",)
    assert refused.value.steps_taken == 0
    assert backend.healthy()
    after = megatron_pool.probe(tensor, data, "weights")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert backend.train(binding, steps, [1e-3]).metrics[0]["grad_norm"] > 0


def test_an_advantage_that_is_not_a_number_under_the_mask_changes_nothing(
    megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    backend = megatron_pool.backend(1, 1)
    binding = grpo_binding()
    steps = grpo_steps(make_rows(), binding)
    index = next(i for i, item in enumerate(steps[0].rows) if item.mask[0] == 0)
    weights = []
    for step in (steps[0], with_advantage(steps[0], index, 0, float("nan"))):
        backend.load(tiny_model(ModelKind("qwen2")), None, None)
        backend.train(binding, [step], [1e-3])
        weights.append(megatron_pool.probe(1, 1, "weights"))
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_loss_goes_down(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    backend = megatron_pool.backend(2, 1)
    backend.load(tiny_model(ModelKind("qwen3")), None, None)
    binding = grpo_binding(use_rollout_log_probs=True, eps_clip=0.9, eps_clip_high=100.0)
    rows = make_rows()
    before = backend.log_probs(rows)
    steps = grpo_steps(rows, binding)
    losses = [backend.train(binding, steps, [1e-2]).metrics[0]["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    gain = [
        float(((after - first) * item.mask).sum() * item.advantages[0])
        for after, first, item in zip(backend.log_probs(rows), before, steps[0].rows, strict=True)
        if item.advantages is not None
    ]
    assert np.mean(gain) > 0


def test_a_reference_model_of_another_architecture_is_refused(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    with pytest.raises(UnsupportedModel, match="reference model"):
        megatron_pool.backend(1, 1).load(tiny_model(ModelKind("qwen3")), None, tiny_model(ModelKind("llama")))


def test_workers_that_cannot_be_started_are_a_crash_with_its_reason(tmp_path: Path, tiny_model: TinyModel) -> None:
    def launch(plan: WorkerPlan) -> WorkerGroup:
        raise ConnectionError("no Ray at 10.0.0.1:6379")

    backend = MegatronBackend(MegatronSettings(ParallelLayout()), launch, tmp_path)
    with pytest.raises(BackendCrashed, match=r"was not started: .*no Ray at 10\.0\.0\.1:6379"):
        backend.load(tiny_model(ModelKind("llama")), None, None)
    assert not backend.healthy()
