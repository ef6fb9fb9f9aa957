"""Tiny models of the families that GGUF files hold, with a tokenizer that they are written with."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.data.tokenizer import train_tokenizer

TEXTS = ["Two and two are 4, 12 and  345 are 357.", "A line\n\n  and another: it's here!"]
SHAPE = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaForCausalLM, LlamaConfig, {"rope_theta": 50_000.0}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}


def build_model(family="llama", **changed):
    model_class, config_class, options = FAMILIES[family]
    tokenizer = train_tokenizer(TEXTS * 20, 400)
    config = config_class(
        **{**SHAPE, **options, **changed},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = model_class(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, where a wrong order does not show
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval(), tokenizer
