"""Recipe of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.api.recipes import Recipe
from rl_core.data.pairs import PreferencePair
from rl_core.data.row_sequences import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.settings import RewardModelSettings
from rl_core.trainers.reward_model import (
    RewardModelTrainer,
    RewardRegressionTrainer,
    ScoredPair,
    ScoredRow,
    SteppedRow,
    StepRewardTrainer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_reward_model_recipe(
    model: PreTrainedModel,
    pad_id: int,
    train: Sequence[PreferencePair],
    heldout: Sequence[PreferencePair],
    settings: RewardModelSettings,
    seed: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[RewardModelTrainer | RewardRegressionTrainer | StepRewardTrainer]:
    """Build the trainer of a reward model (`models.heads`): Bradley-Terry on pairs, regression, or labels of steps."""
    trainer: RewardModelTrainer | RewardRegressionTrainer | StepRewardTrainer
    if settings.loss == "process":
        trainer = StepRewardTrainer(
            model,
            pad_id,
            _build_stepped_rows(train),
            _build_stepped_rows(heldout),
            settings,
            seed,
            process_group,
        )
        return Recipe(trainer, trainer.total_steps, trainer.best_metric, larger_is_better=False)
    if settings.loss == "mse":
        trainer = RewardRegressionTrainer(
            model,
            pad_id,
            _build_scored_rows(train),
            _build_scored_rows(heldout),
            settings,
            seed,
            process_group,
        )
    else:
        trainer = RewardModelTrainer(
            model,
            pad_id,
            _build_scored_pairs(train),
            _build_scored_pairs(heldout),
            settings,
            seed,
            process_group,
        )
    return Recipe(trainer, trainer.total_steps, trainer.best_metric)


def _build_scored_pairs(pairs: Sequence[PreferencePair]) -> LazyRows[ScoredPair]:
    def build_pair(index: int) -> ScoredPair:
        pair = pairs[index]
        return ScoredPair(pair.chosen_ids, pair.rejected_ids, pair.margin, pair.tie)

    return LazyRows(len(pairs), build_pair)


def _build_stepped_rows(pairs: Sequence[PreferencePair]) -> LazyRows[SteppedRow]:
    def build_row(index: int) -> SteppedRow:
        pair = pairs[index]
        if not pair.steps:
            raise DataError(
                f"row {index}: has no labels of steps, which a reward model with `loss: process` learns from"
            )
        # Where several steps end at one token, it has the label of the last of them.
        return SteppedRow(pair.chosen_ids, list(dict(pair.steps).items()))

    return LazyRows(len(pairs), build_row)


def _build_scored_rows(pairs: Sequence[PreferencePair]) -> LazyRows[ScoredRow]:
    def build_row(index: int) -> ScoredRow:
        pair = pairs[index]
        if pair.score is None:
            raise DataError(
                f"row {index}: has no score, which a reward model with `loss: mse` learns from"
            )
        return ScoredRow(pair.chosen_ids, pair.score)

    return LazyRows(len(pairs), build_row)
