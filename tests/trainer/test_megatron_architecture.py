"""Every model this backend does not compute exactly is refused by the name of the field that makes it so."""

import json
from pathlib import Path

import pytest
from atoll.trainer.megatron.architecture import (
    Llama3Rope,
    UnsupportedModel,
    check_divisible,
    read_architecture,
)
from pydantic import JsonValue

SMOL: dict[str, JsonValue] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}


def write(directory: Path, **changes: JsonValue) -> Path:
    (directory / "config.json").write_text(json.dumps({**SMOL, **changes}))
    return directory


def test_a_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path))
    assert (found.head_dim, found.kv_heads, found.rope_theta, found.norm_eps) == (64, 3, 100000.0, 1e-5)
    assert found.tied
    assert not found.qkv_bias
    assert not found.qk_norm
    assert found.rope_scaling is None


def test_rope_scaling_of_llama_3_is_read_in_both_spellings(tmp_path: Path) -> None:
    scaling: dict[str, JsonValue] = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read_architecture(write(tmp_path, rope_scaling=scaling, rope_theta=500000.0))
    new = read_architecture(write(tmp_path, rope_parameters={**scaling, "rope_theta": 500000.0}, rope_theta=None))
    assert old == new
    assert old.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", ["Qwen3MoeForCausalLM"]),
        ("architectures", []),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("use_sliding_window", True),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_what_is_not_computed_exactly_is_refused_by_name(field: str, value: JsonValue, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=field) as refused:
        read_architecture(write(tmp_path, **{field: value}))
    assert refused.value.field == field
    assert "expected" in refused.value.message


def test_the_refusal_of_a_mixture_of_experts_names_what_it_is_and_what_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"Qwen3ForCausalLM, got \['Qwen3MoeForCausalLM'\]; train another model"):
        read_architecture(write(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_experts=8))


def test_other_rope_types_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_type.*yarn"):
        read_architecture(write(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}))


def test_heads_that_do_not_divide_over_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    architecture = read_architecture(write(tmp_path))
    check_divisible(architecture, 3)
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads: expected a multiple of .* 2, got 9"):
        check_divisible(architecture, 2)


def test_layers_that_do_not_divide_over_pipeline_stages_are_refused(tmp_path: Path) -> None:
    architecture = read_architecture(write(tmp_path, num_hidden_layers=3))
    check_divisible(architecture, 3, 3)
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers: expected a multiple of the pipeline-.* 2, got 3"):
        check_divisible(architecture, 3, 2)
