"""Stage: on-policy distillation from a teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord, record_all
from rl_core.settings import DistillationSettings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import RECENT_ROLLOUTS, REWARD_RECORD, StageContext, StageResult, run_stage
from tasks.stages.failed_episodes import keeper, kept_episodes
from tasks.stages.loading import load_policy, make_environment, save_policy
from tasks.stages.policy import evaluator, recent_metrics

__all__ = ["distill"]


def distill(pipeline_run: PipelineRun, model: Path | str, data: StageResult | None) -> StageResult:
    """Run the stage. `model`: where the policy starts; a teacher that is loaded here is an input, as it decides."""
    settings = pipeline_run.settings.stages.distill
    assert settings is not None
    inputs: dict[str, Any] = {"model": model}
    if data is not None:
        inputs["data"] = data
    if settings.teacher.url is None and settings.teacher.model is not None:
        inputs["teacher"] = pipeline_run.models.resolve(settings.teacher.model)[0]
    return run_stage(pipeline_run, "distill", _body, settings=settings, inputs=inputs)


def _body(context: StageContext) -> dict[str, Any]:
    from rl_core.api.recipes.policy_gradient import distillation  # here: they load torch, not needed if cached
    from rl_core.api.teacher_source import make_teacher

    settings: DistillationSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = make_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    teacher = settings.teacher
    if "teacher" in context.inputs:  # a registered one is a folder by now
        teacher = dataclasses.replace(teacher, model=str(context.inputs["teacher"]))
    failed = kept_episodes(context)
    recipe = distillation(
        policy,
        make_teacher(teacher, policy),
        environment,
        settings,
        context.seed,
        evaluator=evaluator(context, settings.policy(), policy, environment) if settings.eval_every else None,
        record=record_all(
            RewardRecord(context.folder / REWARD_RECORD), RecentRollouts(context.folder / RECENT_ROLLOUTS), failed
        ),
        process_group=context.process_group,
    )
    recipe.trainer.keep_failures(keeper(context, failed))
    outcome = context.train(recipe)
    save_policy(context, policy, recipe.trainer.optimizer_step)
    metrics = {**recent_metrics(outcome.history), **outcome.metrics}
    kl = metrics.get("policy/teacher_kl")
    return {
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "stop_reason": outcome.stop_reason,
        "metrics": metrics,
        "note": outcome.ended + (f"; KL to the teacher {kl:.3f} nats per token at last" if kl is not None else ""),
    }
