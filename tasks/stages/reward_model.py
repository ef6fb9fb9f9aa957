"""Stage: reward model on preference pairs, from a file or made of scored rollouts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.statistics import wilson_interval
from rl_core.data.chat import ChatRenderer
from rl_core.settings import RewardModelSettings
from tasks.config import PipelineSettings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.stages.preference_pairs import StagePairs

__all__ = ["reward_model"]

logger = logging.getLogger(__name__)


def reward_model(pipeline_run: PipelineRun, model: Path | str, data: StageResult | None) -> StageResult:
    """Run the stage. `model`: the policy whose trunk it starts from, and whose rollouts make the pairs."""
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(
        pipeline_run, "reward_model", _body, settings=pipeline_run.settings.stages.reward_model, inputs=inputs
    )


def _body(context: StageContext) -> dict[str, Any]:
    from rl_core.api.recipes.reward_model import (
        reward_model as reward_model_recipe,  # here: they load torch, not needed if cached
    )
    from rl_core.models import heads
    from tasks.stages.preference_pairs import stage_pairs

    settings: RewardModelSettings = context.settings
    pairs = context.process_group.on_rank_zero(lambda: stage_pairs(context))
    shape = heads.HeadShape(settings.head_layers, settings.head_width)
    start = context.inputs["model"]
    model, tokenizer = heads.reward_model_from(start, context.pipeline.model, seed=context.seed, shape=shape)
    pad_id = ChatRenderer(tokenizer).pad_id
    recipe = reward_model_recipe(
        model, pad_id, pairs.train, pairs.heldout, settings, context.seed, context.process_group
    )

    def load(pipeline: PipelineSettings) -> PreTrainedModel:
        return heads.reward_model_from(start, pipeline.model, seed=context.seed, shape=shape)[0]

    outcome = context.train(recipe, context.kept_epochs(recipe.trainer, model, tokenizer, load))
    context.save_model(recipe.trainer.optimizer_step, model, tokenizer, load)
    summarise = _regression_summary if settings.loss == "mse" else _summary
    summary = summarise(context, pairs, outcome.metrics, outcome.steps)
    return {**summary, "note": summary["note"] + recipe.trainer.bound_note(outcome.steps)}


def _summary(context: StageContext, pairs: StagePairs, metrics: dict[str, float], steps: int) -> dict[str, Any]:
    from rl_core.trainers.reward_model import longer_answer_baseline

    accuracy = metrics["eval/accuracy"]
    ordered = [pair for pair in pairs.heldout if not pair.tie]
    low, high = wilson_interval(round(accuracy * len(ordered)), len(ordered))
    longer = pairs.longer_baseline
    if longer is None:
        longer = longer_answer_baseline([(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in ordered])
    extra = {"eval/accuracy_low": low, "eval/accuracy_high": high, "eval/longer_answer_accuracy": longer}
    context.tracker.log_metrics(extra, steps + 1)
    return {
        "steps": steps,
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "longer_answer_accuracy": longer,
        "train_pairs": len(pairs.train),
        "heldout_pairs": len(pairs.heldout),
        "metrics": {**metrics, **extra},
        "note": f"ranks {accuracy:.1%} of {len(ordered)} held-out pairs rightly "
        f"[{low:.1%}, {high:.1%}]; 'the longer one wins' gets {longer:.1%}; {pairs.note}",
    }


def _regression_summary(
    context: StageContext, pairs: StagePairs, metrics: dict[str, float], steps: int
) -> dict[str, Any]:
    """Numbers for people of a regression on scores."""
    accuracy, error = metrics["eval/accuracy"], metrics["eval/absolute_error"]
    return {
        "steps": steps,
        "accuracy": accuracy,
        "absolute_error": error,
        "explained_variance": metrics["eval/explained_variance"],
        "train_rows": len(pairs.train),
        "heldout_rows": len(pairs.heldout),
        "metrics": metrics,
        "note": f"orders {accuracy:.1%} of the pairs among {len(pairs.heldout)} held-out answers as their scores do; "
        f"explains {metrics['eval/explained_variance']:.0%} of their variance; {pairs.note}",
    }
