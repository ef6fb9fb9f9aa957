"""Stages of the user's: the task that runs an `CustomStage` as every stage is run."""

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
    """The function that the flow calls with the pipeline run and what the stage takes, in order."""

    def run(
        pipeline_run: PipelineRun, *taken: StageInput | Mapping[str, StageInput] | None
    ) -> StageResult:
        inputs: dict[str, StageInput] = {}
        for name, value in zip(stage.takes, taken, strict=True):
            if isinstance(value, Mapping):
                inputs |= {f"model.{model}": source for model, source in value.items()}
            elif value is not None:
                inputs[name] = value
        settings = getattr(pipeline_run.settings.stages, stage.name)
        return run_stage(
            pipeline_run, stage.name, run_custom_body, settings=settings, inputs=inputs
        )

    assert stage.custom is not None
    run.__doc__ = stage.custom.body.__doc__
    return run


def run_custom_body(context: StageContext) -> dict[str, Any]:
    """Call the user's body. Raises: DataError for a summary that is no dict, or a model that it did not write."""
    stage = find_stage(context.name)
    assert stage.custom is not None
    summary = stage.custom.body(context)
    if not isinstance(summary, dict):
        raise DataError(
            f"stage '{context.name}' gave {type(summary).__name__}; its body returns a dict of numbers for people, "
            "with a sentence as `note`"
        )
    if (
        stage.trained_kind is not None
        and context.process_group.is_rank_zero
        and not (context.folder / "model").is_dir()
    ):
        raise DataError(
            f"stage '{context.name}' gives a {stage.gives}, but wrote no model; write one into context.folder / "
            "'model', as context.save_model and rl_core.models.causal_lm.save do"
        )
    return summary
