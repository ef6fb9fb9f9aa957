"""Small models of every family the engine knows, and sequences that play from a script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.settings import SamplingSettings

VOCAB = 64
ROOM = 24  # tokens after the prompt, where sequences are short
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=128,
    initializer_range=0.3,  # sharp distributions, so that a wrong key or position changes tokens immediately
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)


def make_model(family: str, **options: object) -> PreTrainedModel:
    """Make a model with random weights, its biases and norms too, so that none of them can be forgotten."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**{**SHAPE, **options}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.3)
                elif "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


MODELS = {
    "llama": ("llama", {}),
    "llama tied, with biases": (
        "llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama, wide heads": ("llama", dict(head_dim=16)),
    "llama, wide heads and biases": (
        "llama",
        dict(head_dim=32, attention_bias=True, mlp_bias=True),
    ),
    "llama, wider heads": (
        "llama",
        dict(head_dim=64, num_attention_heads=4, num_key_value_heads=1),
    ),
    "llama, scaled rope": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
}


def model_named(name: str) -> PreTrainedModel:
    """Make one of MODELS: every family and peculiarity that the engine claims to support."""
    family, options = MODELS[name]
    return make_model(family, **options)


class ScriptedSequence:
    """A sequence that answers its first actions with prepared observations, where they fit, and records everything."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        observations: Sequence[Sequence[int]] = (),
        room: int = 10**9,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.seed = seed
        self.turns: list[tuple[list[int], bool]] = []
        self.completion_ids: list[int] = []
        self.loss_mask: list[bool] = []
        self.logprobs: list[float] = []
        self._observations = [list(observation) for observation in observations]
        self._room = room

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> list[int] | None:
        """Take an action; see `RolloutSequence`."""
        assert len(action_ids) == len(logprobs) > 0
        self.turns.append((action_ids, hit_limit))
        self._append(action_ids, logprobs, True)
        if hit_limit or not self._observations:
            return None
        observation = self._observations.pop(0)
        if len(self.completion_ids) + len(observation) >= self._room:
            return None
        self._append(observation, [0.0] * len(observation), False)
        return observation

    def _append(self, ids: list[int], logprobs: list[float], sampled: bool) -> None:
        self.completion_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [sampled] * len(ids)


def make_sessions(num_prompts: int = 4, group: int = 3) -> list[ScriptedSequence]:
    """Groups over prompts of 1 to 9 tokens, with up to three observations of 1 to 7 tokens each."""
    generator = np.random.default_rng(0)
    sequences = []
    for index in range(num_prompts):
        prompt = generator.integers(3, VOCAB, 1 + 2 * index).tolist()
        for sample in range(group):
            observations = [
                generator.integers(3, VOCAB, generator.integers(1, 8)).tolist() for _ in range(3)
            ]
            sequences.append(
                ScriptedSequence(prompt, 1000 * index + sample, observations, room=ROOM)
            )
    return sequences


def sampling(**options: float) -> SamplingSettings:
    """Return settings under which these sequences have room for several turns."""
    return SamplingSettings(**{"max_completion_tokens": ROOM, "slots": 100, **options})
