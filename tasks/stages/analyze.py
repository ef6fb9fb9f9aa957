"""Stage: analysis of the evaluated trajectories, with tables, figures and a self-contained report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.analysis import AnalysisResult, analyze
from rl_core.data.images import encode_thumbnail, join_message_parts
from rl_core.environments.environment import Environment
from rl_core.environments.pixel_grid_questions import encode_png
from rl_core.errors import DataError, PosttrainError
from rl_core.evaluators.results import list_metric_rows
from rl_core.settings import AnalysisSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import START_MODEL, list_policy_stages
from tasks.stages.loading import build_pipeline_environment
from tasks.tracking import RunTracker
from tasks.tracking.journal import build_events_path, read_lines

MAX_THUMBNAIL_SIDE = 256  # pixels of an episode's image in the report


def analyze_trajectories(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    models: Mapping[str, StageResult | Path | str],
    data: StageResult | None,
    reward: StageResult | None = None,
    suites: StageResult | None = None,
) -> StageResult:
    """Run the stage.

    Args:
        evaluation: result of the stage `evaluate`.
        models: the policies that it evaluated.
        reward: result of the stage `reward_model`.
        suites: result of the stage `suites`.
    """
    inputs: dict[str, StageResult | Path | str] = {"evaluation": evaluation}
    inputs |= {f"model.{name}": model for name, model in models.items()}
    if data is not None:
        inputs["data"] = data
    if reward is not None:
        inputs["reward_model"] = reward
    if suites is not None:
        inputs["suites"] = suites
    settings = pipeline_run.settings.stages.analyze or AnalysisSettings()
    return run_stage(pipeline_run, "analyze", _run_analysis, settings=settings, inputs=inputs)


def _run_analysis(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from tasks.stages.model_probes import measure_models

    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    reward = Path(context.inputs["reward_model"]) if "reward_model" in context.inputs else None
    trajectories = find_trajectories([Path(context.inputs["evaluation"])])
    models = {
        name.removeprefix("model."): model
        for name, model in context.inputs.items()
        if name.startswith("model.")
    }
    trained_folders = {**models, **({"reward_model": reward} if reward else {})}
    training = {
        name: path
        for name, folder in trained_folders.items()
        if (path := Path(folder) / "metrics.jsonl").is_file()
    }
    environment = build_pipeline_environment(context.pipeline, data)
    policy = context.pipeline.stages.policy
    context.tracker.progress(0, 2, "reading the episodes with the models")
    probes = measure_models(
        context.pipeline,
        context.settings,
        models,
        trajectories,
        environment=environment,
        data=data,
        reward_model=reward,
    )
    context.tracker.progress(1, 2, "counting and drawing")
    result = analyze(
        trajectories,
        context.folder,
        context.settings,
        training=training,
        probes=probes,
        title=f"{context.pipeline.name}: trajectory analysis",
        seed=context.pipeline.find_stage_seed("analyze"),  # as the evaluation's: equal intervals
        image_of=build_image_function(environment),
        image_tools=list_image_tools(environment),
        curriculum=[stage.name for stage in policy.curriculum] if policy is not None else [],
        suites=_read_suite_table(context),
    )
    context.tracker.progress(2, 2)
    log_analysis(context.tracker, result)
    context.pipeline_run.parent.log_artifact(result.report)
    for path in result.files:
        if path.suffix == ".png":
            context.pipeline_run.parent.log_artifact(path, "figures")
    compared = f"report.html compares {', '.join(trajectories)}"
    note = "; ".join([compared, *describe_text_changes(result.summary), *result.notes])
    return {
        "rows": result.summary,
        "report": result.report.name,
        "note": note,
        "metrics": result.metrics,
    }


def _read_suite_table(context: StageContext) -> list[list[str]]:
    """Read the metrics of suites as a table; [] without the stage."""
    if "suites" not in context.inputs:
        return []
    summary = json.loads((Path(context.inputs["suites"]) / "summary.json").read_text())
    models, rows = list_metric_rows(summary["models"])
    return [["Metric (95% interval)", *models], *rows]


def describe_text_changes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe fluency and diversity of every model's text, with the start model's values in brackets.

    Args:
        rows: of the summary, one a model, the first model first; [] is returned unless it is the start model.
    """
    if not rows or rows[0]["model"] != START_MODEL:
        return []
    start, texts = rows[0], []
    for row in rows[1:]:
        parts = [
            f"{words} {row[name]:{form}} ({start[name]:{form}})"
            for name, words, form in (
                ("perplexity_under_first", f"perplexity under {START_MODEL}", ".2f"),
                ("distinct_2", "distinct-2", ".3f"),
                ("same_opening_rate", "most frequent opening", ".1%"),
            )
            if row.get(name) is not None and start.get(name) is not None
        ]
        texts.append(f"text of {row['model']} (of {START_MODEL}): {', '.join(parts)}")
    return texts


