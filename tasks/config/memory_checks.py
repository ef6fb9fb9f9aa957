"""Memory that settings ask for at least, estimated before anything is allocated, against what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.machine_memory import machine_memory
from rl_core.settings import ModelSettings
from rl_core.settings.presets import PRESETS
from tasks import stage_registry
from tasks.config.problems import Key, Problem
from tasks.config.settings import PipelineSettings

__all__ = ["machine_memory", "memory_problems", "weight_bytes"]

GIB = 2**30
# Of a rollout in Python's lists: a reference and an object for its id and log-probability, a reference for its mask.
TOKEN_BYTES = 8 + 28 + 8 + 24 + 8
EPISODE_BYTES = 4096  # of an episode with its trajectory, before its first token
WEIGHT_VERSIONS = 4  # in the object store of rollout workers: that of the start, and three on their way
TRAINED_WEIGHT_BYTES = 16  # float32 weight, gradient and the two moments of Adam


def memory_problems(settings: PipelineSettings) -> Iterator[Problem]:
    """Settings whose rollouts of one iteration, or whose model from a preset, cannot fit into this machine."""
    memory = machine_memory()
    for key, count, words, sampling in _rollouts(settings):
        tokens = sampling.max_completion_tokens
        need = count * (EPISODE_BYTES + tokens * TOKEN_BYTES)
        if need > memory:
            yield Problem(
                key,
                f"{words} of up to {tokens:,} tokens take up to {_gib(need)}, and this machine has {_gib(memory)}; "
                "lower this, or sampling.max_completion_tokens",
            )
    if settings.model.path is None:
        yield from _preset(settings, memory)


def _rollouts(settings: PipelineSettings) -> Iterator[tuple[Key, int, str, Any]]:
    """(key, rollouts held at once, their words, sampling) of every stage that keeps rollouts in memory."""
    stages = settings.stages
    for name in stage_registry.policy_stages():
        block: Any = getattr(stages, name, None)
        if hasattr(block, "prompts_per_iteration"):
            count = block.prompts_per_iteration * block.group_size
            words = f"{block.prompts_per_iteration:,} x {block.group_size:,} rollouts of one iteration"
            yield ("stages", name, "group_size"), count, words, block.sampling
    if stages.evaluate is not None:
        count = stages.evaluate.episodes * stages.evaluate.samples
        words = f"{stages.evaluate.episodes:,} x {stages.evaluate.samples:,} rollouts of one model"
        yield ("stages", "evaluate", "episodes"), count, words, stages.evaluate.sampling


def _preset(settings: PipelineSettings, memory: int) -> Iterator[Problem]:
    model, shape = settings.model, PRESETS[settings.model.preset]
    embeddings = model.vocab_size * shape["hidden_size"] * TRAINED_WEIGHT_BYTES
    if embeddings > memory:
        yield Problem(
            ("model", "vocab_size"),
            f"embeddings of {model.vocab_size:,} tokens x {shape['hidden_size']} take {_gib(embeddings)} with "
            f"gradients and optimizer state, and this machine has {_gib(memory)}; lower this (the demo has 512)",
        )
    heads = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    slots = max((block.sampling.slots for block in _sampled(settings)), default=0)
    cache = slots * model.context * shape["num_hidden_layers"] * 2 * heads * 4
    if cache > memory:
        yield Problem(
            ("model", "context"),
            f"keys and values of {slots:,} slots x {model.context:,} tokens take {_gib(cache)}, and this machine has "
            f"{_gib(memory)}; lower this, or sampling.slots",
        )


def _sampled(settings: PipelineSettings) -> Iterator[Any]:
    for name in settings.stages.active:
        block = getattr(settings.stages, name)
        if hasattr(block, "sampling"):
            yield block


def weight_bytes(model: ModelSettings) -> int:
    """Bytes of the model's weights and of the versions of them that are on their way to workers at a time, at least.

    Of a folder its files, of a preset its shape; 0 where the model is still to be downloaded.
    """
    if model.path is not None:
        return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
    shape = PRESETS[model.preset]
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    of_values = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * width * width + 2 * width * of_values + 3 * width * inner
    return 4 * WEIGHT_VERSIONS * (model.vocab_size * width + layers * layer)


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
