"""Stage: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.api.recipes.sft import sft as sft_recipe
from rl_core.data.conversation import TrainingSequence, training_sequences
from rl_core.data.token_rows import TokenRows
from rl_core.settings import SFTSettings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage
from tasks.stages.loading import load_policy
from tasks.stages.row_files import rows_of

__all__ = ["sft"]

logger = logging.getLogger(__name__)


def sft(pipeline_run: PipelineRun, model: Path | str, data: StageResult) -> StageResult:
    """Run the stage. `model`: folder or hub name to start from; `data`: the data stage's result."""
    return run_stage(
        pipeline_run, "sft", _body, settings=pipeline_run.settings.stages.sft, inputs={"model": model, "data": data}
    )


def _body(context: StageContext) -> dict[str, Any]:
    settings: SFTSettings = context.settings
    policy = load_policy(context.inputs["model"], context.pipeline)
    data = Path(context.inputs["data"])
    counts = {"train": 0, "heldout": 0}

    def sequences(split: str) -> Iterator[TrainingSequence]:
        for row in rows_of(data / f"demonstrations_{split}.jsonl"):
            counts[split] += 1
            yield from training_sequences(
                policy.renderer, row["messages"], row.get("tools"), settings.loss_on, row.get("max_tokens")
            )

    train, heldout = TokenRows(sequences("train")), TokenRows(sequences("heldout"))
    recipe = sft_recipe(policy, train, heldout, settings, context.seed, context.process_group)
    outcome = context.train(recipe)
    context.save_model(
        recipe.trainer.optimizer_step,
        policy.model,
        policy.tokenizer,
        lambda pipeline: load_policy(context.inputs["model"], pipeline).model,
    )
    loss = outcome.metrics["eval/loss"]
    return {
        "steps": outcome.steps,
        "stop_reason": outcome.stop_reason,
        "eval_loss": loss,
        "demonstrations": counts["train"],
        "sequences": len(train),  # more where the template renders the history anew (history_thoughts)
        "demonstration_tokens": train.num_tokens,
        "metrics": outcome.metrics,
        "note": f"{outcome.steps} steps on {counts['train']} demonstrations, "
        f"held-out loss {loss:.3f} nats per token" + recipe.trainer.bound_note(outcome.steps),
    }
