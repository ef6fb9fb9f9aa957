"""Stage: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from rl_core.api import recipes
from rl_core.data.conversation import training_sequences
from rl_core.settings import SFTSettings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage
from tasks.stages.loading import load_policy

__all__ = ["read_jsonl", "sft"]

logger = logging.getLogger(__name__)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows that an earlier stage wrote."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def sft(pipeline_run: PipelineRun, model: Path | str, data: StageResult) -> StageResult:
    """Run the stage. `model`: folder or hub name to start from; `data`: the data stage's result."""
    return run_stage(
        pipeline_run, "sft", _body, settings=pipeline_run.settings.stages.sft, inputs={"model": model, "data": data}
    )


def _body(context: StageContext) -> dict[str, Any]:
    settings: SFTSettings = context.settings
    policy = load_policy(context.inputs["model"], context.pipeline)
    data = Path(context.inputs["data"])
    rows = {split: read_jsonl(data / f"demonstrations_{split}.jsonl") for split in ("train", "heldout")}
    train, heldout = (
        [
            sequence
            for row in part
            for sequence in training_sequences(
                policy.renderer, row["messages"], row.get("tools"), settings.loss_on, row.get("max_tokens")
            )
        ]
        for part in rows.values()
    )
    recipe = recipes.sft(policy, train, heldout, settings, context.seed, context.process_group)
    outcome = context.train(recipe)
    context.save_model(
        recipe.trainer.optimizer_step,
        policy.model,
        policy.tokenizer,
        lambda pipeline: load_policy(context.inputs["model"], pipeline).model,
    )
    tokens = sum(len(ids) for ids, _ in train)
    loss = outcome.metrics["eval/loss"]
    return {
        "steps": outcome.steps,
        "stop_reason": outcome.stop_reason,
        "eval_loss": loss,
        "demonstrations": len(rows["train"]),
        "sequences": len(train),  # more where the template renders the history anew (history_thoughts)
        "demonstration_tokens": tokens,
        "metrics": outcome.metrics,
        "note": f"{outcome.steps} steps on {len(rows['train'])} demonstrations, "
        f"held-out loss {loss:.3f} nats per token" + recipe.trainer.bound_note(outcome.steps),
    }
