"""Training curves of selected metrics from a run's metrics.jsonl, in constant memory.

Figure of one training run: curves, reward components, curriculum.

Figure of a sweep: learning curves with bands over seeds, and parallel coordinates of settings and result.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.analysis.canvas import (
    COLORS,
    FAINT,
    MUTED,
    add_headroom,
    build_shades,
    label_axes,
    open_canvas,
    select_model_color,
    shorten_text,
)
from rl_core.analysis.statistics import compute_moving_average
from rl_core.errors import DataError
from rl_core.storage.append_log import has_valid_checksum

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_POINTS = 2000  # points per curve; beyond, neighbours are averaged


@dataclass
class TrainingCurve:
    """One metric over steps, downsampled by averaging neighbours when it exceeds MAX_POINTS."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    stride: int = 1  # rows averaged per point
    _pending: list[tuple[float, float]] = field(default_factory=list)

    def add_point(self, step: float, value: float) -> None:
        """Append one row."""
        self._pending.append((step, value))
        if len(self._pending) < self.stride:
            return
        self.flush_pending_points()
        if len(self.values) >= MAX_POINTS:
            self.steps = self.steps[1::2]
            self.values = [
                (a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=False)
            ]
            self.stride *= 2

    def flush_pending_points(self) -> None:
        """Convert pending rows to a point."""
        if self._pending:
            self.steps.append(self._pending[-1][0])
            self.values.append(sum(value for _, value in self._pending) / len(self._pending))
            self._pending.clear()


@dataclass
class TrainingCurves:
    """Curves of one run, with the starts and rollbacks of its curriculum stages."""

    curves: dict[str, TrainingCurve]
    stages: list[tuple[float, int]]  # (first step, stage number)
    num_skipped: int  # truncated or invalid rows
    rollbacks: list[float] = field(default_factory=list)  # steps of curriculum rollbacks

    def find_first_curve(self, *names: str) -> TrainingCurve | None:
        """Return the curve of the first of `names` that the run logged."""
        return next((self.curves[name] for name in names if name in self.curves), None)


def read_training_curves(
    path: Path | str, wanted: frozenset[str], prefixes: tuple[str, ...] = ()
) -> TrainingCurves:
    """Read the curves of metrics `names`, and of those that start with one of `prefixes`, from a metrics.jsonl.

    A row is {"step": 3, "metrics": {"train/loss": 0.5}}. Truncated rows of a live or killed run are skipped and
    counted; steps logged again by a resumed run are dropped.
    Raises: DataError if the file cannot be read.
    """
    path = Path(path)
    curves: dict[str, TrainingCurve] = {}
    latest: dict[str, float] = {}
    stages: list[tuple[float, int]] = []
    rollbacks: list[float] = []
    rolled_back = 0.0  # rollbacks so far
    skipped = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                row = _parse_metrics_row(line)
                if row is None:
                    skipped += 1
                    continue
                step, metrics = row
                for name, value in metrics.items():
                    if not (name in wanted or name.startswith(prefixes)) or step <= latest.get(
                        name, -math.inf
                    ):
                        continue
                    latest[name] = step
                    if name == "curriculum/rollbacks" and value > rolled_back:
                        rolled_back = value
                        rollbacks.append(step)
                    if name == "curriculum/stage" and (not stages or stages[-1][1] != int(value)):
                        stages.append((step, int(value)))
                    curves.setdefault(name, TrainingCurve()).add_point(step, value)
    except OSError as error:
        raise DataError(f"{path}: training metrics cannot be read ({error.strerror})") from error
    for curve in curves.values():
        curve.flush_pending_points()
    return TrainingCurves(curves, stages, skipped, rollbacks)


def _parse_metrics_row(line: bytes) -> tuple[float, dict[str, float]] | None:
    if not has_valid_checksum(line):
        return None
    try:
        row = json.loads(line)
        step, metrics = row["step"], row["metrics"]
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            return None
        # NaN of a diverging run leaves a gap.
        metrics = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return float(step), metrics
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


