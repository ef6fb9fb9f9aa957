"""Stage: play the same held-out episodes with every model of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.analysis import write_trajectories
from rl_core.environments.environment import Environment
from rl_core.evaluation import Evaluation
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_requests import heldout_requests, validation_requests
from rl_core.rollouts.token_files import tokens_path, write_tokens
from rl_core.settings import EvaluationSettings
from rl_core.storage.faults import fault
from rl_core.storage.single_files import write_json_atomic
from tasks.config import PipelineSettings, evaluation_settings
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import FAILED_EPISODES, StageContext, StageResult, run_stage
from tasks.stages.failed_episodes import keeper, kept_episodes
from tasks.stages.loading import load_frozen_policy, make_environment

__all__ = [
    "episodes_seed",
    "evaluate_models",
    "read_evaluation",
    "reported_episodes",
    "trajectories_path",
    "validation_episodes",
]

logger = logging.getLogger(__name__)


def evaluate_models(
    pipeline_run: PipelineRun,
    models: Mapping[str, StageResult | Path | str],
    data: StageResult | None,
    *,
    label: str | None = None,
    settings: EvaluationSettings | None = None,
) -> StageResult:
    """Run the stage. `models`: what to evaluate, by the name that tables and pictures show.

    settings: in place of the pipeline's.
    """
    settings = settings or evaluation_settings(pipeline_run.settings)
    inputs: dict[str, StageResult | Path | str] = {f"model.{name}": model for name, model in models.items()}
    if data is not None:
        inputs["data"] = data
    return run_stage(pipeline_run, "evaluate", _body, settings=settings, inputs=inputs, label=label)


def episodes_seed(settings: EvaluationSettings, pipeline: PipelineSettings) -> int:
    """Seed of the held-out episodes.

    The pipeline's seed, not the stage's: the champion is compared on the same episodes, whichever run made it.
    """
    return pipeline.seed if settings.episodes_seed is None else settings.episodes_seed


def reported_episodes(
    environment: Environment, settings: EvaluationSettings, pipeline: PipelineSettings
) -> list[EpisodeRequest]:
    """The held-out episodes of an evaluation. Draws after the first leave out what validation chose the model by.

    Raises: DataError where the environment has too few for the draw.
    """
    seed = episodes_seed(settings, pipeline)
    excluded = validation_episodes(environment, pipeline) if settings.episodes_draw else []
    return heldout_requests(environment, settings, seed, excluded)


def validation_episodes(environment: Environment, pipeline: PipelineSettings) -> list[EpisodeRequest]:
    """Episodes that policy training is validated on; [] without such a stage. None is of the evaluation's first draw.

    Raises: SettingsError where too few are held out.
    """
    settings = pipeline.stages.policy
    if settings is None or not settings.eval_every:
        return []
    evaluation = dataclasses.replace(pipeline.stages.evaluate or EvaluationSettings(), episodes_draw=0)
    reported = heldout_requests(environment, evaluation, episodes_seed(evaluation, pipeline))
    levels = sorted({level for stage in settings.curriculum for level in stage.levels}) or environment.levels
    return validation_requests(environment, settings.eval_episodes, levels, pipeline.seed, reported)


def trajectories_path(folder: Path, name: str) -> Path:
    """File of one model's sampled episodes."""
    return folder / f"trajectories_{name}.jsonl"


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """The sampled evaluation of one model."""
    return Evaluation.from_json(json.loads((folder / "evaluation.json").read_text())[name])


def _body(context: StageContext) -> dict[str, Any]:
    from rl_core.api.evaluation import play_heldout  # here: they load torch, not needed if cached
    from rl_core.api.policy import model_folder
    from rl_core.models.logprob_record import EVALUATED, TokenRecord, evaluated_records, write_records

    settings: EvaluationSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = make_environment(context.pipeline, data)
    requests = reported_episodes(environment, settings, context.pipeline)
    names = [name.removeprefix("model.") for name in context.inputs if name.startswith("model.")]
    failed = kept_episodes(context)
    failed.clear()
    table: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    records: dict[str, list[TokenRecord]] = {}
    for index, name in enumerate(names):
        context.tracker.progress(index, len(names), f"playing {len(requests)} episodes with {name}")
        policy = load_frozen_policy(model_folder(context.inputs[f"model.{name}"]), context.pipeline)
        keep = keeper(context, failed, of=name)
        result, greedy = play_heldout(policy, environment, requests, settings, context.pipeline.seed, keep)
        metrics = result.metrics(f"eval/{name}")
        stored[name] = result.to_json()
        row = _row(result) | {"knows_success": environment.knows_success}
        if greedy is not None:
            stored[f"{name}_greedy"] = greedy.to_json()
            metrics[f"eval/{name}/greedy_success_rate"] = greedy.success_rate
            row["greedy_success"] = greedy.success_rate
            row["failed_episodes"] += greedy.failed_episodes
        context.tracker.log_metrics(metrics, index)
        path = trajectories_path(context.folder, name)
        write_trajectories(path, result.trajectories)
        write_tokens(tokens_path(path), result.rollouts)  # for the analysis, which never tokenises again
        records[name] = evaluated_records(policy.model, result.rollouts, settings.sampling)
        fault("evaluation.trajectories")
        context.tracker.log_artifact(path, "trajectories")
        context.tracker.log_traces(result.trajectories, context.pipeline.tracking.traces, model=name)
        table[name] = {**row, "metrics": metrics}
        logger.info("%s: success %.1f%% of %d held-out episodes", name, 100 * result.success_rate, len(requests))
    write_records(context.folder / EVALUATED, records)  # for the proof of export
    write_json_atomic(context.folder / "evaluation.json", stored)
    fault("evaluation.written")
    context.tracker.log_artifact(context.folder / "evaluation.json")
    context.tracker.progress(len(names), len(names))
    said = "success" if environment.knows_success else "reward (there is no success: no verifier tells it)"
    key, form = ("success", ".1%") if environment.knows_success else ("reward", ".3f")
    note = ", ".join(f"{name} {row[key]:{form}}" for name, row in table.items())
    held_out = {level: environment.held_out(level) for level in dict.fromkeys(request.level for request in requests)}
    seen = [level for level, found in held_out.items() if found.by != "content"]
    if lost := sum(row["failed_episodes"] for row in table.values()):
        note += f"; {lost} episodes failed and count nowhere ({FAILED_EPISODES})"
    if seen:
        note += f"; held out by seed only, so these questions may be training questions: {', '.join(seen)}"
    return {
        "models": table,
        "episodes": len(requests),
        "held_out": {level: found.to_json() for level, found in held_out.items()},
        "note": f"{said} on {len(requests)} held-out episodes: {note}",
    }


def _row(result: Evaluation) -> dict[str, Any]:
    low, high = result.interval
    return {
        "success": result.success_rate,
        "success_low": low,
        "success_high": high,
        "reward": result.reward_mean,
        "failed_episodes": result.failed_episodes,
        "tokens_per_second": result.tokens_per_second,
        "by_level": {level: list(rate) for level, rate in result.by_level.items()},
    }
