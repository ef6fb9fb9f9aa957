"""One function per algorithm that builds its trainer from loaded parts, and the one way to run it.

The Python API (`rl_core.grpo`, `rl_core.sft`, ...) and the pipeline's stages both train through these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from rl_core.api.policy import Policy
from rl_core.data.lazy_rows import LazyRows
from rl_core.data.pairs import Pair
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.inference.teacher import Teacher
from rl_core.rewards.learned import Scorer
from rl_core.rewards.orchestrator import RewardFunction, RewardOrchestrator
from rl_core.rollouts.collect import EpisodeRequest
from rl_core.settings import (
    DistillationSettings,
    LoopSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    ThoughtsSettings,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.thoughts.trainer import ThoughtsTrainer
from rl_core.tracking import Tracker
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer, ScoredPair
from rl_core.trainers.sft import SFTTrainer
from rl_core.training import loop
from rl_core.training.callbacks import Callback
from rl_core.training.loop import LoopMemory, LoopOutcome
from rl_core.training.trainer_protocol import Trainer
from rl_core.types import Rollout

__all__ = ["Recipe", "distillation", "policy_gradient", "preference", "reward_model", "sft", "thoughts"]

T = TypeVar("T", bound=Trainer)
Record = Callable[[int, Sequence[Rollout]], None]


@dataclass(frozen=True)
class Recipe(Generic[T]):
    """A trainer, how long it trains, and by which evaluation metric its best weights are chosen."""

    trainer: T
    iterations: int
    best_metric: str | None = None  # None = the last weights are kept
    larger_is_better: bool = True

    def run(
        self,
        settings: LoopSettings,
        *,
        tracker: Tracker | None = None,
        checkpoints: Path | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        allow_drift: bool | Collection[str] = False,
        stop_event: threading.Event | None = None,
        history: Path | None = None,
        callbacks: Sequence[Callback] = (),
        memory: LoopMemory | None = None,
    ) -> LoopOutcome:
        """Train to the end, or resume from the folder `checkpoints`. Arguments and errors: `training.loop.run_loop`."""
        return loop.run_loop(
            self.trainer,
            settings,
            iterations=self.iterations,
            tracker=tracker,
            checkpoints=CheckpointStore(checkpoints, keep=settings.keep_checkpoints) if checkpoints else None,
            best_metric=self.best_metric,
            larger_is_better=self.larger_is_better,
            fingerprint=fingerprint,
            allow_drift=allow_drift,
            stop_event=stop_event,
            history=history,
            callbacks=callbacks,
            memory=memory,
        )


def sft(
    policy: Policy, train: Sequence[Any], heldout: Sequence[Any], settings: SFTSettings, seed: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[SFTTrainer]:  # fmt: skip
    """Supervised fine-tuning on rows of (token ids, loss mask), as `ChatRenderer.conversation` gives them."""
    trainer = SFTTrainer(policy.model, policy.renderer.pad_id, train, heldout, settings, seed, process_group)
    best = "eval/loss" if settings.patience is not None else None
    return Recipe(trainer, trainer.total_steps, best, larger_is_better=False)


def reward_model(
    model: PreTrainedModel, pad_id: int, train: Sequence[Pair], heldout: Sequence[Pair], settings: RewardModelSettings,
    seed: int, process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[RewardModelTrainer]:  # fmt: skip
    """A Bradley-Terry reward model (`models.heads`) on preference pairs."""
    trainer = RewardModelTrainer(model, pad_id, _scored(train), _scored(heldout), settings, seed, process_group)
    return Recipe(trainer, trainer.total_steps, "eval/accuracy" if settings.patience is not None else None)


def _scored(pairs: Sequence[Pair]) -> LazyRows[ScoredPair]:
    def made(place: int) -> ScoredPair:
        pair = pairs[place]
        return ScoredPair(pair.chosen_ids, pair.rejected_ids, pair.margin)

    return LazyRows(len(pairs), made)


def preference(
    policy: Policy, train: Sequence[Pair], heldout: Sequence[Pair], settings: PreferenceSettings, seed: int,
    references: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[PreferenceTrainer]:  # fmt: skip
    """The loss that the settings name, on preference pairs (kto: `data.pairs.mismatched_pairs`).

    `references`: as in `PreferenceTrainer`.
    """
    trainer = PreferenceTrainer(
        policy.model, policy.renderer.pad_id, train, heldout, settings, seed, references, process_group
    )
    best = "eval/loss" if settings.patience is not None else None
    return Recipe(trainer, trainer.total_steps, best, larger_is_better=False)


def policy_gradient(
    policy: Policy,
    reference: PreTrainedModel | None,
    environment: Environment,
    settings: PolicySettings,
    seed: int,
    *,
    scorer: Scorer | None = None,
    functions: Mapping[str, RewardFunction] | None = None,
    evaluator: Callable[[], Mapping[str, float]] | None = None,
    best_metric: str = "eval/success_rate",
    record: Record | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    teacher: Teacher | None = None,
) -> Recipe[PolicyGradientTrainer]:
    """GRPO and its kin, PPO or REINFORCE, as `settings.algorithm` says.

    Args:
        reference: frozen model of the KL term; needed where kl_coef > 0.
        scorer: reward model of the component `learned`. functions: reward components by name.
        evaluator, record: as in `PolicyGradientTrainer`.
        best_metric: of the evaluator; chooses the best weights where `settings.patience` is given.
        teacher: see `distillation`.
    """
    rewards = RewardOrchestrator(
        settings.rewards, scorer=scorer, options=settings.reward_options, seed=seed, functions=functions
    )
    rewards.check_columns(environment.columns)
    trainer = PolicyGradientTrainer(
        policy.model,
        reference,
        policy.renderer,
        environment,
        settings,
        seed,
        rewards,
        policy.backend(),
        evaluator=evaluator,
        record=record,
        process_group=process_group,
        teacher=teacher,
    )
    return Recipe(trainer, settings.iterations, best_metric if settings.patience is not None else None)


def distillation(
    policy: Policy,
    teacher: Teacher,
    environment: Environment,
    settings: DistillationSettings,
    seed: int,
    *,
    evaluator: Callable[[], Mapping[str, float]] | None = None,
    record: Record | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[PolicyGradientTrainer]:
    """On-policy distillation: the policy-gradient trainer with the teacher's advantages; others as there."""
    return policy_gradient(
        policy, None, environment, settings.policy(), seed,
        evaluator=evaluator, record=record, process_group=process_group, teacher=teacher,
    )  # fmt: skip


def thoughts(
    policy: Policy, environment: Environment, settings: ThoughtsSettings, seed: int, *,
    heldout: Sequence[EpisodeRequest], record: Record | None = None, process_group: ProcessGroup = SINGLE_PROCESS,
) -> Recipe[ThoughtsTrainer]:  # fmt: skip
    """Thoughts before answers, learned by REINFORCE from what they add."""
    trainer = ThoughtsTrainer(
        policy.model, policy.renderer, environment, settings, seed, policy.backend(),
        heldout=heldout, record=record, process_group=process_group,
    )  # fmt: skip
    return Recipe(trainer, settings.iterations, f"eval/{settings.select_by}")
