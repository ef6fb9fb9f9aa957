"""Stage: learn thoughts before answers by REINFORCE, and test that they are genuine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.environments.environment import Environment
from rl_core.errors import CheckFailed
from rl_core.rewards.rollout_log import RecentRollouts, build_combined_record
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests, draw_validation_requests
from rl_core.settings import EvaluationSettings, ThoughtsSettings
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.thoughts.verdict import ThoughtVerdict
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_key import compute_stage_seed
from tasks.pipeline.stage_result import RECENT_ROLLOUTS, StageResult
from tasks.stages.kl_reference import load_kl_reference
from tasks.stages.loading import (
    build_failure_recorder,
    build_pipeline_environment,
    load_policy,
    open_failed_episode_file,
    save_policy,
)

if TYPE_CHECKING:
    from rl_core.api.policy import Policy
    from rl_core.thoughts.trainer import ThoughtsTrainer

logger = logging.getLogger(__name__)


def learn_thoughts(
    pipeline_run: PipelineRun, model: Path | str, data: StageResult | None
) -> StageResult:
    """Run the stage.

    Args:
        model: the policy that learns to think.
    """
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(pipeline_run, "thoughts", _run_thought_training, inputs=inputs)


def _run_thought_training(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from rl_core.api.recipes.thoughts import build_thoughts_recipe

    settings: ThoughtsSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = build_pipeline_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    episodes = EvaluationSettings(episodes=settings.validation_episodes, levels=settings.levels)
    validation = draw_heldout_requests(environment, episodes, context.seed)
    examined = _select_check_episodes(context, environment, validation)
    failed = open_failed_episode_file(context)
    recipe = build_thoughts_recipe(
        policy,
        environment,
        settings,
        context.seed,
        reference=load_kl_reference(context, policy) if settings.kl_coef > 0 else None,
        heldout=validation,
        record=build_combined_record(RecentRollouts(context.folder / RECENT_ROLLOUTS), failed),
        process_group=context.process_group,
    )
    trainer = recipe.trainer
    trainer.set_failure_recorder(build_failure_recorder(context, failed))
    outcome = context.train(recipe)
    save_policy(context, policy, trainer.optimizer_step)
    verdict = _examine_thoughts(context, trainer, policy, examined)
    context.tracker.log_metrics(verdict.collect_metrics(), outcome.steps + 1)
    if context.process_group.is_rank_zero:
        write_json_atomic(context.folder / "thoughts.json", verdict.to_json())
        context.tracker.log_artifact(context.folder / "thoughts.json")
    logger.info("thoughts: %s", verdict.describe())
    if settings.require_genuine and not verdict.genuine:
        raise CheckFailed(
            f"stages.thoughts: on {verdict.episodes} held-out episodes, {verdict.describe()}. Train longer or with "
            "more entropy, or keep the model anyway with require_genuine: false"
        )
    return {
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "best_iteration": outcome.best_iteration,
        "stop_reason": outcome.stop_reason,
        "genuine": verdict.genuine,
        "thoughts": verdict.to_json(),
        "metrics": {**outcome.metrics, **verdict.collect_metrics()},
        "note": f"{outcome.ended}, best {outcome.best_iteration}; {verdict.describe()}",
    }


def _select_check_episodes(
    context: StageContext, environment: Environment, validation: list[EpisodeRequest]
) -> list[EpisodeRequest]:
    """Select the held-out episodes for the controls, none of which validation picks the model by.

    Each stage key has different ones: changing a setting until the test passes means other episodes each time.
    Raises: SettingsError if too few are held out.
    """
    settings: ThoughtsSettings = context.settings
    key = context.fingerprint.get("stage key", "")
    return draw_validation_requests(
        environment,
        settings.check_episodes,
        settings.levels or environment.levels,
        compute_stage_seed(context.seed, f"thoughts check {key}"),
        validation,
        setting="check_episodes",
        other="validation_episodes",
    )


def _examine_thoughts(
    context: StageContext, trainer: ThoughtsTrainer, policy: Policy, requests: list[EpisodeRequest]
) -> ThoughtVerdict:
    """Run the controls on the requested held-out episodes."""
    from rl_core.thoughts.genuineness_check import examine_thoughts

    return examine_thoughts(
        policy.model,
        trainer.reader,
        policy.renderer,
        trainer.optimizer_step,
        trainer.play_heldout_episodes(requests),
        context.settings,
        pad_id=policy.renderer.pad_id,
        seed=context.seed,
    )
