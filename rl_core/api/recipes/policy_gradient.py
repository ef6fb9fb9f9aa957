"""Policy gradients and on-policy distillation from loaded parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rl_core.api.policy import Policy
from rl_core.api.recipes import Recipe, Record
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.inference.engine import Engine
from rl_core.inference.teacher import Teacher
from rl_core.rewards.learned import Scorer
from rl_core.rewards.orchestrator import RewardFunction, RewardOrchestrator
from rl_core.settings import DistillationSettings, PolicySettings
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.rollout_workers.server_backend import ServerBackend

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
    make_environment: Callable[[], Environment] | None = None,
) -> Recipe[PolicyGradientTrainer]:
    """GRPO and its kin, PPO or REINFORCE, as `settings.algorithm` says.

    Args:
        reference: frozen model of the KL term; needed where kl_coef > 0.
        scorer: reward model of the component `learned`. functions: reward components by name.
        evaluator, record: as in `PolicyGradientTrainer`.
        best_metric: of the evaluator; chooses the best weights where `settings.patience` is given.
        teacher: see `distillation`.
        own: as in `PolicyGradientTrainer`.
        make_environment: makes the environment anew, in rollout workers; None = `environment` itself is sent to them.
    """
    rewards = RewardOrchestrator(
        settings.rewards, scorer=scorer, options=settings.reward_options, seed=seed, functions=functions
    )
    rewards.check_columns(environment.columns)
    server = _connect(policy, settings) if settings.rollouts.workers == "server" else None
    trainer = PolicyGradientTrainer(
        policy.model,
        reference,
        policy.renderer,
        environment,
        settings,
        seed,
        rewards,
        policy.backend() if server is None else server,
        evaluator=evaluator,
        record=record,
        process_group=process_group,
        teacher=teacher,
        own=own,
    )
    best = best_metric if settings.patience is not None else None
    rollouts = settings.rollouts
    if server is not None:
        server.weights.is_exact = not trainer.optimizer_step.computes_in_bfloat16
        trainer.server = server
        return Recipe(trainer, settings.iterations, best, close=server.close)
    if rollouts.independent and isinstance(trainer.backend, Engine):
        trainer.backend.keep_apart()
    if rollouts.workers == "in_process" and rollouts.replay_schedule is None:
        return Recipe(trainer, settings.iterations, best)
    close = _employ(policy, trainer, make_environment or functools.partial(_same, environment))
    return Recipe(trainer, settings.iterations, best, close=close)


def _connect(policy: Policy, settings: PolicySettings) -> ServerBackend:
    """The inference server of the settings."""
    from rl_core.rollout_workers.server_backend import ServerBackend

    return ServerBackend(
        policy.model, policy.tokenizer, settings.rollouts,
        eos_ids=policy.renderer.eos_ids, max_length=policy.context, bound=settings.numerics.bound,
    )  # fmt: skip


def _employ(
    policy: Policy, trainer: PolicyGradientTrainer, make_environment: Callable[[], Environment]
) -> Callable[[], None]:
    """Give a trainer its workers, which are started by its first rollouts; returns what ends them."""
    from rl_core.rollout_workers.ray_cluster import RayCluster
    from rl_core.rollout_workers.schedule_replay import ScheduleReplay
    from rl_core.rollout_workers.stream import RolloutStream
    from rl_core.rollout_workers.team import RolloutTeam, TeamParts

    settings = trainer.settings.rollouts
    parts = TeamParts(
        policy.model, trainer.backend, policy.renderer, make_environment, list(policy.renderer.eos_ids),
        policy.renderer.pad_id, is_exact=not trainer.optimizer_step.computes_in_bfloat16,
    )  # fmt: skip
    if settings.replay_schedule is not None:
        trainer.stream = ScheduleReplay(settings.replay_schedule, parts, settings.max_staleness)
        return trainer.stream.close
    if settings.max_staleness:
        trainer.stream = RolloutStream(settings, RayCluster(settings), parts)
        return trainer.stream.close
    trainer.team = RolloutTeam(settings, RayCluster(settings), parts)
    return trainer.team.close


def _same(environment: Environment) -> Environment:
    """An environment that was sent as it is."""
    return environment


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