# Panels: title, y label, and candidate metrics, of which the first that was logged is drawn.
TRAINING_PANELS = (
    ("Success", "share of rollouts", ("train/success_rate", "success_rate")),
    ("Reward", "mean reward", ("reward/mean",)),
    ("Loss", "loss", ("train/loss", "policy/loss")),
    ("Held-out loss", "loss", ("eval/loss",)),
    ("Held-out accuracy", "share of pairs or tokens", ("eval/accuracy",)),
    ("Exploitability", "per game, 0 = equilibrium", ("eval/exploitability",)),
    ("KL to the starting policy", "nats per token", ("policy/ref_kl",)),
    ("KL of one update", "nats per token", ("policy/update_kl",)),
    ("Entropy", "nats per token", ("policy/entropy",)),
    ("Sampled tokens", "tokens per episode", ("train/action_tokens",)),
    ("Misuse of tools", "share of turns", ("tool/misuse_rate",)),
    ("Gradient norm", "before clipping", ("train/grad_norm",)),
)
SHARE_PANELS = frozenset({"Success", "Held-out accuracy"})  # drawn on the full scale from 0 to 1
LEVEL_PREFIX, COMPONENT_PREFIX = "train/success_rate_by_level/", "reward/weighted/"
ENVIRONMENT_PREFIX = "train/success_rate_by_environment/"
OPPONENT_PREFIX = "eval/payoff_against/"  # of self-play
DRAWN_PREFIXES = (
    ENVIRONMENT_PREFIX,
    OPPONENT_PREFIX,
    LEVEL_PREFIX,
    COMPONENT_PREFIX,
)  # metrics drawn together in one panel
DRAWN_METRICS = frozenset(
    {name for _, _, names in TRAINING_PANELS for name in names}
    | {"curriculum/stage", "curriculum/rollbacks"}
)


