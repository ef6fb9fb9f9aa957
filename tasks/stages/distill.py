"""Stage: on-policy distillation from a teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord, build_combined_record
from rl_core.settings import DistillationSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_folder import REWARD_RECORD
from tasks.pipeline.stage_result import RECENT_ROLLOUTS, StageResult
from tasks.stages.loading import (
    build_failure_recorder,
    build_pipeline_environment,
    load_policy,
    open_failed_episode_file,
    save_policy,
)
from tasks.stages.policy import build_validation_evaluator, compute_recent_metrics


def distill_from_teacher(
    pipeline_run: PipelineRun, model: Path | str, data: StageResult | None
) -> StageResult:
    """Run the stage.

    Args:
        model: the policy to start from. A teacher that is loaded locally becomes an input, since it affects the result.
    """
    settings = pipeline_run.settings.stages.distill
    assert settings is not None
    inputs: dict[str, Any] = {"model": model}
    if data is not None:
        inputs["data"] = data
    if settings.teacher.url is None and settings.teacher.model is not None:
        inputs["teacher"] = pipeline_run.models.resolve_model(settings.teacher.model)[0]
    return run_stage(pipeline_run, "distill", _run_distillation, inputs=inputs)


def _run_distillation(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from rl_core.api.recipes.policy_gradient import build_distillation_recipe, load_teacher

    settings: DistillationSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = build_pipeline_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    teacher = settings.teacher
    if "teacher" in context.inputs:  # a registered one has been downloaded to a folder
        teacher = dataclasses.replace(teacher, model=str(context.inputs["teacher"]))
    failed = open_failed_episode_file(context)
    evaluator = None
    if settings.eval_every:
        evaluator = build_validation_evaluator(context, settings.policy(), policy, environment)
    loaded = None
    if settings.self_teacher is None:
        distributions = settings.policy().compares_distributions
        loaded = load_teacher(teacher, policy, compares_distributions=distributions)
    recipe = build_distillation_recipe(
        policy,
        loaded,
        environment,
        settings,
        context.seed,
        evaluator=evaluator,
        record=build_combined_record(
            RewardRecord(context.folder / REWARD_RECORD),
            RecentRollouts(context.folder / RECENT_ROLLOUTS),
            failed,
        ),
        process_group=context.process_group,
    )
    recipe.trainer.set_failure_recorder(build_failure_recorder(context, failed))
    outcome = context.train(recipe)
    save_policy(context, policy, recipe.trainer.optimizer_step)
    metrics = {**compute_recent_metrics(outcome.history), **outcome.metrics}
    kl = metrics.get("policy/teacher_kl")
    kl_note = f"; KL to the teacher {kl:.3f} nats per token at the end" if kl is not None else ""
    return {
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "stop_reason": outcome.stop_reason,
        "metrics": metrics,
        "note": outcome.ended + kl_note,
    }
