"""Which Hugging Face models the Megatron backend trains, read from ``config.json``; others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedModel(InvalidInput):
    """Raised when a model asks for something this backend does not compute exactly, or a layout cannot hold it."""

    def __init__(
        self, where: object, field: str, expected: str, got: object, instead: str = "train another model"
    ) -> None:
        super().__init__(
            f"{where}: {field}: expected {expected}, got {got!r}; {instead}",
            field=field,
            reason=errors_pb2.REASON_BASE_MODEL_UNUSABLE,
        )


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 (transformers' ``rope_type: llama3``).

    Example: ``Llama3Rope(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)``
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class Architecture:
    """A dense decoder, in the terms both libraries share.

    Example: ``Architecture("Qwen3ForCausalLM", 1100, 64, 128, 2, 4, 2, 32, 1e-6, 1e6, None, False, False, True)``
    """

    name: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | float | None
    """A plain number is linear scaling by that factor."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool

    @property
    def parameters(self) -> int:
        """How many numbers the model has; a tied output layer counts once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (queries + keys) + self.qkv_bias * (queries + 2 * keys)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + norms + 3 * self.hidden_size * self.ffn_size
        return self.layers * layer + self.hidden_size + (2 - self.tied) * self.vocab_size * self.hidden_size


def read_architecture(model_directory: Path) -> Architecture:
    """Read ``config.json``.

    Raises:
        UnsupportedModel: naming the field, what is supported, and what was found.
        FileNotFoundError: there is no ``config.json``.
    """
    path = model_directory / "config.json"
    config = json.loads(path.read_text())
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModel(path, "architectures", f"one of {', '.join(ARCHITECTURES)}", names)
    name = str(names[0])
    _refuse_variants(path, config, name)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    # Absent means what the architecture's own configuration class in transformers defaults to.
    default_head_dim = 128 if name == "Qwen3ForCausalLM" else hidden // heads
    theta, scaling = _rope(path, config)
    return Architecture(
        name=name,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        ffn_size=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or default_head_dim),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=name == "Qwen2ForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
    )


def _refuse_variants(path: Path, config: Mapping[str, object], name: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(path, "hidden_act", "silu", config["hidden_act"])
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "rope_interleaved"):
        if config.get(field):
            raise UnsupportedModel(path, field, "false", config[field])
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(path, "quantization_config", "none (full-precision weights)", "one")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(path, "partial_rotary_factor", "1.0", config["partial_rotary_factor"])
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise UnsupportedModel(path, "layer_types", "full_attention only", sorted(set(kinds)))


def _rope(path: Path, config: Mapping[str, object]) -> tuple[float, Llama3Rope | float | None]:
    """Both spellings: transformers 5 (``rope_parameters``) and 4 (``rope_theta`` beside ``rope_scaling``)."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel(path, "rope_parameters", "an object", found)
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10_000.0)  # type: ignore[arg-type]
    kind = found.get("rope_type") or found.get("type") or "default"
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(path, "partial_rotary_factor", "1.0", found["partial_rotary_factor"])
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, float(found["factor"])
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=float(found["factor"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
            original_length=int(found["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(path, "rope_type", "default, linear or llama3", kind)


def check_divisible(architecture: Architecture, tensor: int, pipeline: int = 1) -> None:
    """Refuse a tensor-parallel size that does not divide the model's heads or feed-forward columns, and a
    pipeline-parallel size that does not divide its layers.

    Raises `UnsupportedModel`.
    """
    for name, size, kind, ranks in (
        ("num_attention_heads", architecture.heads, "tensor", tensor),
        ("num_key_value_heads", architecture.kv_heads, "tensor", tensor),
        ("intermediate_size", architecture.ffn_size, "tensor", tensor),
        ("num_hidden_layers", architecture.layers, "pipeline", pipeline),
    ):
        if size % ranks:
            expected = f"a multiple of the {kind}-parallel size {ranks}"
            raise UnsupportedModel(architecture.name, name, expected, size, "choose a size that divides it")
