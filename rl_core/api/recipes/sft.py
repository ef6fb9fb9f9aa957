"""Recipe of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.api.policy import Policy
from rl_core.api.recipes import Recipe
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.settings import SFTSettings
from rl_core.trainers.sft import SFTTrainer


def build_sft_recipe(
    policy: Policy,
    train: Sequence[Any],
    heldout: Sequence[Any],
    settings: SFTSettings,
    seed: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[SFTTrainer]:
    """Build supervised fine-tuning on rows of (token ids, loss mask), as `ChatRenderer.conversation` returns them."""
    trainer = SFTTrainer(
        policy.model, policy.renderer.pad_id, train, heldout, settings, seed, process_group
    )
    best_metric = "eval/loss" if settings.patience is not None else None
    return Recipe(trainer, trainer.total_steps, best_metric, larger_is_better=False)
