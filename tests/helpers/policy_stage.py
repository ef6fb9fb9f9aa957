"""The stage `policy` by itself: a small base model, and a context for the stage's body."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.tracking import MemoryTracker
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext

PARTS = ("task", "curiosity", "coherence", "tool_use", "format", "length")


def save_base(folder: Path, preset: str = "nano") -> Path:
    """Save an untrained model for `arithmetic` into a folder."""
    texts = [
        m["content"]
        for seed in range(50)
        for m in make_environment("arithmetic").demonstration(seed, "easy").messages
    ]
    tokenizer = train_tokenizer(texts, 300)
    causal_lm.save(
        causal_lm.create_model(ModelSettings(preset=preset, context=128), tokenizer, 0),
        tokenizer,
        folder,
    )
    return folder


def context_of(base: Path, folder: Path, **options: Any) -> StageContext:
    """Make the stage's context in a folder, which may hold remains of a killed run; `options`: of its settings."""
    folder.mkdir(exist_ok=True)
    stage = {
        "iterations": 2,
        "prompts_per_iteration": 3,
        "group_size": 2,
        "checkpoint_every": 1,
        "eval_every": 0,
        "rewards": dict.fromkeys(PARTS, 0.5),
        "reward_options": {"clip": 1.0},
        "sampling": {"max_completion_tokens": 90, "max_turns": 3},
        **options,
    }
    pipeline = build_settings(
        {
            "name": "t",
            "environment": {"name": "arithmetic"},
            "model": {"device": "cpu", "path": str(base)},
            "stages": {"reward_model": {}, "policy": stage, "evaluate": {"episodes": 6}},
        }
    )
    return StageContext(
        name="policy",
        settings=pipeline.stages.policy,
        inputs={"model": base},
        pipeline=pipeline,
        seed=1,
        tracker=MemoryTracker(),
        folder=folder,
        pipeline_run=SimpleNamespace(threads=1),
        fingerprint={},
        stop=threading.Event(),
    )
