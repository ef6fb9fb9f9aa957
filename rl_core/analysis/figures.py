"""Figures of evaluation results as PNG files. Each function takes plain numbers, writes one file, returns its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.analysis.canvas import INK, canvas, color_of, label_axes, legend, short
from rl_core.analysis.statistics import Difference, Rate

__all__ = ["differences", "distributions", "pass_at_k", "reward_parts", "success_by_group", "tool_heat_map"]


def success_by_group(path: Path, rates: Mapping[str, Mapping[str, Rate]], title: str) -> Path:
    """Success rates with 95% intervals: one cluster of bars per group (level or kind), one bar per model."""
    groups = list(dict.fromkeys(group for by_group in rates.values() for group in by_group))
    width = 0.8 / len(rates)
    with canvas(path, (max(6.4, 1.6 + 0.55 * len(groups) * max(2, len(rates))), 4.2)) as figure:
        axes = figure.add_subplot()
        for index, (model, by_group) in enumerate(rates.items()):
            shown = [(place, by_group[group]) for place, group in enumerate(groups) if group in by_group]
            places = [place + (index - (len(rates) - 1) / 2) * width for place, _ in shown]
            values = [100 * rate.rate for _, rate in shown]
            # Rounding may put a bound past the rate by 1e-16, and matplotlib refuses negative error bars.
            lows = [max(0.0, 100 * (rate.rate - rate.low)) for _, rate in shown]
            highs = [max(0.0, 100 * (rate.high - rate.rate)) for _, rate in shown]
            axes.bar(places, values, width * 0.92, color=color_of(index), label=model, zorder=2)
            axes.errorbar(places, values, [lows, highs], fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5, zorder=3)
            for place, value, high in zip(places, values, highs, strict=True):
                axes.annotate(
                    f"{value:.0f}", (place, value + high), xytext=(0, 3), textcoords="offset points",
                    ha="center", fontsize=8, color=INK,
                )  # fmt: skip
        axes.set_xticks(range(len(groups)), [short(group) for group in groups], rotation=0 if len(groups) < 7 else 25)
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
        label_axes(axes, title, "", "success, % of episodes (bars: 95% interval)", grid="y")
        legend(figure, axes, len(rates))
    return path


def differences(path: Path, rows: Sequence[tuple[str, Difference, int, str]], title: str) -> Path:
    """Paired differences of success in percentage points, with intervals and a zero line.

    Filled dot: the interval excludes 0; hollow: not significant.
    rows: (label, difference of shares, episodes compared, colour of the model), top to bottom.
    """
    with canvas(path, (7.2, 1.5 + 0.36 * len(rows))) as figure:
        axes = figure.add_subplot()
        axes.axvline(0, color=INK, linewidth=1, zorder=1)
        for place, (label, difference, _, color) in enumerate(rows):
            low, high = 100 * difference.low, 100 * difference.high
            axes.plot([low, high], [place, place], color=color, linewidth=2.4, solid_capstyle="round", zorder=2)
            size = 9 if label.startswith("all") else 7
            face = color if low > 0 or high < 0 else "white"
            axes.plot(
                100 * difference.difference, place, "o", color=color, markerfacecolor=face, markeredgewidth=1.8,
                markersize=size, zorder=3,
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), [f"{short(label, 34)}  (n={n:,})" for label, _, n, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        reach = max([1.0, *(abs(100 * bound) for _, d, _, _ in rows for bound in (d.low, d.high))]) * 1.1
        axes.set_xlim(-reach if any(d.low < 0 for _, d, _, _ in rows) else -0.08 * reach, reach)
        label_axes(axes, title, "difference of success, percentage points (bars: 95% interval)", "", grid="x")
    return path


def distributions(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    """Histograms, one panel per quantity (its name is the x label), one outline per model."""
    with canvas(path, (4.1 * len(panels), 3.7)) as figure:
        for axes, (name, by_model) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            edges = _bins([value for values in by_model.values() for value in values])
            for index, (model, values) in enumerate(by_model.items()):
                if not len(values):
                    continue
                # Values beyond the last edge (the top 0.5%) go to the last bin.
                shares = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] * 100 / len(values)
                color = color_of(index)
                axes.stairs(shares, edges, color=color, linewidth=1.8, label=model, zorder=3)
                axes.stairs(shares, edges, color=color, fill=True, alpha=0.13, zorder=2)
                axes.axvline(float(np.mean(values)), color=color, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
            label_axes(axes, "", f"{name} (dashed: mean)", "", grid="y")
            axes.set_ylim(bottom=0)
            if _whole(edges):
                axes.xaxis.get_major_locator().set_params(integer=True)
        figure.axes[0].set_ylabel("share of trajectories, %")
        figure.suptitle("Distributions of rewards and lengths", x=0.01, ha="left", fontsize=12, fontweight="bold")
        legend(figure, figure.axes[0], len(next(iter(panels.values()))))
    return path


def tool_heat_map(
    path: Path, models: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, label: str, digits: int = 1
) -> Path:
    """Heat map per model: tools as columns, levels as rows.

    models: model -> level -> tool -> value; label: of the colour bar.
    """
    levels = list(dict.fromkeys(level for table in models.values() for level in table))
    tools = list(dict.fromkeys(tool for table in models.values() for row in table.values() for tool in row))
    top = max([1e-9, *(value for table in models.values() for row in table.values() for value in row.values())])
    size = (1.9 + len(models) * (0.75 * len(tools) + 0.5), 1.7 + 0.48 * len(levels))
    with canvas(path, (max(6.4, size[0]), size[1])) as figure:
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, (model, table) in zip(panels, models.items(), strict=True):
            cells = np.array([[table.get(level, {}).get(tool, 0.0) for tool in tools] for level in levels])
            image = axes.imshow(cells, cmap="cividis", vmin=0, vmax=top, aspect="auto")
            for row, column in np.ndindex(cells.shape):
                value = cells[row, column]
                color = "white" if value < 0.6 * top else "black"
                axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=9, color=color)
            axes.set_xticks(range(len(tools)), [short(tool, 14) for tool in tools], rotation=30, ha="right")
            axes.set_yticks(range(len(levels)), [short(level) for level in levels])
            axes.set_title(short(model), fontsize=10, color=INK)
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        figure.colorbar(image, ax=list(panels), label=label, pad=0.015, fraction=0.05)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return path


def reward_parts(path: Path, parts: Mapping[str, Mapping[str, float]]) -> Path:
    """Mean of each raw reward component: one cluster of bars per component, one bar per model.

    parts: model -> component -> mean.
    """
    names = list(dict.fromkeys(name for by_name in parts.values() for name in by_name))
    height = 0.8 / len(parts)
    with canvas(path, (7.2, 1.5 + 0.3 * len(names) * max(2, len(parts)))) as figure:
        axes = figure.add_subplot()
        for index, (model, by_name) in enumerate(parts.items()):
            places = [place + (index - (len(parts) - 1) / 2) * height for place in range(len(names))]
            values = [by_name.get(name, 0.0) for name in names]
            bars = axes.barh(places, values, height * 0.92, color=color_of(index), label=model, zorder=2)
            axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8, color=INK)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), [short(name) for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        label_axes(axes, "Reward components", "mean over trajectories, before weighting", "", grid="x")
        legend(figure, axes, len(parts))
    return path


def pass_at_k(path: Path, curves: Mapping[str, Mapping[int, float]]) -> Path:
    """pass@k over k, one line per model."""
    with canvas(path, (5.6, 4.0)) as figure:
        axes = figure.add_subplot()
        for index, (model, by_k) in enumerate(curves.items()):
            ks = sorted(by_k)
            values = [100 * by_k[k] for k in ks]
            axes.plot(ks, values, "o-", color=color_of(index), linewidth=2, label=model, zorder=3)
            axes.annotate(
                f"{values[-1]:.0f}", (ks[-1], values[-1]), xytext=(7, -3), textcoords="offset points", fontsize=8
            )
        shown = sorted({k for by_k in curves.values() for k in by_k})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [str(k) for k in shown])
        axes.minorticks_off()
        axes.set_ylim(-3, 104)
        label_axes(axes, "pass@k", "k, samples of one episode", "solved by at least one, % of episodes", grid="y")
        legend(figure, axes, len(curves))
    return path


def _bins(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bin edges: one bin per integer if they are few, else 30 equal-width bins up to the 99.5th percentile."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return np.array([0.0, 1.0])
    low, high = float(array.min()), float(np.quantile(array, 0.995))
    if np.all(array == np.round(array)) and high - low <= 40:
        return np.arange(low - 0.5, high + 1.5)
    if high <= low:
        return np.array([low - 0.5, low + 0.5])
    return np.linspace(low, high, 31)


def _whole(edges: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """True if every bin is one integer."""
    return bool(np.all(edges - np.floor(edges) == 0.5)) and bool(np.all(np.diff(edges) == 1))
