"""Tiny models of the families of causal language models that transformers has, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OLD_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"state_size": 4, "conv_kernel": 2, "expand": 2, "time_step_rank": 4}

# families without experts: what their configuration needs beyond the common shape
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": _LINEAR_ATTENTION,
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": _OLD_SHAPE,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gptj": {**_OLD_SHAPE, "rotary_dim": 4},
    "gpt_neox": {},
    "gpt_bigcode": _OLD_SHAPE,
    "bloom": {"n_head": 4},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "glm": {},
    "glm4": {},
    "nemotron": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "smollm3": {},
    "apertus": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "helium": {},
    "persimmon": {},
    "nanochat": {},
}
# families whose experts are stacked in parameters
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_LOCAL_EXPERTS, "layer_types": ["full_attention", "full_attention"]},
    "mixtral": _LOCAL_EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": {**_LINEAR_ATTENTION, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoehybrid": {
        **_LOCAL_EXPERTS,
        "layer_types": ["attention", "attention"],
        "shared_intermediate_size": 24,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT | {"head_dim": None},
    "glm4_moe": _LATENT | {"num_key_value_heads": 2},
    "llama4_text": {**_LOCAL_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "phimoe": _LOCAL_EXPERTS,
    "jetmoe": {**_LOCAL_EXPERTS, "kv_channels": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
}


def create_family_model(family: str) -> PreTrainedModel:
    """Create a tiny model of a family, its weights drawn from seed 0."""
    options = {**_SHAPE, **(DENSE | EXPERTS)[family]}
    options = {name: value for name, value in options.items() if value is not None}
    config = AutoConfig.for_model(family, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()
