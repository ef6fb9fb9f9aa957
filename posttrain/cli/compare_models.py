"""Comparison of two models on the same held-out episodes: differences, regressions, where they diverge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from rl_core.analysis.comparison import DivergentEpisode, ModelDiff, PairedGroup
    from tasks.config import PipelineSettings


_MAX_TEXT_CHARACTERS = 160  # of an action or a prompt


def compare_models(arguments: argparse.Namespace) -> int:
    """Compare the models of `posttrain compare --models`; print the difference. Raises: SettingsError, DataError."""
    target = run_setup.resolve_target(arguments, import_code=True)
    settings = run_setup.load_target_settings(target)
    models = resolve_diffed_models(settings, tuple(arguments.models))
    run_setup.refuse_unknown_models(settings, *models.values())
    run_setup.configure_prefect(settings)
    quiet = arguments.quiet or arguments.json
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=quiet, fresh=True, stages=["evaluate"]
    ):
        from flows.single_stage import evaluate_models
        from posttrain.cli.tables import print_requested_data
        from rl_core.analysis.comparison import diff_models
        from tasks.stages.evaluate import resolve_trajectories_path

    # Episodes that both played before with these settings are taken from the cache.
    result = evaluate_models(settings, models, quiet=quiet).results["evaluate"]
    first, second = models
    paths = (
        resolve_trajectories_path(result.path, first),
        resolve_trajectories_path(result.path, second),
    )
    diff = diff_models(paths, (first, second), examples=arguments.episodes, seed=settings.seed)
    knows_success = all(row["knows_success"] for row in result.summary["models"].values())
    if not print_requested_data(arguments, {**diff.to_json(), "knows_success": knows_success}):
        run_setup.print_wrapped(format_diff(diff, knows_success=knows_success))
    return 0


def resolve_diffed_models(
    settings: PipelineSettings, references: tuple[str, str]
) -> dict[str, str]:
    """Return name -> model of the two, in their order.

    Raises: SettingsError for a reference that is no model, or if both are the same.
    """
    from posttrain.cli.model_references import resolve_model_references, resolve_stage_model

    home = Path(settings.output).resolve() / settings.name
    models = resolve_model_references([resolve_stage_model(name, home) for name in references])
    if len(models) != 2:
        raise SettingsError(
            f"{references[0]}: no model; name a folder, a stage, a hub name or models:/NAME@ALIAS"
        )
    return models


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
    if success is None:
        return f"unknown, {row.episodes} episodes"
    interval = f"[{100 * success.low:+.1f}, {100 * success.high:+.1f}]"
    return f"{100 * success.difference:+.1f} points {interval}, {row.episodes} episodes"


def _format_regression(row: PairedGroup) -> str:
    if row.success is None:
        return row.name
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
