"""Figures of an analysis as PNG files, in order, with captions.

Each function takes plain numbers, writes one file and returns its path. Figures cover evaluation results, reward model
calibration, and entropy and KL by turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.analysis.canvas import (
    COLORS,
    FAINT,
    INK,
    MUTED,
    draw_legend,
    label_axes,
    open_canvas,
    select_model_color,
    shorten_text,
)
from rl_core.analysis.results import (
    AnalysisData,
    ModelProbeResult,
    ModelResult,
    RewardModelCalibration,
)
from rl_core.analysis.statistics import Difference, Rate
from rl_core.analysis.training_curves import TrainingCurves
from rl_core.analysis.training_curves import draw_training_run as draw_training

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_success_rates(path: Path, rates: Mapping[str, Mapping[str, Rate]], title: str) -> Path:
    """Draw success rates with 95% intervals: one cluster of bars per group (level or kind), one bar per model."""
    groups = list(dict.fromkeys(group for by_group in rates.values() for group in by_group))
    width = 0.8 / len(rates)
    with open_canvas(
        path, (max(6.4, 1.6 + 0.55 * len(groups) * max(2, len(rates))), 4.2)
    ) as figure:
        axes = figure.add_subplot()
        for index, (model, by_group) in enumerate(rates.items()):
            shown = [
                (place, by_group[group]) for place, group in enumerate(groups) if group in by_group
            ]
            places = [place + (index - (len(rates) - 1) / 2) * width for place, _ in shown]
            values = [100 * rate.rate for _, rate in shown]
            # Rounding may put a bound past the rate by 1e-16, and matplotlib refuses negative error bars.
            lows = [max(0.0, 100 * (rate.rate - rate.low)) for _, rate in shown]
            highs = [max(0.0, 100 * (rate.high - rate.rate)) for _, rate in shown]
            axes.bar(
                places, values, width * 0.92, color=select_model_color(index), label=model, zorder=2
            )
            axes.errorbar(
                places,
                values,
                [lows, highs],
                fmt="none",
                ecolor=INK,
                elinewidth=1.1,
                capsize=2.5,
                zorder=3,
            )
            for place, value, high in zip(places, values, highs, strict=True):
                axes.annotate(
                    f"{value:.0f}",
                    (place, value + high),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=INK,
                )
        axes.set_xticks(
            range(len(groups)),
            [shorten_text(group) for group in groups],
            rotation=0 if len(groups) < 7 else 25,
        )
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
        label_axes(axes, title, "", "success, % of episodes (bars: 95% interval)", grid="y")
        draw_legend(figure, axes, len(rates))
    return path


def draw_differences(
    path: Path, rows: Sequence[tuple[str, Difference, int, str]], title: str
) -> Path:
    """Draw paired differences of success in percentage points, with intervals and a zero line.

    Filled dot: the interval excludes 0; hollow: not significant.
    rows: (label, difference of shares, episodes compared, colour of the model), top to bottom.
    """
    with open_canvas(path, (7.2, 1.5 + 0.36 * len(rows))) as figure:
        axes = figure.add_subplot()
        axes.axvline(0, color=INK, linewidth=1, zorder=1)
        for place, (label, difference, _, color) in enumerate(rows):
            low, high = 100 * difference.low, 100 * difference.high
            axes.plot(
                [low, high],
                [place, place],
                color=color,
                linewidth=2.4,
                solid_capstyle="round",
                zorder=2,
            )
            size = 9 if label.startswith("all") else 7
            face = color if low > 0 or high < 0 else "white"
            axes.plot(
                100 * difference.difference,
                place,
                "o",
                color=color,
                markerfacecolor=face,
                markeredgewidth=1.8,
                markersize=size,
                zorder=3,
            )
        axes.set_yticks(
            range(len(rows)), [f"{shorten_text(label, 34)}  (n={n:,})" for label, _, n, _ in rows]
        )
        axes.set_ylim(len(rows) - 0.5, -0.5)
        reach = (
            max([1.0, *(abs(100 * bound) for _, d, _, _ in rows for bound in (d.low, d.high))])
            * 1.1
        )
        axes.set_xlim(-reach if any(d.low < 0 for _, d, _, _ in rows) else -0.08 * reach, reach)
        label_axes(
            axes,
            title,
            "difference of success, percentage points (bars: 95% interval)",
            "",
            grid="x",
        )
    return path


def draw_distributions(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    """Draw histograms, one panel per quantity (its name is the x label), one outline per model."""
    with open_canvas(path, (4.1 * len(panels), 3.7)) as figure:
        for axes, (name, by_model) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            edges = _choose_bin_edges([value for values in by_model.values() for value in values])
            for index, (model, values) in enumerate(by_model.items()):
                if not len(values):
                    continue
                # Values beyond the last edge (the top 0.5%) go to the last bin.
                shares = (
                    np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] * 100 / len(values)
                )
                color = select_model_color(index)
                axes.stairs(shares, edges, color=color, linewidth=1.8, label=model, zorder=3)
                axes.stairs(shares, edges, color=color, fill=True, alpha=0.13, zorder=2)
                axes.axvline(
                    float(np.mean(values)),
                    color=color,
                    linestyle=(0, (2, 2)),
                    linewidth=1.2,
                    zorder=1,
                )
            label_axes(axes, "", f"{name} (dashed: mean)", "", grid="y")
            axes.set_ylim(bottom=0)
            if _has_integer_bins(edges):
                axes.xaxis.get_major_locator().set_params(integer=True)
        figure.axes[0].set_ylabel("share of trajectories, %")
        figure.suptitle(
            "Distributions of rewards and lengths",
            x=0.01,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        draw_legend(figure, figure.axes[0], len(next(iter(panels.values()))))
    return path


def draw_tool_heat_map(
    path: Path,
    models: Mapping[str, Mapping[str, Mapping[str, float]]],
    title: str,
    label: str,
    digits: int = 1,
) -> Path:
    """Draw a heat map per model: tools as columns, levels as rows.

    models: model -> level -> tool -> value; label: of the colour bar.
    """
    levels = list(dict.fromkeys(level for table in models.values() for level in table))
    tools = list(
        dict.fromkeys(tool for table in models.values() for row in table.values() for tool in row)
    )
    top = max(
        [
            1e-9,
            *(
                value
                for table in models.values()
                for row in table.values()
                for value in row.values()
            ),
        ]
    )
    size = (1.9 + len(models) * (0.75 * len(tools) + 0.5), 1.7 + 0.48 * len(levels))
    with open_canvas(path, (max(6.4, size[0]), size[1])) as figure:
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, (model, table) in zip(panels, models.items(), strict=True):
            cells = np.array(
                [[table.get(level, {}).get(tool, 0.0) for tool in tools] for level in levels]
            )
            image = axes.imshow(cells, cmap="cividis", vmin=0, vmax=top, aspect="auto")
            for row, column in np.ndindex(cells.shape):
                value = cells[row, column]
                color = "white" if value < 0.6 * top else "black"
                axes.text(
                    column,
                    row,
                    f"{value:.{digits}f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=color,
                )
            axes.set_xticks(
                range(len(tools)),
                [shorten_text(tool, 14) for tool in tools],
                rotation=30,
                ha="right",
            )
            axes.set_yticks(range(len(levels)), [shorten_text(level) for level in levels])
            axes.set_title(shorten_text(model), fontsize=10, color=INK)
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        figure.colorbar(image, ax=list(panels), label=label, pad=0.015, fraction=0.05)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return path


def draw_reward_components(path: Path, components: Mapping[str, Mapping[str, float]]) -> Path:
    """Mean of each raw reward component: one cluster of bars per component, one bar per model.

    parts: model -> component -> mean.
    """
    names = list(dict.fromkeys(name for by_name in components.values() for name in by_name))
    height = 0.8 / len(components)
    with open_canvas(path, (7.2, 1.5 + 0.3 * len(names) * max(2, len(components)))) as figure:
        axes = figure.add_subplot()
        for index, (model, by_name) in enumerate(components.items()):
            places = [
                place + (index - (len(components) - 1) / 2) * height for place in range(len(names))
            ]
            values = [by_name.get(name, 0.0) for name in names]
            bars = axes.barh(
                places,
                values,
                height * 0.92,
                color=select_model_color(index),
                label=model,
                zorder=2,
            )
            axes.bar_label(
                bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8, color=INK
            )
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), [shorten_text(name) for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        label_axes(
            axes, "Reward components", "mean over trajectories, before weighting", "", grid="x"
        )
        draw_legend(figure, axes, len(components))
    return path


def draw_pass_at_k(path: Path, curves: Mapping[str, Mapping[int, float]]) -> Path:
    """Draw pass@k over k, one line per model."""
    with open_canvas(path, (5.6, 4.0)) as figure:
        axes = figure.add_subplot()
        for index, (model, by_k) in enumerate(curves.items()):
            ks = sorted(by_k)
            values = [100 * by_k[k] for k in ks]
            axes.plot(
                ks,
                values,
                "o-",
                color=select_model_color(index),
                linewidth=2,
                label=model,
                zorder=3,
            )
            axes.annotate(
                f"{values[-1]:.0f}",
                (ks[-1], values[-1]),
                xytext=(7, -3),
                textcoords="offset points",
                fontsize=8,
            )
        shown = sorted({k for by_k in curves.values() for k in by_k})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [str(k) for k in shown])
        axes.minorticks_off()
        axes.set_ylim(-3, 104)
        label_axes(
            axes,
            "pass@k",
            "k, samples of one episode",
            "solved by at least one, % of episodes",
            grid="y",
        )
        draw_legend(figure, axes, len(curves))
    return path


def _choose_bin_edges(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Choose bin edges: one bin per integer if they are few, else 30 equal-width bins up to the 99.5th percentile."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return np.array([0.0, 1.0])
    low, high = float(array.min()), float(np.quantile(array, 0.995))
    if np.all(array == np.round(array)) and high - low <= 40:
        return np.arange(low - 0.5, high + 1.5)
    if high <= low:
        return np.array([low - 0.5, low + 0.5])
    return np.linspace(low, high, 31)


def _has_integer_bins(edges: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Return whether every bin is one integer."""
    return bool(np.all(edges - np.floor(edges) == 0.5)) and bool(np.all(np.diff(edges) == 1))


