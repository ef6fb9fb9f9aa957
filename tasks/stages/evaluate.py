"""Stage: play the same held-out episodes with every model of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis import write_trajectories
from rl_core.environments.environment import Environment, HeldOutSeparation
from rl_core.errors import DataError
from rl_core.evaluation import Evaluation, compare
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests, draw_validation_requests
from rl_core.rollouts.rollout_files import FailedEpisodeFile, build_tokens_path, write_tokens
from rl_core.rollouts.rollout_metrics import TRUNCATED_SHARE, describe_limits
from rl_core.settings import EvaluationSettings
from rl_core.storage.atomic_files import copy_file, write_json_atomic
from rl_core.storage.faults import inject_fault
from tasks.config import PipelineSettings, resolve_evaluation_settings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import FAILED_EPISODES, GAIN, StageResult, format_gain
from tasks.stage_registry import START_MODEL
from tasks.stages.loading import (
    build_failure_recorder,
    build_pipeline_environment,
    load_frozen_policy,
    open_failed_episode_file,
)

if TYPE_CHECKING:
    from rl_core.models.export_records import TokenRecord

logger = logging.getLogger(__name__)

_START_EVALUATION = "start_evaluation"  # input: the finished evaluation of the start model alone


def evaluate_models(
    pipeline_run: PipelineRun,
    models: Mapping[str, StageResult | Path | str],
    data: StageResult | None,
    *,
    label: str | None = None,
    settings: EvaluationSettings | None = None,
) -> StageResult:
    """Run the stage.

    The start model is evaluated under its own key and copied, so that another training does not play it again.

    Args:
        models: the models to evaluate, by the name that tables and figures show.
        settings: used instead of the pipeline's.
    """
    settings = settings or resolve_evaluation_settings(pipeline_run.settings)
    inputs: dict[str, StageResult | Path | str] = {
        f"model.{name}": model for name, model in models.items()
    }
    if data is not None:
        inputs["data"] = data
    start = models.get(START_MODEL)
    if start is not None and not isinstance(start, StageResult) and len(models) > 1:
        inputs[_START_EVALUATION] = evaluate_models(
            pipeline_run,
            {START_MODEL: start},
            data,
            label=f"evaluate {START_MODEL}",
            settings=settings,
        )
    return run_stage(
        pipeline_run, "evaluate", _run_evaluation, settings=settings, inputs=inputs, label=label
    )


def resolve_episodes_seed(settings: EvaluationSettings, pipeline: PipelineSettings) -> int:
    """Return the seed of the held-out episodes.

    It is the pipeline's seed, not the stage's: the champion plays the same episodes, whichever run trained it.
    """
    return pipeline.seed if settings.episodes_seed is None else settings.episodes_seed


def list_reported_episodes(
    environment: Environment, settings: EvaluationSettings, pipeline: PipelineSettings
) -> list[EpisodeRequest]:
    """List the held-out episodes of an evaluation.

    Draws after the first skip the episodes that validation chose the model by.

    Raises: DataError if the environment has too few for the draw.
    """
    seed = resolve_episodes_seed(settings, pipeline)
    excluded = list_validation_episodes(environment, pipeline) if settings.episodes_draw else []
    return draw_heldout_requests(environment, settings, seed, excluded)


def list_validation_episodes(
    environment: Environment, pipeline: PipelineSettings
) -> list[EpisodeRequest]:
    """List the episodes that validate policy training, if it is validated. None belongs to the evaluation's first draw.

    Raises: SettingsError if too few are held out.
    """
    settings = pipeline.stages.policy
    if settings is None or not settings.eval_every:
        return []
    evaluation = dataclasses.replace(
        pipeline.stages.evaluate or EvaluationSettings(), episodes_draw=0
    )
    reported = draw_heldout_requests(
        environment, evaluation, resolve_episodes_seed(evaluation, pipeline)
    )
    levels = (
        sorted({level for stage in settings.curriculum for level in stage.levels})
        or environment.levels
    )
    return draw_validation_requests(
        environment, settings.eval_episodes, levels, pipeline.seed, reported
    )


def resolve_trajectories_path(folder: Path, name: str) -> Path:
    """Return the path of one model's sampled episodes."""
    return folder / f"trajectories_{name}.jsonl"


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """Read the sampled evaluation of one model."""
    return Evaluation.from_json(json.loads((folder / "evaluation.json").read_text())[name])


