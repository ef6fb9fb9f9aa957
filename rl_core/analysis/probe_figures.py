"""Figures of teacher-forced measurements: reward model calibration, entropy and KL by turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_core.analysis.calibration import Calibration
from rl_core.analysis.canvas import COLORS, FAINT, INK, MUTED, canvas, color_of, label_axes, legend
from rl_core.analysis.probe_results import ModelProbe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration", "entropy_and_kl"]


def calibration(path: Path, found: Calibration) -> Path:
    """Reliability diagram of the reward model, and its score distributions for successes and failures."""
    with canvas(path, (10.4 if found.bins else 5.4, 4.2)) as figure:
        panels = figure.subplots(1, 2 if found.bins else 1, squeeze=False)[0]
        if found.bins:
            _reliability(panels[0], found)
        axes = panels[-1]
        scores, right = np.array(found.scores), np.array(found.successes, dtype=bool)
        edges = np.histogram_bin_edges(scores, 24)
        shown = ((~right, "failures", COLORS[4]), (right, "successes", INK))
        for chosen, label, color in shown:
            if chosen.any():
                shares = 100 * np.histogram(scores[chosen], edges)[0] / chosen.sum()
                axes.stairs(shares, edges, color=color, linewidth=1.8, label=f"{label} ({chosen.sum():,})", zorder=3)
                axes.stairs(shares, edges, color=color, fill=True, alpha=0.15, zorder=2)
        title = "Scores" if found.auc is None else f"Scores: AUC {found.auc:.3f}"
        title += "" if found.correlation is None else f", correlation with success {found.correlation:.2f}"
        label_axes(axes, title, "score of the reward model", "% of successes, of failures", grid="y")
        axes.legend(frameon=False, fontsize=9, loc="best")
    return path


def _reliability(axes: Axes, found: Calibration) -> None:
    """Reliability diagram; on the diagonal, accuracy equals confidence."""
    axes.plot([50, 100], [50, 100], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    places = [100 * b.confidence for b in found.bins]
    values = [100 * b.right.rate for b in found.bins]
    lows = [max(0.0, 100 * (b.right.rate - b.right.low)) for b in found.bins]
    highs = [max(0.0, 100 * (b.right.high - b.right.rate)) for b in found.bins]
    axes.errorbar(places, values, [lows, highs], fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5, zorder=2)
    axes.plot(places, values, "o-", color=INK, linewidth=1.6, markersize=6, zorder=3)
    floor = min(45.0, *(value - low - 4 for value, low in zip(values, lows, strict=True)))
    for place, b in zip(places, found.bins, strict=True):
        axes.annotate(f"{b.right.n:,}", (place, floor), xytext=(0, 3), textcoords="offset points", ha="center",
                      fontsize=7.5, color=MUTED)  # fmt: skip
    axes.set_xlim(48, 102)
    axes.set_ylim(floor, 103)
    title = f"Reliability: calibration error {found.ece:.3f}, {found.pairs:,} pairs"
    label_axes(axes, title, "confidence in the order of a pair, % (below: pairs)", "accuracy, % (bars: 95%)", grid="y")
    axes.grid(axis="x", color=FAINT, linewidth=0.5, zorder=0)


def entropy_and_kl(path: Path, probes: Mapping[str, ModelProbe], first: str) -> Path:
    """Entropy of each model and its KL from the first, by turn, over its own trajectories."""
    has_kl = any(probe.kl_by_turn for probe in probes.values())
    with canvas(path, (9.2 if has_kl else 4.8, 3.8)) as figure:
        panels = figure.subplots(1, 2 if has_kl else 1, squeeze=False)[0]
        for index, (name, probe) in enumerate(probes.items()):
            for axes, values in zip(panels, (probe.entropy_by_turn, probe.kl_by_turn), strict=False):
                axes.plot(
                    range(1, len(values) + 1), values, "o-", color=color_of(index), linewidth=2, label=name, zorder=3
                )
        label_axes(panels[0], "Entropy", "turn", "nats per sampled token", grid="y")
        if has_kl:
            label_axes(panels[1], f"KL from {first}", "turn", "nats per sampled token", grid="y")
        for axes in panels:
            axes.set_ylim(0, 1.06 * max(axes.get_ylim()[1], 1e-3))  # KL is 0 everywhere for an unchanged model
            axes.xaxis.get_major_locator().set_params(integer=True)
        legend(figure, panels[0], len(probes))
    return path
