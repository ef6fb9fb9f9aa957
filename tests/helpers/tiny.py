"""The smallest models that trainers learn with, and what a run of a trainer leaves to compare."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rl_core.storage.manifest import digest_bytes

VOCABULARY, PAD = 11, 0


def nano(seed=0, dropout=0.0, model_class=LlamaForCausalLM, **options) -> PreTrainedModel:
    """Make a Llama of two layers, its weights drawn from `seed` alone."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=32,
        attention_dropout=dropout,
        pad_token_id=PAD,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config)


def weights_digest(model):
    """Return SHA-256 over the bits of every weight and buffer."""
    return digest_bytes(
        b"".join(
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for tensor in model.state_dict().values()
        )
    )


def logged_bits(tracker):
    """{(step, name): bits} of what a MemoryTracker holds, without what measures time."""
    return {
        (step, name): value.hex()
        for step, row in tracker.metrics
        for name, value in row.items()
        if not name.startswith("perf/")
    }
