"""The task that runs a user-defined stage (`CustomStage`) like any other stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import PipelineStage, find_stage

StageInput = StageResult | Path | str


def build_stage_task(stage: PipelineStage) -> Callable[..., StageResult]:
    """Build the function that the flow calls with the pipeline run and the stage's inputs, in order."""

    def run(
        pipeline_run: PipelineRun, *values: StageInput | Mapping[str, StageInput] | None
    ) -> StageResult:
        inputs: dict[str, StageInput] = {}
        for name, value in zip(stage.takes, values, strict=True):
            if isinstance(value, Mapping):
                inputs |= {f"model.{model}": source for model, source in value.items()}
            elif value is not None:
                inputs[name] = value
        return run_stage(pipeline_run, stage.name, run_custom_body, inputs=inputs)

    assert stage.custom is not None
    run.__doc__ = stage.custom.body.__doc__
    return run


def run_custom_body(context: StageContext) -> dict[str, Any]:
    """Call the user's body. Raises: DataError if the summary is not a dict, or if the model is missing."""
    stage = find_stage(context.name)
    assert stage.custom is not None
    summary = stage.custom.body(context)
    if not isinstance(summary, dict):
        raise DataError(
            f"stage '{context.name}' returned {type(summary).__name__}; its body must return a dict of numbers, "
            "with a sentence as `note`"
        )
    if (
        stage.trained_kind is not None
        and context.process_group.is_rank_zero
        and not (context.folder / "model").is_dir()
    ):
        raise DataError(
            f"stage '{context.name}' declares that it gives a {stage.gives}, but wrote no model; write one into "
            "context.folder / 'model', with context.save_model or rl_core.models.causal_lm.save"
        )
    return summary
