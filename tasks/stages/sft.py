"""Stage: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.settings import SFTSettings
from tasks.config import PipelineSettings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage
from tasks.stages.loading import load_policy
from tasks.stages.part_tokens import part_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["sft"]

logger = logging.getLogger(__name__)


def sft(pipeline_run: PipelineRun, model: Path | str, data: StageResult) -> StageResult:
    """Run the stage. `model`: folder or hub name to start from; `data`: the data stage's result."""
    return run_stage(
        pipeline_run, "sft", _body, settings=pipeline_run.settings.stages.sft, inputs={"model": model, "data": data}
    )


def _body(context: StageContext) -> dict[str, Any]:
    from rl_core.api.recipes.sft import sft as sft_recipe  # here: it loads torch, not needed if cached

    settings: SFTSettings = context.settings
    policy = load_policy(context.inputs["model"], context.pipeline)
    data = Path(context.inputs["data"])
    train, heldout = context.process_group.on_rank_zero(
        lambda: part_tokens(data, "demonstrations", policy.renderer, settings.loss_on)
    )
    recipe = sft_recipe(policy, train, heldout, settings, context.seed, context.process_group)

    def load(pipeline: PipelineSettings) -> PreTrainedModel:
        return load_policy(context.inputs["model"], pipeline).model

    epochs = context.kept_epochs(recipe.trainer, policy.model, policy.tokenizer, load)
    outcome = context.train(recipe, epochs)
    context.save_model(recipe.trainer.optimizer_step, policy.model, policy.tokenizer, load)
    loss = outcome.metrics["eval/loss"]
    return {
        "steps": outcome.steps,
        "stop_reason": outcome.stop_reason,
        "eval_loss": loss,
        "demonstrations": train.num_rows,
        "sequences": len(train),  # more where the template renders the history anew (history_thoughts)
        "demonstration_tokens": train.num_tokens,
        "metrics": outcome.metrics,
        "note": f"{outcome.steps} steps on {train.num_rows} demonstrations, "
        f"held-out loss {loss:.3f} nats per token" + recipe.trainer.bound_note(outcome.steps),
    }
