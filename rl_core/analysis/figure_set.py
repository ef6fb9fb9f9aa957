"""Figures of an analysis, in order, with captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core.analysis.canvas import COLORS, color_of
from rl_core.analysis.figures import (
    differences,
    distributions,
    pass_at_k,
    reward_parts,
    success_by_group,
    tool_heat_map,
)
from rl_core.analysis.probe_figures import calibration, entropy_and_kl
from rl_core.analysis.results import Analysis, ModelResult
from rl_core.analysis.training_curves import TrainingCurves
from rl_core.analysis.training_figure import training as draw_training

__all__ = ["draw"]


def draw(
    analysis: Analysis, curves: Mapping[str, TrainingCurves], out: Path, curriculum: Sequence[str] = ()
) -> list[tuple[Path, str]]:
    """Draw all figures for which there is data; returns (path, caption)."""
    models = analysis.models
    colors = {model.name: color_of(index) for index, model in enumerate(models)}
    drawn: list[tuple[Path, str]] = []
    by_level = {m.name: {"all": m.total, **m.by_level} for m in models}
    path = success_by_group(out / "success_by_level.png", by_level, "Success by level")
    drawn.append((path, "How often does each model succeed at each level? Held-out episodes, with 95% intervals."))
    if len({kind for m in models for kind in m.by_kind}) > 1:
        by_kind = {m.name: m.by_kind for m in models}
        path = success_by_group(out / "success_by_kind.png", by_kind, "Success by kind of question")
        drawn.append((path, "Which kinds of question are hard? Success on held-out episodes."))
    shown = [pair for pair in analysis.comparisons if pair.first == models[0].name]
    rows = [
        (f"{'all' if row is pair.total else row.name}: {pair.second}", row.success, row.episodes, colors[pair.second])
        for pair in shown
        for row in (pair.total, *pair.by_level)
    ]
    if rows:
        title = f"Paired difference to {models[0].name}"
        path = differences(out / "differences.png", rows, title)
        drawn.append(
            (
                path,
                "Which differences are real? Paired on the same episodes; right of the line is better, hollow dots: "
                "the interval includes zero.",
            )
        )
    panels = {
        label: {m.name: m.summary.distributions[name].reservoir.items for m in models}
        for name, label in (("reward", "reward"), ("action_tokens", "sampled tokens"), ("turns", "turns"))
    }
    path = distributions(out / "distributions.png", panels)
    drawn.append((path, "Did episodes get longer or shorter? Reward and length of the trajectories."))
    if any(len(m.pass_at_k) > 1 for m in models):
        path = pass_at_k(out / "pass_at_k.png", {m.name: m.pass_at_k for m in models})
        drawn.append((path, "Would more samples help? pass@k: at least one of k samples of an episode succeeds."))
    drawn += _draw_tools(models, out)
    if any(len(m.summary.rewards) > 1 for m in models):
        parts = {
            m.name: {
                name: moments.mean
                for name, moments in m.summary.rewards.items()
                if not name.startswith("weighted/")  # weighted contributions have another scale
            }
            for m in models
        }
        drawn.append((reward_parts(out / "rewards.png", parts), "Where does the reward come from? Mean of each part."))
    drawn += _draw_probes(analysis, out)
    for number, (name, run) in enumerate(curves.items()):
        path = out / f"training_{number}.png"
        if draw_training(path, run, name, colors.get(name, COLORS[6]), curriculum) is not None:
            drawn.append((path, f"How did training of {name} go?"))
    return drawn


def _draw_probes(analysis: Analysis, out: Path) -> list[tuple[Path, str]]:
    """Draw entropy, KL and reward model calibration."""
    drawn = []
    probes = {m.name: m.probe for m in analysis.models if m.probe is not None and m.probe.entropy_by_turn}
    if probes:
        path = entropy_and_kl(out / "entropy_and_kl.png", probes, analysis.models[0].name)
        drawn.append((path, "How far did each model move? Entropy and KL from the first, on its own episodes."))
    if analysis.probes.reward_model is not None:
        path = calibration(out / "reward_model.png", analysis.probes.reward_model)
        drawn.append((path, "Can the reward model be trusted? Its scores against true success, on all episodes."))
    return drawn


def _draw_tools(models: Sequence[ModelResult], out: Path) -> list[tuple[Path, str]]:
    """Draw heat maps of tool calls and misuse."""
    drawn = []
    wanted = (
        ("tools", "calls", "Tool calls", "calls per episode", 2, "Which tools are used?"),
        ("misuse", "errors", "Misuse", "errors per 100 episodes", 1, "Which tools are misused?"),
    )
    for name, attribute, title, label, digits, question in wanted:
        scale = 100 if attribute == "errors" else 1
        tables = {
            model.name: {
                level: {tool: scale * n / tools.trajectories for tool, n in getattr(tools, attribute).most_common(12)}
                for (_, level), tools in model.summary.tools.items()
            }
            for model in models
        }
        if any(row for table in tables.values() for row in table.values()):
            path = tool_heat_map(out / f"{name}.png", tables, title, label, digits)
            drawn.append((path, f"{question} {label.capitalize()}, by level."))
    return drawn
