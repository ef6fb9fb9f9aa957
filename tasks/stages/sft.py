"""Stage: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.settings import SFTSettings
from tasks.config import PipelineSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult
from tasks.stages.data_rows import list_split_files, load_split_tokens, read_json_rows
from tasks.stages.loading import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train_sft(pipeline_run: PipelineRun, model: Path | str, data: StageResult) -> StageResult:
    """Run the stage.

    Args:
        model: folder or hub name to start from.
        data: the data stage's result.
    """
    return run_stage(pipeline_run, "sft", _run_sft_training, inputs={"model": model, "data": data})


def _run_sft_training(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from rl_core.api.recipes import Recipe
    from rl_core.data.training_sequences import attach_images
    from rl_core.trainers.sft import SFTTrainer

    settings: SFTSettings = context.settings
    policy = load_policy(context.inputs["model"], context.pipeline)
    data = Path(context.inputs["data"])
    parts = context.process_group.run_on_rank_zero(
        lambda: load_split_tokens(data, "demonstrations", policy.renderer, settings.loss_on)
    )
    paths = list_split_files(data, "demonstrations")
    train, heldout = (
        attach_images(tokens, read_json_rows(path), policy.renderer)
        for tokens, path in zip(parts, paths, strict=True)
    )
    trainer = SFTTrainer(
        policy.model,
        policy.renderer.pad_id,
        train,
        heldout,
        settings,
        context.seed,
        context.process_group,
    )
    recipe = Recipe(trainer, trainer.total_steps, trainer.best_metric, larger_is_better=False)

    def load(pipeline: PipelineSettings) -> PreTrainedModel:
        return load_policy(context.inputs["model"], pipeline).model

    epochs = context.build_epoch_keeper(trainer, policy.model, policy.tokenizer, load)
    outcome = context.train(recipe, epochs)
    context.save_model(trainer.optimizer_step, policy.model, policy.tokenizer, load)
    loss = outcome.metrics["eval/loss"]
    return {
        "steps": outcome.steps,
        "stop_reason": outcome.stop_reason,
        "eval_loss": loss,
        "demonstrations": train.num_rows,
        # more than demonstrations if the template re-renders the history (history_thoughts)
        "sequences": len(train),
        "demonstration_tokens": train.num_tokens,
        "metrics": outcome.metrics,
        "note": f"{outcome.steps} steps on {train.num_rows} demonstrations, "
        f"held-out loss {loss:.3f} nats per token" + trainer.describe_step_limit(outcome.steps),
    }
