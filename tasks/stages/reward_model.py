"""Stage: train a reward model on preference pairs from a file or from scored rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.statistics import wilson_interval
from rl_core.data.chat import ChatRenderer
from rl_core.settings import RewardModelSettings
from tasks.config import PipelineSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.stages.preference_pairs import StagePairs


def train_reward_model(
    pipeline_run: PipelineRun, model: Path | str, data: StageResult | None
) -> StageResult:
    """Run the stage.

    Args:
        model: the policy whose trunk it starts from, and whose rollouts give the pairs.
    """
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(pipeline_run, "reward_model", _run_reward_model_training, inputs=inputs)


def _run_reward_model_training(context: StageContext) -> dict[str, Any]:
    # Imported here: these load torch, which a cached run does not need.
    from rl_core.api.recipes.reward_model import build_reward_model_recipe
    from rl_core.models import heads
    from tasks.stages.preference_pairs import load_stage_pairs

    settings: RewardModelSettings = context.settings
    pairs = context.process_group.run_on_rank_zero(lambda: load_stage_pairs(context))
    shape = heads.HeadShape(settings.head_layers, settings.head_width)
    source = context.inputs["model"]
    model, tokenizer = heads.create_reward_model(
        source, context.pipeline.model, seed=context.seed, shape=shape
    )
    pad_id = ChatRenderer(tokenizer).pad_id
    recipe = build_reward_model_recipe(
        model, pad_id, pairs.train, pairs.heldout, settings, context.seed, context.process_group
    )

    def load(pipeline: PipelineSettings) -> PreTrainedModel:
        return heads.create_reward_model(source, pipeline.model, seed=context.seed, shape=shape)[0]

    epochs = context.build_epoch_keeper(recipe.trainer, model, tokenizer, load)
    outcome = context.train(recipe, epochs)
    context.save_model(recipe.trainer.optimizer_step, model, tokenizer, load)
    summarizers = {"mse": _summarize_regression, "process": _summarize_steps}
    summarize = summarizers.get(settings.loss, _summarize_ranking)
    summary = summarize(context, pairs, outcome.metrics, outcome.steps)
    return {**summary, "note": summary["note"] + recipe.trainer.describe_step_limit(outcome.steps)}


def _summarize_ranking(
    context: StageContext, pairs: StagePairs, metrics: dict[str, float], steps: int
) -> dict[str, Any]:
    from rl_core.trainers.reward_model import compute_longer_answer_baseline

    accuracy = metrics["eval/accuracy"]
    ordered = [pair for pair in pairs.heldout if not pair.tie]
    low, high = wilson_interval(round(accuracy * len(ordered)), len(ordered))
    longer = pairs.longer_answer_accuracy
    if longer is None:
        longer = compute_longer_answer_baseline(
            [(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in ordered]
        )
    extra = {
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/longer_answer_accuracy": longer,
    }
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
        "note": f"ranks {accuracy:.1%} of {len(ordered)} held-out pairs correctly "
        f"[{low:.1%}, {high:.1%}]; 'the longer one wins' reaches {longer:.1%}; {pairs.note}",
    }


def _summarize_regression(
    context: StageContext, pairs: StagePairs, metrics: dict[str, float], steps: int
) -> dict[str, Any]:
    """Summarize a regression on scores."""
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


def _summarize_steps(
    context: StageContext, pairs: StagePairs, metrics: dict[str, float], steps: int
) -> dict[str, Any]:
    """Summarize a reward model of steps."""
    accuracy = metrics["eval/accuracy"]
    count = sum(len(pair.steps) for pair in pairs.heldout)
    low, high = wilson_interval(round(accuracy * count), count)
    by_label = {
        name: metrics[f"eval/accuracy_{name}"]
        for name in ("right", "wrong")
        if f"eval/accuracy_{name}" in metrics
    }
    described = ", ".join(f"{value:.1%} of the {name} ones" for name, value in by_label.items())
    return {
        "steps": steps,
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"accuracy_{name}": value for name, value in by_label.items()},
        "train_rows": len(pairs.train),
        "heldout_rows": len(pairs.heldout),
        "metrics": metrics,
        "note": f"judges {accuracy:.1%} of {count} held-out steps correctly [{low:.1%}, {high:.1%}], {described}; "
        f"{pairs.note}",
    }