def _run_evaluation(context: StageContext) -> dict[str, Any]:
    # Imported here: it loads torch, which a cached run does not need.
    from rl_core.models.export_records import EVALUATED_LOGPROBS_FILE, read_records, write_records

    settings: EvaluationSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = build_pipeline_environment(context.pipeline, data)
    requests = list_reported_episodes(environment, settings, context.pipeline)
    names = [name.removeprefix("model.") for name in context.inputs if name.startswith("model.")]
    failed = open_failed_episode_file(context)
    failed.clear_file()
    played = _PlayedModels()
    if _START_EVALUATION in context.inputs:
        finished = Path(context.inputs[_START_EVALUATION])
        played.copy_finished(finished, context.folder)
        played.records |= read_records(finished / EVALUATED_LOGPROBS_FILE)
    for index, name in enumerate(names):
        if name not in played.table:
            noun = f"playing {len(requests)} episodes with {name}"
            context.tracker.progress(index, len(names), noun)
            _play_model(context, name, environment, requests, failed, played)
        row = played.table[name]
        if name != names[0] == START_MODEL:
            gain = _compare_with_start(played.stored, name, row, context.pipeline.seed)
            row |= gain
            row["metrics"] |= {f"eval/{name}/{key}": value for key, value in gain.items()}
        context.tracker.log_metrics(row["metrics"], index)
    write_records(
        context.folder / EVALUATED_LOGPROBS_FILE, played.records
    )  # for the proof of export
    write_json_atomic(context.folder / "evaluation.json", played.stored)
    inject_fault("evaluation.written")
    context.tracker.log_artifact(context.folder / "evaluation.json")
    context.tracker.progress(len(names), len(names))
    levels = dict.fromkeys(request.level for request in requests)
    held_out = {level: environment.held_out(level) for level in levels}
    return {
        "models": played.table,
        "episodes": len(requests),
        "held_out": {level: report.to_json() for level, report in held_out.items()},
        "note": _describe_results(environment, played.table, held_out, len(requests)),
    }


# Levels whose held-out questions are not known to be new, by method.
_UNSEPARATED = {
    "seeds": "held out by seed only, so these questions may be training questions",
    "unchecked": "held-out questions not compared with the training questions, which are too many",
}


@dataclasses.dataclass
class _PlayedModels:
    """Results of the models so far, by name."""

    table: dict[str, Any] = dataclasses.field(default_factory=dict)  # rows of the summary
    stored: dict[str, Any] = dataclasses.field(default_factory=dict)  # of evaluation.json
    records: dict[str, list[TokenRecord]] = dataclasses.field(default_factory=dict)

    def copy_finished(self, finished: Path, folder: Path) -> None:
        """Copy the results and the episodes of a finished evaluation, but its log-probs."""
        self.table |= json.loads((finished / "summary.json").read_text())["models"]
        self.stored |= json.loads((finished / "evaluation.json").read_text())
        patterns = ("trajectories_*", "tokens_*", FAILED_EPISODES)
        for path in sorted(path for pattern in patterns for path in finished.glob(pattern)):
            copy_file(path, folder / path.name)


