"""Builds this rank's part of a dense decoder on megatron-core."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from atoll.families.policy_spec import CriticSpec
from atoll.trainer.megatron.architecture import Architecture
from atoll.trainer.megatron.modules import PackedCoreAttention, RMSNorm, ValueHead
from atoll.trainer.megatron.rope import inverse_frequencies
from atoll.trainer.megatron.settings import MegatronSettings
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


def padded_vocabulary(architecture: Architecture, settings: MegatronSettings) -> int:
    """Columns of the embedding over all tensor-parallel ranks; those from ``vocab_size`` on are padding."""
    multiple = settings.vocabulary_multiple * settings.layout.tensor
    return -(-architecture.vocab_size // multiple) * multiple


def build_model(
    architecture: Architecture, settings: MegatronSettings, device: torch.device, critic: CriticSpec | None = None
) -> GPTModel:
    """This rank's shard, float32, with arbitrary weights; with ``critic``, a value head in place of the output layer.

    The process groups must exist; see `check_divisible`.
    """
    config = TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_qkv_bias=architecture.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=settings.layout.tensor,
        pipeline_model_parallel_size=settings.layout.pipeline,
        context_parallel_size=settings.layout.context,
        # Micro-batches are as long as their rows, and stages must tell each other.
        variable_seq_lengths=settings.layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # unused, and the default is refused with variable lengths
        # Losses arrive divided by whole-step facts: micro-batches and ranks add up, nothing averages.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        # The weights come from a file, but only this marks parameters as split over ranks: without the marks a split
        # parameter counts once, not once a rank, in the gradient norm. Zeros are the cheapest start.
        perform_initialization=True,
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            [layer] * get_num_layers_to_build(config), layer_norm=RMSNorm
        ),
        vocab_size=padded_vocabulary(architecture, settings),
        max_sequence_length=1,  # unused with rotary positions
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied and critic is None,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(architecture)
    if critic is not None and model.post_process:
        model.output_layer = ValueHead(architecture.hidden_size, zero_init=critic.value_head_zero_init)
    return model.to(device)
