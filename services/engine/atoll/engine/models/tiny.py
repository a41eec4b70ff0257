"""A randomly initialised two-layer chat model with 0.2 million parameters, for tests and the demo."""

import inspect
import json
import pydoc
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.common import torchvision_shim
from atoll.engine.models.atomic_dir import build_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY_SIZE = 1024
CONTEXT_LENGTH = 2048

# The order gives the ids: 0 pads, 2 ends a turn.
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Architecture(StrEnum):
    """Which Hugging Face model class the checkpoint is for."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


def make_tiny(out: Path, seed: int, architecture: Architecture = Architecture.QWEN3) -> Path:
    """Write a float32 checkpoint with tokenizer and chat template to `out`; equal arguments give equal weights.

    The vocabulary of 1,024 byte-level BPE tokens is learnt from two modules of the standard library, so the tokenizer
    (not the weights) differs between Python versions.

    Raises:
        ModelDirectoryError: `out` holds something else.
    """
    recipe = json.dumps({"model": "tiny", "architecture": architecture.value, "seed": seed, "format": 1})

    def build(directory: Path) -> None:
        torchvision_shim.install()
        _tokenizer().save_pretrained(directory)
        _model(architecture, seed).save_pretrained(directory)

    build_once(out, recipe, build)
    return out


def _tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([inspect.getsource(module) for module in (pydoc, textwrap)], trainer)
    if bpe.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(f"expected {VOCABULARY_SIZE} tokens, got {bpe.get_vocab_size()}")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
    )


def _model(architecture: Architecture, seed: int) -> "PreTrainedModel":
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    config_class, model_class = {
        Architecture.LLAMA: (LlamaConfig, LlamaForCausalLM),
        Architecture.QWEN2: (Qwen2Config, Qwen2ForCausalLM),
        Architecture.QWEN3: (Qwen3Config, Qwen3ForCausalLM),
    }[architecture]
    config = config_class(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=_SPECIAL_TOKENS.index("<|endoftext|>"),
        # Ten times the usual width: next-token distributions are then far from uniform, which tests of log-probs need.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).float().eval()
