"""Policy gradients and on-policy distillation from loaded parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rl_core.api.policy import Policy
from rl_core.api.recipes import Recipe, Record
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.inference.teacher import Teacher
from rl_core.rewards.learned import Scorer
from rl_core.rewards.orchestrator import RewardFunction, RewardOrchestrator
from rl_core.settings import DistillationSettings, PolicySettings
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["distillation", "policy_gradient"]


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
    own: Mapping[str, Callable[..., Any]] | None = None,
) -> Recipe[PolicyGradientTrainer]:
    """GRPO and its kin, PPO or REINFORCE, as `settings.algorithm` says.

    Args:
        reference: frozen model of the KL term; needed where kl_coef > 0.
        scorer: reward model of the component `learned`. functions: reward components by name.
        evaluator, record: as in `PolicyGradientTrainer`.
        best_metric: of the evaluator; chooses the best weights where `settings.patience` is given.
        teacher: see `distillation`.
        own: as in `PolicyGradientTrainer`.
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
        own=own,
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
