"""Recipe of learned thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.api.policy import Policy
from rl_core.api.recipes import Recipe, RolloutRecorder
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import ThoughtsSettings
from rl_core.thoughts.trainer import ThoughtsTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_thoughts_recipe(
    policy: Policy,
    environment: Environment,
    settings: ThoughtsSettings,
    seed: int,
    *,
    heldout: Sequence[EpisodeRequest],
    reference: PreTrainedModel | None = None,
    record: RolloutRecorder | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[ThoughtsTrainer]:
    """Build a trainer of thoughts before answers, which learns by REINFORCE from what they contribute.

    reference: frozen model of the KL term, needed if kl_coef > 0; the policy's model = without its adapters.
    """
    trainer = ThoughtsTrainer(
        policy.model,
        policy.renderer,
        environment,
        settings,
        seed,
        policy.backend(settings.autocast),
        heldout=heldout,
        reference=reference,
        record=record,
        process_group=process_group,
    )
    return Recipe(trainer, settings.iterations, f"eval/{settings.select_by}")
