"""Stage: thoughts before answers, learned by REINFORCE, and the test that they are genuine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.environments.environment import Environment
from rl_core.errors import CheckFailed
from rl_core.rewards.rollout_log import RecentRollouts, record_all
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_requests import heldout_requests, validation_requests
from rl_core.settings import EvaluationSettings, ThoughtsSettings
from rl_core.storage.single_files import write_json_atomic
from rl_core.thoughts.verdict import ThoughtVerdict
from tasks.pipeline.key import stage_seed
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import RECENT_ROLLOUTS, StageContext, StageResult, run_stage
from tasks.stages.failed_episodes import keeper, kept_episodes
from tasks.stages.kl_reference import kl_reference
from tasks.stages.loading import load_policy, make_environment, save_policy

if TYPE_CHECKING:
    from rl_core.api.policy import Policy
    from rl_core.thoughts.trainer import ThoughtsTrainer

__all__ = ["learn_thoughts"]

logger = logging.getLogger(__name__)


def learn_thoughts(pipeline_run: PipelineRun, model: Path | str, data: StageResult | None) -> StageResult:
    """Run the stage. `model`: the policy that learns to think."""
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(pipeline_run, "thoughts", _body, settings=pipeline_run.settings.stages.thoughts, inputs=inputs)


def _body(context: StageContext) -> dict[str, Any]:
    from rl_core.api.recipes.thoughts import thoughts  # here: they load torch, not needed if cached

    settings: ThoughtsSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = make_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    episodes = EvaluationSettings(episodes=settings.validation_episodes, levels=settings.levels)
    validation = heldout_requests(environment, episodes, context.seed)
    examined = _check_requests(context, environment, validation)
    failed = kept_episodes(context)
    recipe = thoughts(
        policy,
        environment,
        settings,
        context.seed,
        reference=kl_reference(context, policy) if settings.kl_coef > 0 else None,
        heldout=validation,
        record=record_all(RecentRollouts(context.folder / RECENT_ROLLOUTS), failed),
        process_group=context.process_group,
    )
    trainer = recipe.trainer
    trainer.keep_failures(keeper(context, failed))
    outcome = context.train(recipe)
    save_policy(context, policy, trainer.optimizer_step)
    verdict = _examine(context, trainer, policy, examined)
    context.tracker.log_metrics(verdict.metrics(), outcome.steps + 1)
    if context.process_group.is_rank_zero:
        write_json_atomic(context.folder / "thoughts.json", verdict.to_json())
        context.tracker.log_artifact(context.folder / "thoughts.json")
    logger.info("thoughts: %s", verdict.note())
    if settings.require_genuine and not verdict.genuine:
        raise CheckFailed(
            f"stages.thoughts: on {verdict.episodes} held-out episodes, {verdict.note()}. Train longer or with more "
            "entropy, or keep the model all the same with require_genuine: false"
        )
    return {
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "best_iteration": outcome.best_iteration,
        "stop_reason": outcome.stop_reason,
        "genuine": verdict.genuine,
        "thoughts": verdict.to_json(),
        "metrics": {**outcome.metrics, **verdict.metrics()},
        "note": f"{outcome.ended}, best {outcome.best_iteration}; {verdict.note()}",
    }


def _check_requests(
    context: StageContext, environment: Environment, validation: list[EpisodeRequest]
) -> list[EpisodeRequest]:
    """Held-out episodes for the controls, none of those that validation picks the model by.

    Each stage key has its own: whoever changes a setting until the test passes is tested on other episodes each time.
    Raises: SettingsError where too few are held out.
    """
    settings: ThoughtsSettings = context.settings
    key = context.fingerprint.get("stage key", "")
    return validation_requests(
        environment, settings.check_episodes, settings.levels or environment.levels,
        stage_seed(context.seed, f"thoughts check {key}"), validation,
        setting="check_episodes", other="validation_episodes",
    )  # fmt: skip


def _examine(
    context: StageContext, trainer: ThoughtsTrainer, policy: Policy, requests: list[EpisodeRequest]
) -> ThoughtVerdict:
    """Controls on the requested held-out episodes."""
    from rl_core.thoughts.training_check import examine

    return examine(
        policy.model, trainer.reader, policy.renderer, trainer.optimizer_step, trainer.heldout_episodes(requests),
        context.settings, pad_id=policy.renderer.pad_id, seed=context.seed,
    )  # fmt: skip
