"""Reward model from loaded parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.api.recipes import Recipe
from rl_core.data.pairs import Pair
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.settings import RewardModelSettings
from rl_core.trainers.reward_model import RewardModelTrainer, ScoredPair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["reward_model"]


def reward_model(
    model: PreTrainedModel, pad_id: int, train: Sequence[Pair], heldout: Sequence[Pair], settings: RewardModelSettings,
    seed: int, process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[RewardModelTrainer]:  # fmt: skip
    """A Bradley-Terry reward model (`models.heads`) on preference pairs."""
    rows, rows_heldout = (
        [ScoredPair(pair.chosen_ids, pair.rejected_ids, pair.margin) for pair in part] for part in (train, heldout)
    )
    trainer = RewardModelTrainer(model, pad_id, rows, rows_heldout, settings, seed, process_group)
    return Recipe(trainer, trainer.total_steps, "eval/accuracy" if settings.patience is not None else None)