def draw_training_run(
    path: Path,
    run: TrainingCurves,
    name: str,
    color: str = COLORS[6],
    curriculum: Sequence[str] = (),
) -> Path | None:
    """Draw the curves of one training run, with bands for curriculum stages and dashed lines at rollbacks.

    color: of the trained model, as in the other figures. curriculum: names of its stages.
    Returns: None if none of the metrics was logged.
    """
    panels = [
        (title, unit, curve)
        for title, unit, names in TRAINING_PANELS
        if (curve := run.find_first_curve(*names)) is not None
        and len(curve.values) > 1
        and any(curve.values)
    ]
    groups = [
        (title, unit, found)
        for title, unit, prefix, least in (
            ("Success by environment", "share of rollouts", ENVIRONMENT_PREFIX, 2),
            ("Payoff by opponent", "per game, held out", OPPONENT_PREFIX, 1),
            ("Success by level", "share of rollouts", LEVEL_PREFIX, 1),
            ("Reward by component", "what each adds, mean", COMPONENT_PREFIX, 2),
        )
        if len(
            found := {
                key.removeprefix(prefix): c
                for key, c in run.curves.items()
                if key.startswith(prefix)
            }
        )
        >= least
    ]
    has_curriculum = len(run.stages) > 1 or bool(run.stages and run.rollbacks)
    total = len(panels) + len(groups) + has_curriculum
    if not total:
        return None
    columns = 2 if total == 4 else min(3, total)
    rows = -(-total // columns)
    last = max((curve.steps[-1] for curve in run.curves.values() if curve.steps), default=0.0)
    with open_canvas(path, (4.3 * columns, 0.6 + 2.9 * rows)) as figure:
        grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for axes, (title, unit, curve) in zip(grid, panels, strict=False):
            _draw_curve(axes, curve, color)
            if title in SHARE_PANELS:
                axes.set_ylim(0, 1.02)
            label_axes(axes, title, "", unit, grid="y")
        for axes, (title, unit, curves) in zip(grid[len(panels) :], groups, strict=False):
            _draw_curve_group(axes, curves, color if title == "Success by level" else None)
            label_axes(axes, f"{title} (moving average)", "", unit, grid="y")
        if has_curriculum:
            _draw_curriculum_stages(grid[total - 1], run, last, curriculum)
        for axes in grid[:total]:
            _draw_stage_bands(axes, run.stages, last)
            for step in run.rollbacks:
                axes.axvline(step, color=COLORS[4], linestyle="--", linewidth=1.1, zorder=1)
            axes.set_xlabel("optimizer step")
        for axes in grid[total:]:
            axes.set_visible(False)
        figure.suptitle(
            f"Training of {shorten_text(name, 40)}  (thin: as logged, thick: moving average"
            f"{', bands: curriculum stages' if len(run.stages) > 1 else ''}"
            f"{', dashed: rollbacks' if run.rollbacks else ''})",
            x=0.01,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
    return path


def _choose_window(curve: TrainingCurve) -> int:
    return max(3, min(25, len(curve.values) // 20))


def _draw_curve(axes: Axes, curve: TrainingCurve, color: str) -> None:
    axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.9)
    axes.plot(
        curve.steps,
        compute_moving_average(curve.values, _choose_window(curve)),
        color=color,
        linewidth=2,
    )


def _draw_curve_group(axes: Axes, curves: dict[str, TrainingCurve], color: str | None) -> None:
    """Draw several metrics in one panel: shades of the model's colour if ordered, else distinct colours."""
    colors = (
        build_shades(color, len(curves))
        if color
        else [COLORS[(2 + n) % len(COLORS)] for n in range(len(curves))]
    )
    for (label, curve), line in zip(curves.items(), colors, strict=True):
        smooth = compute_moving_average(curve.values, _choose_window(curve))
        axes.plot(curve.steps, smooth, color=line, linewidth=1.8, label=shorten_text(label))
    if color:
        axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _draw_curriculum_stages(
    axes: Axes, run: TrainingCurves, last: float, names: Sequence[str]
) -> None:
    """Draw the curriculum stage over time."""
    steps, stages = [step for step, _ in run.stages], [stage for _, stage in run.stages]
    axes.stairs(
        stages, [*steps, max(last, steps[-1] + 1)], baseline=None, color=COLORS[4], linewidth=2.2
    )
    shown = sorted(set(stages))
    axes.set_yticks(
        shown,
        [f"{shorten_text(names[n], 14)}  {n}" if 0 <= n < len(names) else str(n) for n in shown],
    )
    axes.set_ylim(min(stages) - 0.4, max(stages) + 0.4)
    label_axes(axes, "Curriculum", "", "stage", grid="y")


def _draw_stage_bands(axes: Axes, stages: Sequence[tuple[float, int]], last: float) -> None:
    """Draw alternating background bands with the stage number above the data."""
    if len(stages) < 2:
        return
    add_headroom(axes)
    ends = [step for step, _ in stages[1:]] + [last]
    for (start, stage), end in zip(stages, ends, strict=True):
        axes.axvspan(
            start, end, color="#56B4E9", alpha=0.05 if stage % 2 else 0.17, linewidth=0, zorder=0
        )
        if end - start > 0.04 * last:
            axes.text(
                (start + end) / 2,
                0.985,
                str(stage),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
                color=MUTED,
            )


MAX_DRAWN_CONFIGURATIONS = 6  # curves; the best configurations


@dataclass(frozen=True)
class SweptConfiguration:
    """One configuration as the figure shows it."""

    label: str
    settings: Mapping[str, str]  # by key, as text
    value: float | None  # mean over seeds; None = failed or abandoned
    curves: Sequence[TrainingCurve]  # one a seed


def compute_seed_band(
    curves: Sequence[TrainingCurve],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps that all curves have, with mean, least and largest value at each."""
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves if curve.steps]
    if not tables:
        return [], [], [], []
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    rows = [[table[step] for table in tables] for step in steps]
    return (
        steps,
        [sum(row) / len(row) for row in rows],
        [min(row) for row in rows],
        [max(row) for row in rows],
    )


def draw_sweep_figure(
    path: Path, configurations: Sequence[SweptConfiguration], metric: str, curve_name: str
) -> Path:
    """Write the figure; the best configurations come first in `configurations`.

    metric: name of the result. curve_name: of what the curves show; "" = there are none.
    """
    with open_canvas(path, (13.0, 5.2)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
        _draw_configuration_curves(left, configurations[:MAX_DRAWN_CONFIGURATIONS], curve_name)
        _draw_parallel_coordinates(right, configurations, metric)
    return path


def draw_learning_curves(
    path: Path, configurations: Sequence[SweptConfiguration], curve_name: str
) -> Path:
    """Write learning curves alone."""
    with open_canvas(path, (8.0, 4.6)) as figure:
        _draw_configuration_curves(figure.subplots(), configurations, curve_name)
    return path


def _draw_configuration_curves(
    axes: Axes, configurations: Sequence[SweptConfiguration], name: str
) -> None:
    drawn = 0
    for index, configuration in enumerate(configurations):
        steps, mean, low, high = compute_seed_band(configuration.curves)
        if steps:
            axes.plot(
                steps,
                mean,
                color=select_model_color(index),
                linewidth=1.8,
                label=shorten_text(configuration.label, 44),
            )
            axes.fill_between(
                steps, low, high, color=select_model_color(index), alpha=0.15, linewidth=0
            )
            drawn += 1
    label_axes(
        axes,
        "Learning curves (mean; band: least to largest seed)",
        "optimizer step",
        name,
        grid="y",
    )
    if drawn:
        axes.legend(fontsize=7.5, frameon=False, loc="best")
    else:
        axes.text(
            0.5, 0.5, "no curves were logged", transform=axes.transAxes, ha="center", color=MUTED
        )


def _draw_parallel_coordinates(
    axes: Axes, configurations: Sequence[SweptConfiguration], metric: str
) -> None:
    """Draw one vertical axis per setting, the result at the right; a line is a configuration."""
    keys = list(
        dict.fromkeys(key for configuration in configurations for key in configuration.settings)
    )
    places = {
        key: _compute_axis_heights(
            [one.settings[key] for one in configurations if key in one.settings]
        )
        for key in keys
    }
    values = [one.value for one in configurations if one.value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    for index, one in reversed(list(enumerate(configurations))):
        points = [
            (x, places[key][one.settings[key]]) for x, key in enumerate(keys) if key in one.settings
        ]
        if one.value is not None:
            points.append((len(keys), (one.value - low) / (high - low) if high > low else 0.5))
        is_shown = index < MAX_DRAWN_CONFIGURATIONS and one.value is not None
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=3.5,
            color=select_model_color(index) if is_shown else FAINT,
            linewidth=1.9 if is_shown else 1.1,
            zorder=2 + is_shown,
        )
    for x, key in enumerate(keys):
        for text, y in places[key].items():
            axes.annotate(
                shorten_text(text, 14),
                (x, y),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
            )
    for y, value in ((0.0, low), (1.0, high)):
        axes.annotate(
            f"{value:.4g}",
            (len(keys), y),
            xytext=(7, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
    for x in range(len(keys) + 1):
        axes.axvline(x, color=MUTED, linewidth=0.8, zorder=0)
    names = [*(shorten_text(key.rpartition(".")[2], 22) for key in keys), metric]
    label_axes(
        axes, "Settings and result (colours as at the left, grey: the others)", "", "", grid="y"
    )
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.set_xlim(-0.2, len(keys) + 0.4)


def _compute_axis_heights(texts: Sequence[str]) -> dict[str, float]:
    """Compute the height of each value on its axis, 0 to 1: in order of numbers, else of first appearance, evenly
    spaced.
    """
    distinct = list(dict.fromkeys(texts))
    with contextlib.suppress(ValueError):
        distinct.sort(key=float)
    return {
        text: index / (len(distinct) - 1) if len(distinct) > 1 else 0.5
        for index, text in enumerate(distinct)
    }
