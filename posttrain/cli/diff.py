"""Comparison of two models on the same held-out episodes (`posttrain diff`): differences, regressions, divergence.

Also `posttrain analyze` of trajectory files, without Prefect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.model_references import resolve_model_references, resolve_stage_model
from rl_core.analysis import analyze as analyze_trajectories
from rl_core.analysis.comparison import DivergentEpisode, ModelDiff, PairedGroup, diff_models
from rl_core.errors import SettingsError
from rl_core.settings import AnalysisSettings
from tasks.config import PipelineSettings
from tasks.pipeline.run_tracking import choose_start_time
from tasks.stages.analyze import (
    build_image_function,
    find_trajectories,
    list_image_tools,
    log_analysis,
)
from tasks.stages.evaluate import resolve_trajectories_path
from tasks.stages.loading import build_pipeline_environment
from tasks.tracking import Tracking

_MAX_TEXT_CHARACTERS = 160  # of an action or a prompt


def analyze_trajectory_files(
    paths: Sequence[Path], settings: PipelineSettings | None, out: Path
) -> Path:
    """Analyse trajectory files (or all in a folder), oldest model first; return the report's path.

    With a config, the result is logged as a run of its experiment, and the report shows the environment's images.
    Raises: DataError if there is no trajectory file, or one cannot be read.
    """
    models = find_trajectories(paths)
    if settings is None:
        return analyze_trajectories(models, out, AnalysisSettings()).report
    environment = build_pipeline_environment(settings, None)
    result = analyze_trajectories(
        models,
        out,
        settings.stages.analyze or AnalysisSettings(),
        image_of=build_image_function(environment),
        image_tools=list_image_tools(environment),
    )
    output = Path(settings.output).resolve()
    tracking = Tracking(
        settings.tracking.uri, output, settings.tracking.experiment or settings.name
    )
    analyses = output / settings.name / "analyses"
    started = choose_start_time(analyses)
    folder = analyses / started.replace(" ", "-").replace(":", "-")
    run = tracking.start_run(
        f"analysis · {started}", folder, tags={"kind": "analysis", "models": ", ".join(models)}
    )
    log_analysis(run, result)
    run.close()
    return result.report


def resolve_diffed_models(
    settings: PipelineSettings, references: tuple[str, str]
) -> dict[str, str]:
    """Return name -> model of the two, in their order.

    Raises: SettingsError for a reference that is no model, or if both are the same.
    """
    home = Path(settings.output).resolve() / settings.name
    models = resolve_model_references([resolve_stage_model(name, home) for name in references])
    if len(models) != 2:
        raise SettingsError(
            f"{references[0]}: no model; name a folder, a stage, a hub name or models:/NAME@ALIAS"
        )
    return models


def evaluate_diff(
    settings: PipelineSettings, models: dict[str, str], *, examples: int, quiet: bool
) -> tuple[ModelDiff, bool]:
    """Compare two models on the config's held-out episodes; return the difference, and whether success is known.

    Episodes that both played before with these settings are taken from the cache.
    """
    from flows.single_stage import evaluate_models

    result = evaluate_models(settings, models, quiet=quiet).results["evaluate"]
    first, second = models
    paths = (
        resolve_trajectories_path(result.path, first),
        resolve_trajectories_path(result.path, second),
    )
    diff = diff_models(paths, (first, second), examples=examples, seed=settings.seed)
    return diff, all(row["knows_success"] for row in result.summary["models"].values())


def format_diff(diff: ModelDiff, *, knows_success: bool = True) -> str:
    """Format the difference for the terminal."""
    paired = diff.paired
    lines = [f"A  {paired.first}", f"B  {paired.second}", ""]
    if knows_success:
        lines.append(f"B - A in success  {_format_gain(paired.total)}")
        lines.append(
            f"                  better on {paired.total.wins}, worse on {paired.total.losses} of "
            f"{paired.total.episodes} episodes; exact p: sign-flip {diff.exact_p_value:.3g}, sign {paired.p_value:.3g}"
        )
    else:
        lines.append("success is unknown: the environment has no verifier")
    reward = paired.reward
    lines.append(
        f"B - A in reward   {reward.difference:+.4f} [{reward.low:+.4f}, {reward.high:+.4f}]"
    )
    if paired.only_first or paired.only_second:
        lines.append(
            f"not paired        {paired.only_first} episodes of A alone, {paired.only_second} of B alone"
        )
    if knows_success:
        lines += [
            "",
            "by level and kind",
            *(f"  {row.name:<16} {_format_gain(row)}" for row in _list_paired_groups(diff)),
        ]
        lines += [
            "",
            "what got worse: "
            + (", ".join(_format_regression(row) for row in diff.worse) or "no level and no kind"),
        ]
    lines += ["", "behaviour, A -> B", *_format_behaviour(diff)]
    for title, episodes in (("lost: A did better", diff.lost), ("won: B did better", diff.won)):
        if episodes:
            lines += [
                "",
                title,
                *(line for episode in episodes for line in _format_episode(episode)),
            ]
    return "\n".join(lines)


def _list_paired_groups(diff: ModelDiff) -> list[PairedGroup]:
    return [*diff.paired.by_level, *diff.paired.by_kind]


def _format_gain(row: PairedGroup) -> str:
    success = row.success
    interval = f"[{100 * success.low:+.1f}, {100 * success.high:+.1f}]"
    return f"{100 * success.difference:+.1f} points {interval}, {row.episodes} episodes"


def _format_regression(row: PairedGroup) -> str:
    note = "" if row.success.high < 0 else " (the interval holds 0)"
    return f"{row.name} {100 * row.success.difference:+.1f}{note}"


def _format_behaviour(diff: ModelDiff) -> list[str]:
    before, after = diff.behaviour
    rows: list[tuple[str, Any, Any, str]] = [
        ("turns", before.turns, after.turns, ".2f"),
        ("tool calls", before.tool_calls, after.tool_calls, ".2f"),
        ("action tokens", before.action_tokens, after.action_tokens, ".1f"),
        ("misuse of tools", before.misuse_rate, after.misuse_rate, ".1%"),
        ("cut by a limit", before.truncated_rate, after.truncated_rate, ".1%"),
        ("lucky successes", before.ungrounded_rate, after.ungrounded_rate, ".1%"),
    ]
    tools = sorted(before.tools.keys() | after.tools.keys())
    rows += [
        (f"calls of {name}", before.tools.get(name, 0.0), after.tools.get(name, 0.0), ".2f")
        for name in tools
    ]
    return [
        f"  {name:<16} {first:{number_format}} -> {second:{number_format}}"
        for name, first, second, number_format in rows
        if first or second
    ]


def _format_episode(episode: DivergentEpisode) -> list[str]:
    head = f"  {episode.level} {episode.seed} ({episode.kind}): {_shorten_text(episode.prompt)}"
    if episode.turn is None:
        return [head, f"    the same actions; ends {episode.ends[0]} and {episode.ends[1]}"]
    lines = [head, f"    they diverge at turn {episode.turn + 1}"]
    for letter, action, observation, end in zip(
        "AB", episode.actions, episode.observations, episode.ends, strict=True
    ):
        outcome = f"{_shorten_text(action)!r}" if action else f"had ended ({end})"
        lines.append(
            f"      {letter}: {outcome}"
            + (f" -> {_shorten_text(observation)!r}" if observation else "")
        )
    return lines


def _shorten_text(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT_CHARACTERS else f"{line[: _MAX_TEXT_CHARACTERS - 3]}..."
