"""Recipe of preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.api.policy import Policy
from rl_core.api.recipes import Recipe
from rl_core.data.pairs import PreferencePair
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.settings import PreferenceSettings
from rl_core.trainers.preference import PreferenceTrainer


def build_preference_recipe(
    policy: Policy,
    train: Sequence[PreferencePair],
    heldout: Sequence[PreferencePair],
    settings: PreferenceSettings,
    seed: int,
    references: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[PreferenceTrainer]:
    """Build a trainer of the loss that the settings name, on preference pairs (kto:
    `data.pairs.build_mismatched_pairs`).

    `references`: as in `PreferenceTrainer`.
    """
    trainer = PreferenceTrainer(
        policy.model,
        policy.renderer.pad_id,
        train,
        heldout,
        settings,
        seed,
        references,
        process_group,
    )
    best_metric = "eval/loss" if settings.patience is not None else None
    return Recipe(trainer, trainer.total_steps, best_metric, larger_is_better=False)