def _play_model(
    context: StageContext,
    name: str,
    environment: Environment,
    requests: Sequence[EpisodeRequest],
    failed: FailedEpisodeFile,
    played: _PlayedModels,
) -> None:
    """Play the episodes with one model, write them, and add its results."""
    from rl_core.api.evaluation import evaluate_heldout
    from rl_core.api.policy import resolve_model_folder
    from rl_core.models.export_records import record_evaluated_logprobs

    settings: EvaluationSettings = context.settings
    policy = load_frozen_policy(
        resolve_model_folder(context.inputs[f"model.{name}"]), context.pipeline
    )
    store_failure = build_failure_recorder(context, failed, model_name=name)
    result, greedy = evaluate_heldout(
        policy, environment, requests, settings, context.pipeline.seed, store_failure
    )
    metrics = result.metrics(f"eval/{name}")
    played.stored[name] = result.to_json()
    row = _summarize_evaluation(result) | {"knows_success": environment.knows_success}
    if greedy is not None:
        played.stored[f"{name}_greedy"] = greedy.to_json()
        if greedy.success_rate is not None:
            metrics[f"eval/{name}/greedy_success_rate"] = greedy.success_rate
        row["greedy_success"] = greedy.success_rate
        row["failed_episodes"] += greedy.failed_episodes
    path = resolve_trajectories_path(context.folder, name)
    write_trajectories(path, result.trajectories)
    # for the analysis, which does not tokenise again
    write_tokens(build_tokens_path(path), result.rollouts)
    played.records[name] = record_evaluated_logprobs(
        policy.model, result.rollouts, settings.sampling
    )
    inject_fault("evaluation.trajectories")
    context.tracker.log_artifact(path, "trajectories")
    context.tracker.log_traces(result.trajectories, context.pipeline.tracking.traces, model=name)
    played.table[name] = {**row, "metrics": metrics}
    measure = f"reward {result.reward_mean:.4g}"
    if result.success_rate is not None:
        measure = f"success {result.success_rate:.1%}"
    logger.info("%s: %s on %d held-out episodes", name, measure, len(requests))
    if result.truncated_rate >= TRUNCATED_SHARE:
        logger.warning(
            "limits cut %.0f%% of the episodes of %s: %s",
            100 * result.truncated_rate,
            name,
            describe_limits(settings.sampling),
        )


def _compare_with_start(
    stored: Mapping[str, Any], name: str, row: Mapping[str, Any], seed: int
) -> dict[str, float]:
    """Compute the gain over the start model on the same episodes, in success, or in reward without a verifier."""
    model, start = (Evaluation.from_json(stored[key]) for key in (name, START_MODEL))
    try:
        paired = compare(model, start, seed=seed)
    except DataError:  # every episode failed in one of the two
        return {}
    gain = paired.success if row["knows_success"] else paired.reward
    if gain is None:
        return {}
    return {
        GAIN: gain.difference,
        "gain_over_base_low": gain.low,
        "gain_over_base_high": gain.high,
    }


def _describe_results(
    environment: Environment,
    table: Mapping[str, Mapping[str, Any]],
    held_out: Mapping[str, HeldOutSeparation],
    num_episodes: int,
) -> str:
    if environment.knows_success:
        measure, key, number_format = "success", "success", ".1%"
    else:
        measure = "reward (success is unknown without a verifier)"
        key, number_format = "reward", ".3f"
    rates = ", ".join(f"{name} {row[key]:{number_format}}" for name, row in table.items())
    note = f"{measure} on {num_episodes} held-out episodes: {rates}"
    if gains := [f"{name} {format_gain(row)}" for name, row in table.items() if GAIN in row]:
        note += f"; gain over {START_MODEL} on the same episodes: {', '.join(gains)}"
    if num_failed := sum(row["failed_episodes"] for row in table.values()):
        note += f"; {num_failed} episodes failed and are not counted ({FAILED_EPISODES})"
    if cut := [
        f"{name} {row['truncated']:.0%}"
        for name, row in table.items()
        if row.get("truncated", 0.0) >= TRUNCATED_SHARE
    ]:
        note += f"; episodes that limits cut short: {', '.join(cut)}"
    for method, text in _UNSEPARATED.items():
        levels = [level for level, report in held_out.items() if report.by == method]
        note += f"; {text}: {', '.join(levels)}" if levels else ""
    return note


def _summarize_evaluation(result: Evaluation) -> dict[str, Any]:
    low, high = result.interval or (None, None)
    return {
        "success": result.success_rate,
        "success_low": low,
        "success_high": high,
        "reward": result.reward_mean,
        "failed_episodes": result.failed_episodes,
        "truncated": result.truncated_rate,
        "tokens_per_second": result.tokens_per_second,
        "by_level": {level: list(rate) for level, rate in result.by_level.items()},
        **_summarize_environments(result),
    }


def _summarize_environments(result: Evaluation) -> dict[str, Any]:
    """Summarise the environments of a mixture; {} for any other evaluation."""
    if not result.environments:
        return {}
    rates = {name: list(rate) for name, rate in result.by_environment.items()}
    return {"by_environment": rates, "reward_by_environment": result.reward_by_environment}
