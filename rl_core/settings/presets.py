"""Shapes of the from-scratch models that `model.preset` names."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

# Llama shapes; parameter counts are for a vocabulary of 512 with tied embeddings.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": dict(  # 0.04M, for tests
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    ),
    "tiny": dict(  # 0.85M, learns the demo's environment in minutes on a CPU
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
    ),
    "small": dict(  # 3.0M
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=688
    ),
}
