"""sao's critic beside the actor: its values, its steps against float64, every layout, its place in the checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.training import train_steps

from tests.trainer.critic_support import CriticOracle, sao_binding, sao_family, sao_rows, sao_steps
from tests.trainer.megatron_oracle import Oracle, same_gradients
from tests.trainer.megatron_support import ModelKind, Pool

TinyModel = Callable[[ModelKind], Path]

KIND = ModelKind("qwen3", tied=True)
ALONE = ParallelLayout()
GRADIENTS = ("gradients", "critic_gradients")
LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(data=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)]


def train(
    backend: MegatronBackend, binding: FamilyBinding, groups: int = 4, one_token: bool = False
) -> Mapping[str, float]:
    steps = sao_steps(sao_rows(groups, one_token), binding)
    found = train_steps(backend, sao_family(binding), binding, RateSchedule(1e-3), steps)
    return {name: value for name, value in found.items() if not name.startswith("perf/")}


def test_critic_and_actor_equal_float64(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    model, rows = tiny_model(KIND), sao_rows()
    binding = sao_binding(critic_steps_per_actor=1)
    steps = sao_steps(rows, binding)
    backend = megatron_pool.of(ALONE, MicroBatchLimit(rows=3))
    backend.load(model, None, None)
    critic, actor = CriticOracle(model), Oracle(model)
    for _ in range(3):
        computed = backend.compute_advantages(binding, steps)[0]
        old = [critic.values(row).detach() for row in rows]
        actions = [torch.as_tensor(row.columns["action_mask"].astype(np.float64)) for row in rows]
        # gamma 1, lambda 1: what is still to come of the reward, less the value.
        returns = [row.reward * of_row for row, of_row in zip(rows, actions, strict=True)]
        for item, value, wanted, of_row in zip(computed.rows, old, returns, actions, strict=True):
            assert item.values is not None and item.advantages is not None and item.returns is not None
            assert np.abs(item.values - value.numpy()).max() < 1e-5
            assert np.abs(item.returns - wanted.numpy()).max() < 1e-5
            assert np.abs(item.advantages - ((wanted - value) * of_row).numpy()).max() < 1e-5
        expected = critic.step(rows, old, returns)
        found = train(backend, binding)
        assert found["critic/loss"] == pytest.approx(expected, rel=1e-5)
        loss = torch.zeros((), dtype=torch.float64)
        for item, value, wanted in zip(steps[0].rows, old, returns, strict=True):
            now = actor.log_probs(item.row)
            recorded = torch.as_tensor(np.nan_to_num(item.row.rollout_log_probs), dtype=torch.float64)
            ratio = (now - recorded).exp().detach()
            weight = torch.where((ratio > 0.5) & (ratio < 6.0), ratio, 0.0)
            mask = torch.as_tensor(item.mask, dtype=torch.float64)
            loss = loss - (weight * (wanted - value) * now * mask).sum() * item.weights.policy
        assert found["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        norm, gradients = actor.step(loss, 1e-3)
        assert found["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        same_gradients(megatron_pool.probe_of(ALONE, "gradients"), gradients)
        same_gradients(megatron_pool.probe_of(ALONE, "critic_gradients"), critic.gradients())
        assert found["critic/learning_rate"] == 1e-2
    assert found["critic/loss"] < 0.5
    assert "critic/explained_variance" in found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_the_same_critic_and_actor(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    found = {}
    for each in (ALONE, layout):
        backend = megatron_pool.of(each, MicroBatchLimit(rows=3))
        backend.load(tiny_model(KIND), None, None)
        found[each] = [
            (train(backend, sao_binding()), [megatron_pool.probe_of(each, what) for what in GRADIENTS])
            for _ in range(2)
        ]
    for (one, expected), (other, gradients) in zip(found[ALONE], found[layout], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-7)
        for wanted, got in zip(expected, gradients, strict=True):
            same_gradients(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tensor=2, data=2), ParallelLayout(tensor=2, context=2), ParallelLayout(pipeline=2, context=2)],
    ids=str,
)
def test_four_ranks_train_the_same_critic_and_actor(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    test_every_layout_trains_the_same_critic_and_actor(layout, megatron_pool, tiny_model)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3]], ids=["DP2", "CP2"])
def test_one_sample_of_one_token_trains_where_a_rank_has_nothing(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel
) -> None:
    found = {}
    for each in (ALONE, layout):
        backend = megatron_pool.of(each)
        backend.load(tiny_model(KIND), None, None)
        found[each] = [train(backend, sao_binding(), groups=1, one_token=True) for _ in range(2)]
    for one, other in zip(found[ALONE], found[layout], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-7)
    assert found[layout][0]["critic/grad_norm"] > 0


@pytest.mark.parametrize("layout", [ALONE, *LAYOUTS], ids=str)
def test_the_critic_is_part_of_the_checkpoint_and_starts_afresh_without_one(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, binding = tiny_model(KIND), sao_binding()
    backend = megatron_pool.of(layout)
    backend.load(model, None, None)
    first = train(backend, binding)
    backend.stage(None, tmp_path / "checkpoint", b"")
    backend.stage(None, tmp_path / "again", b"")
    expected = train(backend, binding)

    backend.load(model, None, None)
    assert train(backend, binding) == first
    backend.load(model, tmp_path / "checkpoint", None)
    assert train(backend, binding) == expected
    assert contents(tmp_path / "checkpoint") == contents(tmp_path / "again")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_critic_starts_from_the_base_whatever_the_actor_is(megatron_pool: Pool, tiny_model: TinyModel) -> None:
    backend = megatron_pool.of(ALONE)
    base = tiny_model(KIND)
    losses = []
    for model, reference in [(base, None), (tiny_model(ModelKind("qwen3", tied=True, seed=1)), base)]:
        backend.load(model, None, reference)
        losses.append(train(backend, sao_binding())["critic/loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layout", [ALONE, LAYOUTS[2]], ids=["one rank", "PP2"])
def test_a_critic_only_job_leaves_the_export_as_it_was(
    layout: ParallelLayout, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    backend = megatron_pool.of(layout)
    backend.load(tiny_model(KIND), None, None)
    backend.stage(tmp_path / "before", tmp_path / "checkpoint-before", b"")
    found = train(backend, sao_binding(num_critic_only_steps=1))
    assert "train/loss" not in found
    assert found["critic/grad_norm"] > 0
    backend.stage(tmp_path / "after", tmp_path / "checkpoint-after", b"")
    assert contents(tmp_path / "before") == contents(tmp_path / "after")
    assert contents(tmp_path / "checkpoint-before") != contents(tmp_path / "checkpoint-after")
