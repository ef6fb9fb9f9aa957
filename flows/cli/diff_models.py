"""`posttrain diff`: two models on the same held-out episodes: how they differ, what got worse, and where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.cli.model_names import given_models
from flows.cli.stage_models import stage_model
from rl_core.analysis.comparison import PairedRow
from rl_core.analysis.model_diff import ModelDiff, PartedEpisode, diff_models
from rl_core.errors import SettingsError
from tasks.config import PipelineSettings
from tasks.stages.evaluate import trajectories_path

__all__ = ["models_to_diff", "played_diff", "text_of_diff"]

_SHOWN = 160  # characters of an action or a prompt


def models_to_diff(settings: PipelineSettings, wanted: tuple[str, str]) -> dict[str, str]:
    """Name -> model of the two, in their order. Raises: SettingsError for one that is none, or is named twice."""
    home = Path(settings.output).resolve() / settings.name
    models = given_models([stage_model(name, home) for name in wanted])
    if len(models) != 2:
        raise SettingsError(f"{wanted[0]}: no model; name a folder, a stage, a hub name or models:/NAME@ALIAS")
    return models


def played_diff(
    settings: PipelineSettings, models: dict[str, str], *, examples: int, quiet: bool
) -> tuple[ModelDiff, bool]:
    """The difference of two models on the config's held-out episodes; True = the environment knows success.

    Episodes that the two have played before with these settings are not played again.
    """
    from flows.single_stage import evaluate_models

    result = evaluate_models(settings, models, quiet=quiet).results["evaluate"]
    first, second = models
    paths = trajectories_path(result.path, first), trajectories_path(result.path, second)
    found = diff_models(paths, (first, second), examples=examples, seed=settings.seed)
    return found, all(row["knows_success"] for row in result.summary["models"].values())


def text_of_diff(diff: ModelDiff, *, knows_success: bool = True) -> str:
    """The difference for the terminal."""
    paired = diff.paired
    lines = [f"A  {paired.first}", f"B  {paired.second}", ""]
    if knows_success:
        lines.append(f"B - A in success  {_gain(paired.total)}")
        lines.append(
            f"                  better on {paired.total.wins}, worse on {paired.total.losses} of "
            f"{paired.total.episodes} episodes; exact p: sign-flip {diff.exact_p_value:.3g}, sign {paired.p_value:.3g}"
        )
    else:
        lines.append("success is not known here: no verifier tells it")
    reward = paired.reward
    lines.append(f"B - A in reward   {reward.difference:+.4f} [{reward.low:+.4f}, {reward.high:+.4f}]")
    if paired.only_first or paired.only_second:
        lines.append(f"not paired        {paired.only_first} episodes of A alone, {paired.only_second} of B alone")
    if knows_success:
        lines += ["", "by level and kind", *(f"  {row.name:<16} {_gain(row)}" for row in _groups(diff))]
        lines += ["", "what got worse: " + (", ".join(_worse(row) for row in diff.worse) or "no level and no kind")]
    lines += ["", "behaviour, A -> B", *_behaviour(diff)]
    for title, episodes in (("lost: A did better", diff.lost), ("won: B did better", diff.won)):
        if episodes:
            lines += ["", title, *(line for episode in episodes for line in _episode(episode))]
    return "\n".join(lines)


def _groups(diff: ModelDiff) -> list[PairedRow]:
    return [*diff.paired.by_level, *diff.paired.by_kind]


def _gain(row: PairedRow) -> str:
    gain = row.success
    return (
        f"{100 * gain.difference:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}], {row.episodes} episodes"
    )


def _worse(row: PairedRow) -> str:
    sure = "" if row.success.high < 0 else " (the interval holds 0)"
    return f"{row.name} {100 * row.success.difference:+.1f}{sure}"


def _behaviour(diff: ModelDiff) -> list[str]:
    one, other = diff.behaviour
    rows: list[tuple[str, Any, Any, str]] = [
        ("turns", one.turns, other.turns, ".2f"),
        ("tool calls", one.tool_calls, other.tool_calls, ".2f"),
        ("action tokens", one.action_tokens, other.action_tokens, ".1f"),
        ("misuse of tools", one.misuse_rate, other.misuse_rate, ".1%"),
        ("cut by a limit", one.truncated_rate, other.truncated_rate, ".1%"),
        ("lucky successes", one.ungrounded_rate, other.ungrounded_rate, ".1%"),
    ]
    tools = sorted(one.tools.keys() | other.tools.keys())
    rows += [(f"calls of {name}", one.tools.get(name, 0.0), other.tools.get(name, 0.0), ".2f") for name in tools]
    return [f"  {name:<16} {first:{form}} -> {second:{form}}" for name, first, second, form in rows if first or second]


def _episode(episode: PartedEpisode) -> list[str]:
    head = f"  {episode.level} {episode.seed} ({episode.kind}): {_short(episode.prompt)}"
    if episode.turn is None:
        return [head, f"    the same actions; ends {episode.ends[0]} and {episode.ends[1]}"]
    lines = [head, f"    they part at turn {episode.turn + 1}"]
    for letter, action, seen, end in zip("AB", episode.actions, episode.observations, episode.ends, strict=True):
        told = f"{_short(action)!r}" if action else f"had ended ({end})"
        lines.append(f"      {letter}: {told}" + (f" -> {_short(seen)!r}" if seen else ""))
    return lines


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
