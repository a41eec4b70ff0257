"""Weights beside the actor's own: how long a reference model stays, and the room that kept ones take."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from atoll.families.catalog import make_family
from atoll.families.rows import Batch
from atoll.families.run_settings import RunSettings
from atoll.families.steps import build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import ParallelLayout
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.training import train_steps

from tests.trainer.critic_support import sao_binding, sao_family, sao_rows, sao_steps
from tests.trainer.megatron_support import VOCAB, ModelKind, Pool, grpo_binding, grpo_steps, make_rows

TinyModel = Callable[[ModelKind], Path]
ALONE = ParallelLayout()
BINDING = grpo_binding(kl_loss_coef=0.3, kl_loss_type="k3")


def kl(backend: MegatronBackend) -> float:
    return backend.train(BINDING, grpo_steps(make_rows(), BINDING), [1e-3]).metrics[0]["kl_loss"]


def test_the_reference_stays_in_memory_over_a_load_and_another_one_is_read(
    megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, first, second = (tiny_model(ModelKind("llama", seed=seed)) for seed in (0, 1, 2))
    # An artifact's directory is named by the digest of its bytes: the same name is the same model.
    reference = tmp_path / "digest-of-the-first"
    reference.symlink_to(first)
    backend = megatron_pool.of(ALONE)
    backend.load(model, None, reference)
    against_first = kl(backend)
    assert against_first > 0.1
    reference.unlink()
    reference.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        backend.load(model, None, reference)  # what cannot be read is refused, in memory or not
    reference.unlink()
    reference.symlink_to(first)
    backend.load(second, None, reference)
    assert kl(backend) != against_first
    backend.load(model, None, reference)
    assert kl(backend) == against_first
    backend.load(model, None, second)
    against_second = kl(backend)
    assert abs(against_second - against_first) > 1e-3
    backend.load(model, None, model)
    assert kl(backend) == pytest.approx(0.0, abs=1e-9)
    backend.load(model, None, second)
    assert kl(backend) == against_second


@pytest.mark.parametrize(("family", "copies"), [("grpo", 3), ("sdft", 4), ("sao", 6)])
def test_the_room_that_is_asked_for_is_that_of_a_checkpoint_with_critic_and_kept_weights(
    family: str, copies: int, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model(ModelKind("qwen3", tied=True))
    backend = megatron_pool.of(ALONE)
    backend.load(model, None, model)
    if family == "grpo":
        kl(backend)
    elif family == "sao":
        train_steps(
            backend, sao_family(sao_binding()), sao_binding(), RateSchedule(1e-3), sao_steps(sao_rows(), sao_binding())
        )
    else:
        binding = FamilyBinding("sdft", {}, RunSettings(VOCAB, 64, has_reference=True))
        taught = make_family("sdft", {}).bind(binding.run)
        from tests.trainer.test_megatron_families import with_columns

        batch = Batch("job-test", 1, tuple(with_columns("sdft", row) for row in make_rows()))
        steps = build_train_steps(taught, batch, taught.prepare(batch, {}))
        train_steps(backend, taught, binding, RateSchedule(1e-3), steps)
    group = megatron_pool.groups[ALONE]
    assert group.call("checkpoint_copies", [()], 60.0) == [copies]
    backend.stage(None, tmp_path / "checkpoint", b"")
    weights = 4 * sum(weight.size for weight in megatron_pool.probe(1, 1, "weights").values())
    stored = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    # Above 1 by the padding of the vocabulary (1,280 columns for 1,100) and by a header for each tensor.
    assert 1.0 < stored / (copies * weights) < 1.3


def test_sequence_parallelism_is_no_setting() -> None:
    names = {field.name for field in fields(ParallelLayout)} | set(TrainerSettings.model_fields)
    assert not {name for name in names if "sequence" in name}