def draw_calibration(path: Path, calibration: RewardModelCalibration) -> Path:
    """Draw the reward model's reliability diagram and its score distributions for successes and failures."""
    with open_canvas(path, (10.4 if calibration.bins else 5.4, 4.2)) as figure:
        panels = figure.subplots(1, 2 if calibration.bins else 1, squeeze=False)[0]
        if calibration.bins:
            _draw_reliability(panels[0], calibration)
        axes = panels[-1]
        scores, right = np.array(calibration.scores), np.array(calibration.successes, dtype=bool)
        edges = np.histogram_bin_edges(scores, 24)
        shown = ((~right, "failures", COLORS[4]), (right, "successes", INK))
        for chosen, label, color in shown:
            if chosen.any():
                shares = 100 * np.histogram(scores[chosen], edges)[0] / chosen.sum()
                axes.stairs(
                    shares,
                    edges,
                    color=color,
                    linewidth=1.8,
                    label=f"{label} ({chosen.sum():,})",
                    zorder=3,
                )
                axes.stairs(shares, edges, color=color, fill=True, alpha=0.15, zorder=2)
        title = "Scores" if calibration.auc is None else f"Scores: AUC {calibration.auc:.3f}"
        title += (
            ""
            if calibration.correlation is None
            else f", correlation with success {calibration.correlation:.2f}"
        )
        label_axes(
            axes, title, "score of the reward model", "% of successes, of failures", grid="y"
        )
        axes.legend(frameon=False, fontsize=9, loc="best")
    return path


