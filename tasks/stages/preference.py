"""Stage: preference optimisation (DPO and related losses) on pairs from a file or from the policy's own rollouts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.statistics import wilson_interval
from rl_core.settings import PreferenceSettings
from tasks.config import PipelineSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_key import compute_code_version
from tasks.pipeline.stage_result import StageResult
from tasks.stages.loading import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def optimise_preferences(
    pipeline_run: PipelineRun, model: Path | str, data: StageResult | None
) -> StageResult:
    """Run the stage.

    Args:
        model: the policy to start from, the reference, and the source of rollouts for pairs.
    """
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(pipeline_run, "preference", _run_preference_training, inputs=inputs)


def _run_preference_training(context: StageContext) -> dict[str, Any]:
    # Imported here: these load torch, which a cached run does not need.
    from rl_core.api.recipes import Recipe
    from rl_core.trainers.preference import PreferenceTrainer
    from tasks.stages.preference_pairs import load_or_compute_references, load_stage_pairs

    settings: PreferenceSettings = context.settings
    pairs = context.process_group.run_on_rank_zero(lambda: load_stage_pairs(context))
    policy = load_policy(context.inputs["model"], context.pipeline)
    references = None
    if settings.needs_reference:
        # next to the keys, so that a run with another beta reuses them
        folder = context.folder.parent / "references"
        references = context.process_group.run_on_rank_zero(
            lambda: load_or_compute_references(
                folder,
                policy.model,
                (pairs.train, pairs.heldout),
                pad_id=policy.renderer.pad_id,
                max_tokens=settings.micro_batch_tokens,
                precision=settings.autocast,
                code=compute_code_version(),
            )
        )
    trainer = PreferenceTrainer(
        policy.model,
        policy.renderer.pad_id,
        pairs.train,
        pairs.heldout,
        settings,
        context.seed,
        references,
        context.process_group,
    )
    recipe = Recipe(trainer, trainer.total_steps, trainer.best_metric, larger_is_better=False)

    def load(pipeline: PipelineSettings) -> PreTrainedModel:
        return load_policy(context.inputs["model"], pipeline).model

    epochs = context.build_epoch_keeper(trainer, policy.model, policy.tokenizer, load)
    outcome = context.train(recipe, epochs)
    context.save_model(trainer.optimizer_step, policy.model, policy.tokenizer, load)
    metrics = outcome.metrics
    accuracy = metrics["eval/accuracy"]
    num_compared = sum(not pair.tie for pair in pairs.heldout)
    low, high = wilson_interval(round(accuracy * num_compared), num_compared)
    rows = "completions" if settings.loss == "kto" else "pairs"
    finding = _describe_accuracy(settings.loss, accuracy, num_compared)
    return {
        "steps": outcome.steps,
        "stop_reason": outcome.stop_reason,
        "eval_loss": metrics["eval/loss"],
        "preference_accuracy": accuracy,
        "preference_accuracy_low": low,
        "preference_accuracy_high": high,
        "train_pairs": len(pairs.train),
        "heldout_pairs": len(pairs.heldout),
        "metrics": metrics,
        "note": f"{settings.loss}, {outcome.steps} steps on {len(pairs.train)} {rows}; {finding} "
        f"[{low:.1%}, {high:.1%}]; {pairs.note}" + trainer.describe_step_limit(outcome.steps),
    }


def _describe_accuracy(loss: str, accuracy: float, count: int) -> str:
    """Describe the held-out accuracy under a loss."""
    if loss == "kto":
        return f"{accuracy:.1%} of {count} held-out completions are on their label's side of the reference point"
    baseline = "the rejected one" if loss in ("simpo", "orpo") else "the initial policy did"
    return (
        f"prefers the chosen side of {accuracy:.1%} of {count} held-out pairs more than {baseline}"
    )
