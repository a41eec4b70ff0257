"""What `stage` writes and `load` takes back."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from atoll.trainer.megatron.architecture import read_architecture
from atoll.trainer.megatron.settings import MicroBatchLimit

from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows

TinyModel = Callable[[ModelKind], Path]
BINDING = grpo_binding(use_rollout_log_probs=True, eps_clip=0.9, eps_clip_high=100.0)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "kind", [ModelKind("llama", tied=True), ModelKind("qwen2"), ModelKind("qwen3")], ids=lambda kind: kind.family
)
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1)])
def test_an_export_holds_exactly_the_weights_that_were_loaded(
    kind: ModelKind, tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    import transformers

    source = tiny_model(kind)
    (source / "tokenizer.json").write_text('{"a": 1}')
    backend = megatron_pool.backend(tensor, data)
    backend.load(source, None, None)
    backend.stage(tmp_path / "export", None, b"")
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(after) is type(before)
    assert read_architecture(source).parameters == sum(p.numel() for p in before.parameters())
    assert after.dtype == torch.float32
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name]), name
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"


def test_weights_stored_in_half_precision_are_trained_and_exported_in_float32(
    megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    import transformers

    half = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(ModelKind("qwen2")), dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    backend = megatron_pool.backend(1, 1)
    backend.load(tmp_path / "half", None, None)
    backend.stage(tmp_path / "export", None, b"")
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert after.dtype == torch.float32
    for name, weight in half.state_dict().items():
        assert torch.equal(weight.float(), after.state_dict()[name]), name


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (1, 2)])
def test_after_save_and_load_the_next_steps_are_bit_equal(
    tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(ModelKind("qwen3", tied=True))
    backend = megatron_pool.backend(tensor, data, MicroBatchLimit(rows=3))
    backend.load(source, None, None)
    steps = grpo_steps(make_rows(), BINDING)
    for _ in range(2):
        backend.train(BINDING, steps, [1e-2])
    backend.stage(None, tmp_path / "checkpoint", b"state of the driver")
    expected = [backend.train(BINDING, steps, [1e-2]).metrics for _ in range(2)]
    weights = megatron_pool.probe(tensor, data, "weights")

    backend.load(source, None, None)  # forget everything first
    loaded = backend.load(source, tmp_path / "checkpoint", None)

    assert loaded.steps_taken == 2
    assert loaded.driver_state == b"state of the driver"
    assert [backend.train(BINDING, steps, [1e-2]).metrics for _ in range(2)] == expected
    again = megatron_pool.probe(tensor, data, "weights")
    assert all(np.array_equal(weights[name], again[name]) for name in weights)


def test_weights_of_a_later_model_join_the_moments_of_an_earlier_checkpoint(
    megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(ModelKind("qwen3", tied=True))
    steps = grpo_steps(make_rows(), BINDING)
    backend = megatron_pool.backend(1, 1)
    backend.load(source, None, None)
    backend.train(BINDING, steps, [1e-2])
    backend.stage(None, tmp_path / "checkpoint", b"driver")
    backend.train(BINDING, steps, [1e-2])
    backend.stage(tmp_path / "later", None, b"")
    weights = megatron_pool.probe(1, 1, "weights")

    loaded = backend.load(tmp_path / "later", tmp_path / "checkpoint", None, weights_from_model=True)
    assert (loaded.steps_taken, loaded.driver_state) == (1, b"driver")
    found = megatron_pool.probe(1, 1, "weights")
    assert all(np.array_equal(weights[name], found[name]) for name in weights)
    backend.train(BINDING, steps, [1e-2])
    mixed = megatron_pool.probe(1, 1, "weights")
    backend.load(tmp_path / "later", None, None)
    backend.train(BINDING, steps, [1e-2])
    fresh = megatron_pool.probe(1, 1, "weights")
    assert any(not np.array_equal(mixed[name], fresh[name]) for name in mixed), "the moments took part in the step"


def test_a_checkpoint_loads_under_other_layouts(megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model(ModelKind("qwen3"))
    steps = grpo_steps(make_rows(), BINDING)
    backend = megatron_pool.backend(2, 1)
    backend.load(source, None, None)
    backend.train(BINDING, steps, [1e-2])
    backend.stage(None, tmp_path / "checkpoint", b"")
    expected = backend.train(BINDING, steps, [1e-2]).metrics[0]
    for layout in [(1, 1), (1, 2)]:
        other = megatron_pool.backend(*layout)
        other.load(source, tmp_path / "checkpoint", None)
        found = other.train(BINDING, steps, [1e-2]).metrics[0]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_checkpoint_before_the_first_step_loads(megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model(ModelKind("qwen3"))
    steps = grpo_steps(make_rows(), BINDING)
    backend = megatron_pool.backend(1, 1)
    backend.load(source, None, None)
    backend.stage(None, tmp_path / "checkpoint", b"")
    expected = backend.train(BINDING, steps, [1e-2]).metrics
    assert backend.load(source, tmp_path / "checkpoint", None).steps_taken == 0
    assert backend.train(BINDING, steps, [1e-2]).metrics == expected


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (1, 2)])
def test_equal_states_are_staged_as_equal_bytes(
    tensor: int, data: int, megatron_pool: Pool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(ModelKind("qwen3"))
    backend = megatron_pool.backend(tensor, data)
    backend.load(source, None, None)
    backend.train(BINDING, grpo_steps(make_rows(), BINDING), [1e-2])
    backend.stage(tmp_path / "m1", tmp_path / "c1", b"s")
    backend.stage(tmp_path / "m2", tmp_path / "c2", b"s")
    backend.load(source, tmp_path / "c1", None)
    backend.stage(tmp_path / "m3", tmp_path / "c3", b"s")
    for kind in "mc":
        first = contents(tmp_path / f"{kind}1")
        assert len(first) > 1
        for again in (contents(tmp_path / f"{kind}2"), contents(tmp_path / f"{kind}3")):
            assert [name for name in first if first[name] != again.get(name)] == []
            assert first.keys() == again.keys()
