"""One step of 16 rows is the same step on every layout: loss, gradients, log-probs, exports and checkpoints.

Packed is a micro-batch of 4 rows; padded is what CP 2 does to each row, up to a multiple of 4 tokens, and a micro-batch
of 1 is neither. The oracle reads row by row.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from atoll.trainer.backend import StepRefused
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout

from tests.trainer.megatron_oracle import Oracle, relative_error
from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows, with_advantage

TinyModel = Callable[[ModelKind], Path]

TP2, DP2 = ParallelLayout(tensor=2), ParallelLayout(data=2)
PP2, CP2 = ParallelLayout(pipeline=2), ParallelLayout(context=2)
FOUR_RANKS = [
    ParallelLayout(tensor=2, data=2),
    ParallelLayout(tensor=2, context=2),
    ParallelLayout(pipeline=2, context=2),
    ParallelLayout(tensor=2, pipeline=2),
]
BINDING = grpo_binding(use_rollout_log_probs=True, eps_clip=0.9, eps_clip_high=100.0)


def check_invariant(layout: ParallelLayout, rows_at_once: int, kind: ModelKind, pool: Pool, model: Path) -> None:
    backend = pool.of(layout, MicroBatchLimit(rows=rows_at_once))
    backend.load(model, None, None)
    binding = grpo_binding()
    rows = make_rows()
    steps = grpo_steps(rows, binding)
    oracle = Oracle(model)
    for row, log_probs in zip(rows, backend.log_probs(rows), strict=True):
        assert np.abs(log_probs - oracle.log_probs(row).detach().numpy()).max() < 1e-4
    expected_loss = oracle.grpo_loss(steps[0])
    expected_norm, expected_gradients = oracle.step(expected_loss, 1e-3)

    (metrics,) = backend.train(binding, steps, [1e-3]).metrics

    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-5, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
    assert metrics["trained_tokens"] == sum(int(item.mask.sum()) for item in steps[0].rows)
    gradients = pool.probe_of(layout, "gradients")
    assert max(relative_error(gradients[name], wanted) for name, wanted in expected_gradients.items()) < 1e-5
    weights = pool.probe_of(layout, "weights")
    assert max(relative_error(weights[name], wanted) for name, wanted in oracle.weights().items()) < 1e-5


@pytest.mark.parametrize("rows_at_once", [1, 4])
@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP2", "CP2"])
def test_one_step_equals_autograd_in_float64(
    layout: ParallelLayout, rows_at_once: int, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    kind = ModelKind("qwen3", tied=True)
    check_invariant(layout, rows_at_once, kind, megatron_pool, tiny_model(kind))


def test_one_step_of_an_untied_model_on_two_stages_equals_autograd(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    kind = ModelKind("qwen2")
    check_invariant(PP2, 4, kind, megatron_pool, tiny_model(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ModelKind("qwen3", tied=True), ModelKind("llama")], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", FOUR_RANKS, ids=str)
def test_one_step_on_four_ranks_equals_autograd_in_float64(
    layout: ParallelLayout, kind: ModelKind, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    check_invariant(layout, 4, kind, megatron_pool, tiny_model(kind))


@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP2", "CP2"])
def test_two_steps_against_old_and_reference_log_probs_equal_those_of_one_rank(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    model, reference = (tiny_model(ModelKind("llama", seed=seed)) for seed in (0, 1))
    binding = grpo_binding(groups_per_optimizer_step=2, kl_loss_coef=0.3, kl_loss_type="k3")
    steps = grpo_steps(make_rows(), binding)
    found = {}
    for each in (ParallelLayout(), layout):
        backend = megatron_pool.of(each, MicroBatchLimit(rows=3))
        backend.load(model, None, reference)
        found[each] = backend.train(binding, steps, [1e-2, 1e-3]).metrics
    for one, other in zip(found[ParallelLayout()], found[layout], strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP2", "CP2"])
def test_a_response_of_one_token_and_a_prompt_of_one_token_train(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    row = make_rows(groups=1, per_group=1)[0]
    short = replace(
        row,
        tokens=row.tokens[:2],
        prompt_length=1,
        loss_mask=np.ones(1, dtype=np.uint8),
        rollout_log_probs=row.rollout_log_probs[:1],
    )
    binding = grpo_binding(groups_per_step=1, n_samples_per_prompt=1)
    steps = (with_advantage(grpo_steps([short], binding)[0], 0, -1, 2.0),)
    found = {}
    for each in (ParallelLayout(), layout):
        backend = megatron_pool.of(each)
        backend.load(tiny_model(ModelKind("qwen3", tied=True)), None, None)
        (found[each],) = backend.train(binding, steps, [1e-3]).metrics
    assert found[layout] == pytest.approx(found[ParallelLayout()], rel=1e-5, abs=1e-7)
    assert found[layout]["grad_norm"] > 0


@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP2", "CP2"])
def test_an_advantage_that_is_not_a_number_names_the_sample_and_all_ranks_live_on(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    backend = megatron_pool.of(layout)
    backend.load(tiny_model(ModelKind("qwen3")), None, None)
    binding = grpo_binding()
    steps = grpo_steps(make_rows(), binding)
    with pytest.raises(StepRefused, match="sample sample-5;"):
        backend.train(binding, [with_advantage(steps[0], 5, -1, float("nan"))], [1e-3])
    assert backend.healthy()
    assert backend.train(binding, steps, [1e-3]).metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("kind", [ModelKind("qwen3", tied=True), ModelKind("qwen2")], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", [PP2, CP2], ids=["PP2", "CP2"])
def test_exports_and_checkpoints_move_between_layouts(
    layout: ParallelLayout, kind: ModelKind, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    import transformers

    source = tiny_model(kind)
    steps = grpo_steps(make_rows(), BINDING)
    backend = megatron_pool.of(layout)
    backend.load(source, None, None)
    backend.stage(tmp_path / "export", None, b"")
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())

    backend.train(BINDING, steps, [1e-2])
    backend.stage(None, tmp_path / "checkpoint", b"s")
    expected = backend.train(BINDING, steps, [1e-2]).metrics[0]
    assert backend.load(source, tmp_path / "checkpoint", None).steps_taken == 1
    assert backend.train(BINDING, steps, [1e-2]).metrics[0] == expected
    alone = megatron_pool.of(ParallelLayout())
    alone.load(source, tmp_path / "checkpoint", None)
    assert alone.train(BINDING, steps, [1e-2]).metrics[0] == pytest.approx(expected, rel=1e-5, abs=1e-6)