def log_analysis(run: RunTracker, result: AnalysisResult) -> None:
    """Log every number as a metric and every file as an artifact."""
    run.log_metrics(result.metrics, 0)
    for path in result.files:
        run.log_artifact(path, "figures" if path.suffix == ".png" else "")


def find_trajectories(paths: Sequence[Path]) -> dict[str, Path]:
    """Map model names to trajectory files, given files or folders that contain some, such as finished stages.

    Models come in pipeline order: the others are compared with the first one. If several models share a name, each
    label adds the run that evaluated it, or its folder.
    Raises: DataError if there is no trajectory file.
    """
    files = [file for path in paths for file in _list_trajectory_files(path)]
    if not files:
        raise DataError(
            f"{', '.join(map(str, paths))}: contains no trajectories*.jsonl; name the files, or the "
            "folder of a finished evaluation"
        )
    named_files = [
        (file.stem.removeprefix("trajectories").strip("_-") or file.parent.name, file)
        for file in files
    ]
    known = (START_MODEL, *list_policy_stages())
    ranks = {name: rank for rank, name in enumerate(known)}
    counts = Counter(name for name, _ in named_files)
    models: dict[str, Path] = {}
    for name, file in sorted(named_files, key=lambda item: ranks.get(item[0], len(known) - 1)):
        label = f"{name} {_describe_evaluating_run(file)}" if counts[name] > 1 else name
        while label in models:
            label += "'"
        models[label] = file
    return models


def _describe_evaluating_run(file: Path) -> str:
    """Return the start time of the run that evaluated, as in the list of runs; else the folder's name."""
    journal = file.parent.with_name(f"{file.parent.name}.tracking")
    first_event, _ = next(iter(read_lines(build_events_path(journal))), ({}, None))
    started = str(first_event.get("parent_folder") or "")
    date, time = started[-19:-9], started[-8:].replace("-", ":")
    return f"{date} {time}" if started else file.parent.name


def _list_trajectory_files(path: Path) -> list[Path]:
    """List a file itself, or a folder's files, or else those of the finished stages in it (no dot in their names)."""
    if not path.is_dir():
        return [path]
    finished = [
        folder for folder in sorted(path.iterdir()) if folder.is_dir() and "." not in folder.name
    ]
    return sorted(path.glob("trajectories*.jsonl")) or [
        file for folder in finished for file in sorted(folder.glob("trajectories*.jsonl"))
    ]


def build_image_function(environment: Environment) -> Callable[[str, int], bytes | None]:
    """Build a function (level, seed) -> PNG of the episode's image: by `image()`, or the first in its messages."""

    def draw(level: str, seed: int) -> bytes | None:
        episode = environment.episode(seed, level)
        image = getattr(episode, "image", None)
        if callable(image):
            return encode_png(image())
        urls = [
            url for m in map(join_message_parts, episode.reset()) for url in m.get("images", ())
        ]
        return encode_thumbnail(urls[0], MAX_THUMBNAIL_SIDE) if urls else None

    return draw


def list_image_tools(environment: Environment) -> tuple[str, ...] | None:
    """List the tools that look at an image.

    Those that are declared (`Tool.is_visual`); without such, None = all, if episodes have images; () = none otherwise.
    """
    if visual := environment.tools.list_visual_tools():
        return visual
    try:
        seed = environment.seeds_of("heldout", environment.levels[0])[0]
        has_image = callable(
            getattr(environment.episode(seed, environment.levels[0]), "image", None)
        )
    except (LookupError, PosttrainError):
        return None
    return None if has_image else ()