def _draw_reliability(axes: Axes, calibration: RewardModelCalibration) -> None:
    """Draw the reliability diagram; on the diagonal, accuracy equals confidence."""
    axes.plot([50, 100], [50, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    places = [100 * b.confidence for b in calibration.bins]
    values = [100 * b.right.rate for b in calibration.bins]
    lows = [max(0.0, 100 * (b.right.rate - b.right.low)) for b in calibration.bins]
    highs = [max(0.0, 100 * (b.right.high - b.right.rate)) for b in calibration.bins]
    axes.errorbar(
        places, values, [lows, highs], fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5, zorder=2
    )
    axes.plot(places, values, "o-", color=INK, linewidth=1.6, markersize=6, zorder=3)
    floor = min(45.0, *(value - low - 4 for value, low in zip(values, lows, strict=True)))
    for place, b in zip(places, calibration.bins, strict=True):
        axes.annotate(
            f"{b.right.n:,}",
            (place, floor),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=MUTED,
        )
    axes.set_xlim(48, 102)
    axes.set_ylim(floor, 103)
    title = f"Reliability: calibration error {calibration.ece:.3f}, {calibration.pairs:,} pairs"
    label_axes(
        axes,
        title,
        "confidence in the order of a pair, % (below: pairs)",
        "accuracy, % (bars: 95%)",
        grid="y",
    )
    axes.grid(axis="x", color=FAINT, linewidth=0.5, zorder=0)


def draw_entropy_and_kl(path: Path, probes: Mapping[str, ModelProbeResult], first: str) -> Path:
    """Draw each model's entropy and its KL from the first, by turn, over its trajectories."""
    has_kl = any(probe.kl_by_turn for probe in probes.values())
    with open_canvas(path, (9.2 if has_kl else 4.8, 3.8)) as figure:
        panels = figure.subplots(1, 2 if has_kl else 1, squeeze=False)[0]
        for index, (name, probe) in enumerate(probes.items()):
            for axes, values in zip(
                panels, (probe.entropy_by_turn, probe.kl_by_turn), strict=False
            ):
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    "o-",
                    color=select_model_color(index),
                    linewidth=2,
                    label=name,
                    zorder=3,
                )
        label_axes(panels[0], "Entropy", "turn", "nats per sampled token", grid="y")
        if has_kl:
            label_axes(panels[1], f"KL from {first}", "turn", "nats per sampled token", grid="y")
        for axes in panels:
            axes.set_ylim(
                0, 1.06 * max(axes.get_ylim()[1], 1e-3)
            )  # KL is 0 everywhere for an unchanged model
            axes.xaxis.get_major_locator().set_params(integer=True)
        draw_legend(figure, panels[0], len(probes))
    return path


def draw_analysis_figures(
    analysis: AnalysisData,
    curves: Mapping[str, TrainingCurves],
    out: Path,
    curriculum: Sequence[str] = (),
) -> list[tuple[Path, str]]:
    """Draw all figures for which there is data; returns (path, caption)."""
    models = analysis.models
    colors = {model.name: select_model_color(index) for index, model in enumerate(models)}
    drawn: list[tuple[Path, str]] = []
    by_level = {
        m.name: {"all": m.total, **m.by_level} for m in models if m.total is not None
    }  # {} = success is unknown
    if by_level:
        path = draw_success_rates(out / "success_by_level.png", by_level, "Success by level")
        drawn.append(
            (
                path,
                "How often does each model succeed at each level? Held-out episodes, with 95% intervals.",
            )
        )
    if len({kind for m in models for kind in m.by_kind}) > 1:
        by_kind = {m.name: m.by_kind for m in models}
        path = draw_success_rates(
            out / "success_by_kind.png", by_kind, "Success by kind of question"
        )
        drawn.append((path, "Which kinds of question are hard? Success on held-out episodes."))
    shown = [pair for pair in analysis.comparisons if pair.first == models[0].name]
    rows = [
        (
            f"{'all' if row is pair.total else row.name}: {pair.second}",
            row.success,
            row.episodes,
            colors[pair.second],
        )
        for pair in shown
        for row in (pair.total, *pair.by_level)
        if row.success is not None
    ]
    if rows:
        title = f"Paired difference to {models[0].name}"
        path = draw_differences(out / "differences.png", rows, title)
        drawn.append(
            (
                path,
                "Which differences are real? Paired on the same episodes; right of the line is better, hollow dots: "
                "the interval includes zero.",
            )
        )
    panels = {
        label: {m.name: m.summary.distributions[name].reservoir.items for m in models}
        for name, label in (
            ("reward", "reward"),
            ("action_tokens", "sampled tokens"),
            ("turns", "turns"),
        )
    }
    path = draw_distributions(out / "distributions.png", panels)
    drawn.append(
        (path, "Did episodes get longer or shorter? Reward and length of the trajectories.")
    )
    if any(len(m.pass_at_k) > 1 for m in models):
        path = draw_pass_at_k(out / "pass_at_k.png", {m.name: m.pass_at_k for m in models})
        caption = (
            "Would more samples help? pass@k: at least one of k samples of an episode succeeds."
        )
        drawn.append((path, caption))
    drawn += _draw_tool_figures(models, out)
    if any(len(m.summary.rewards) > 1 for m in models):
        parts = {
            m.name: {
                name: moments.mean
                for name, moments in m.summary.rewards.items()
                if not name.startswith("weighted/")  # weighted contributions have another scale
            }
            for m in models
        }
        path = draw_reward_components(out / "rewards.png", parts)
        drawn.append((path, "Where does the reward come from? Mean of each part."))
    drawn += _draw_probe_figures(analysis, out)
    for number, (name, run) in enumerate(curves.items()):
        path = out / f"training_{number}.png"
        if draw_training(path, run, name, colors.get(name, COLORS[6]), curriculum) is not None:
            drawn.append((path, f"How did training of {name} go?"))
    return drawn


def _draw_probe_figures(analysis: AnalysisData, out: Path) -> list[tuple[Path, str]]:
    """Draw entropy, KL and reward model calibration."""
    drawn = []
    probes = {
        m.name: m.probe for m in analysis.models if m.probe is not None and m.probe.entropy_by_turn
    }
    if probes:
        path = draw_entropy_and_kl(out / "entropy_and_kl.png", probes, analysis.models[0].name)
        drawn.append(
            (
                path,
                "How far did each model move? Entropy, and KL from the first model, on each model's own episodes.",
            )
        )
    if analysis.probes.reward_model is not None:
        path = draw_calibration(out / "reward_model.png", analysis.probes.reward_model)
        drawn.append(
            (
                path,
                "Can the reward model be trusted? Its scores against true success, on all episodes.",
            )
        )
    return drawn


def _draw_tool_figures(models: Sequence[ModelResult], out: Path) -> list[tuple[Path, str]]:
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
                level: {
                    tool: scale * n / tools.trajectories
                    for tool, n in getattr(tools, attribute).most_common(12)
                }
                for (_, level), tools in model.summary.tools.items()
            }
            for model in models
        }
        if any(row for table in tables.values() for row in table.values()):
            path = draw_tool_heat_map(out / f"{name}.png", tables, title, label, digits)
            drawn.append((path, f"{question} {label.capitalize()}, by level."))
    return drawn
