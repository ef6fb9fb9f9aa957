"""Figure of a sweep: learning curves with bands over seeds, and parallel coordinates of settings and result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.analysis.canvas import FAINT, MUTED, canvas, color_of, label_axes, short
from rl_core.analysis.training_curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SweptConfiguration", "band", "draw_curves", "draw_sweep"]

SHOWN = 6  # curves; the best configurations


@dataclass(frozen=True)
class SweptConfiguration:
    """One configuration as the figure shows it."""

    label: str
    settings: Mapping[str, str]  # by key, as text
    value: float | None  # mean over seeds; None = it failed, or was given up
    curves: Sequence[Curve]  # one a seed


def band(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps that all curves have, with mean, least and largest value at each."""
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves if curve.steps]
    if not tables:
        return [], [], [], []
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    rows = [[table[step] for table in tables] for step in steps]
    return steps, [sum(row) / len(row) for row in rows], [min(row) for row in rows], [max(row) for row in rows]


def draw_sweep(path: Path, configurations: Sequence[SweptConfiguration], metric: str, curve_name: str) -> Path:
    """Write the figure; the best configurations come first in `configurations`.

    metric: name of the result. curve_name: of what the curves show; "" = there are none.
    """
    with canvas(path, (13.0, 5.2)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
        _curves(left, configurations[:SHOWN], curve_name)
        _coordinates(right, configurations, metric)
    return path


def draw_curves(path: Path, configurations: Sequence[SweptConfiguration], curve_name: str) -> Path:
    """Write learning curves alone."""
    with canvas(path, (8.0, 4.6)) as figure:
        _curves(figure.subplots(), configurations, curve_name)
    return path


def _curves(axes: Axes, configurations: Sequence[SweptConfiguration], name: str) -> None:
    drawn = 0
    for index, configuration in enumerate(configurations):
        steps, mean, low, high = band(configuration.curves)
        if steps:
            axes.plot(steps, mean, color=color_of(index), linewidth=1.8, label=short(configuration.label, 44))
            axes.fill_between(steps, low, high, color=color_of(index), alpha=0.15, linewidth=0)
            drawn += 1
    label_axes(axes, "Learning curves (mean; band: least to largest seed)", "optimizer step", name, grid="y")
    if drawn:
        axes.legend(fontsize=7.5, frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, "no curves were logged", transform=axes.transAxes, ha="center", color=MUTED)


def _coordinates(axes: Axes, configurations: Sequence[SweptConfiguration], metric: str) -> None:
    """One vertical axis for each setting, the result at the right; a line is a configuration."""
    keys = list(dict.fromkeys(key for configuration in configurations for key in configuration.settings))
    places = {key: _places([one.settings[key] for one in configurations if key in one.settings]) for key in keys}
    found = [one.value for one in configurations if one.value is not None]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    for index, one in reversed(list(enumerate(configurations))):
        points = [(x, places[key][one.settings[key]]) for x, key in enumerate(keys) if key in one.settings]
        if one.value is not None:
            points.append((len(keys), (one.value - low) / (high - low) if high > low else 0.5))
        is_shown = index < SHOWN and one.value is not None
        axes.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=3.5,
            color=color_of(index) if is_shown else FAINT, linewidth=1.9 if is_shown else 1.1, zorder=2 + is_shown,
        )  # fmt: skip
    for x, key in enumerate(keys):
        for text, y in places[key].items():
            axes.annotate(short(text, 14), (x, y), xytext=(5, 0), textcoords="offset points", fontsize=8, va="center")
    for y, value in ((0.0, low), (1.0, high)):
        axes.annotate(
            f"{value:.4g}", (len(keys), y), xytext=(7, 0), textcoords="offset points", fontsize=8, va="center"
        )
    for x in range(len(keys) + 1):
        axes.axvline(x, color=MUTED, linewidth=0.8, zorder=0)
    names = [*(short(key.rpartition(".")[2], 22) for key in keys), metric]
    label_axes(axes, "Settings and result (colours as at the left, grey: the others)", "", "", grid="y")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.set_xlim(-0.2, len(keys) + 0.4)


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Height of each value on its axis, 0 to 1: in order of numbers, else of first appearance, evenly spaced."""
    distinct = list(dict.fromkeys(texts))
    with contextlib.suppress(ValueError):
        distinct.sort(key=float)
    return {text: index / (len(distinct) - 1) if len(distinct) > 1 else 0.5 for index, text in enumerate(distinct)}
