"""Reward model from loaded parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.api.recipes import Recipe
from rl_core.data.lazy_rows import LazyRows
from rl_core.data.pairs import Pair
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.settings import RewardModelSettings
from rl_core.trainers.reward_model import RewardModelTrainer, ScoredPair
from rl_core.trainers.reward_regression import RewardRegressionTrainer, ScoredRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["reward_model"]


def reward_model(
    model: PreTrainedModel, pad_id: int, train: Sequence[Pair], heldout: Sequence[Pair], settings: RewardModelSettings,
    seed: int, process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[RewardModelTrainer | RewardRegressionTrainer]:  # fmt: skip
    """A reward model (`models.heads`): Bradley-Terry on preference pairs, or regression on scores."""
    trainer: RewardModelTrainer | RewardRegressionTrainer
    if settings.loss == "mse":
        rows, others = _scored_rows(train), _scored_rows(heldout)
        trainer = RewardRegressionTrainer(model, pad_id, rows, others, settings, seed, process_group)
    else:
        trainer = RewardModelTrainer(model, pad_id, _scored(train), _scored(heldout), settings, seed, process_group)
    return Recipe(trainer, trainer.total_steps, "eval/accuracy" if settings.patience is not None else None)


def _scored(pairs: Sequence[Pair]) -> LazyRows[ScoredPair]:
    def made(place: int) -> ScoredPair:
        pair = pairs[place]
        return ScoredPair(pair.chosen_ids, pair.rejected_ids, pair.margin, pair.tie)

    return LazyRows(len(pairs), made)


def _scored_rows(pairs: Sequence[Pair]) -> LazyRows[ScoredRow]:
    def made(place: int) -> ScoredRow:
        pair = pairs[place]
        if pair.score is None:
            raise DataError(f"row {place}: has no score, which a reward model with `loss: mse` learns from")
        return ScoredRow(pair.chosen_ids, pair.score)

    return LazyRows(len(pairs), made)
