"""Pictures of an analysis, as PNG files. matplotlib is imported when a picture is drawn, never before.

Every function takes plain numbers, writes one file and returns its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.analysis.statistics import Difference, Rate, moving_average
from rl_core.analysis.training import Curve, TrainingCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["differences", "distributions", "reward_parts", "success_by_group", "tool_heat_map", "training"]

# Okabe and Ito's palette: eight colours told apart by readers with any colour vision.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#B8A900")
INK, FAINT = "#222831", "#D9DEE4"
# Each panel: title, label of the y axis, and metrics of which the first that a run logged is drawn.
PANELS = (
    ("Success", "share of rollouts", ("train/success_rate", "success_rate")),
    ("Reward", "mean reward", ("reward/mean",)),
    ("Loss", "loss", ("train/loss", "policy/loss")),
    ("Held-out loss", "loss", ("eval/loss",)),
    ("Held-out accuracy", "share of pairs or tokens", ("eval/accuracy",)),
    ("KL to the starting policy", "nats per token", ("policy/ref_kl",)),
    ("KL of one update", "nats per token", ("policy/kl",)),
    ("Entropy", "nats per token", ("policy/entropy",)),
    ("Sampled tokens", "tokens per episode", ("train/action_tokens",)),
    ("Misuse of tools", "share of turns", ("tool/misuse_rate",)),
    ("Gradient norm", "before clipping", ("train/grad_norm",)),
)
SHARES = frozenset({"Success", "Held-out accuracy"})  # drawn on the whole scale from 0 to 1
LEVEL_PREFIXES = ("train/success_rate_by_level/",)
WANTED = frozenset({name for _, _, names in PANELS for name in names} | {"curriculum/stage", "curriculum/rollbacks"})


def success_by_group(path: Path, rates: Mapping[str, Mapping[str, Rate]], title: str) -> Path:
    """Bars of success with 95% intervals: one cluster for each group (level or kind), one bar for each model."""
    groups = list(dict.fromkeys(group for by_group in rates.values() for group in by_group))
    width = 0.8 / len(rates)
    with _figure(path, (max(6.4, 1.6 + 0.55 * len(groups) * max(2, len(rates))), 4.2)) as figure:
        axes = figure.add_subplot()
        for index, (model, by_group) in enumerate(rates.items()):
            shown = [(place, by_group[group]) for place, group in enumerate(groups) if group in by_group]
            places = [place + (index - (len(rates) - 1) / 2) * width for place, _ in shown]
            values = [100 * rate.rate for _, rate in shown]
            # Rounding may put a bound past the rate by 1e-16, and an error bar of negative length is refused.
            lows = [max(0.0, 100 * (rate.rate - rate.low)) for _, rate in shown]
            highs = [max(0.0, 100 * (rate.high - rate.rate)) for _, rate in shown]
            axes.bar(places, values, width * 0.92, color=COLORS[index % len(COLORS)], label=model, zorder=2)
            axes.errorbar(places, values, [lows, highs], fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5, zorder=3)
            for place, value, high in zip(places, values, highs, strict=True):
                axes.annotate(
                    f"{value:.0f}", (place, value + high), xytext=(0, 3), textcoords="offset points",
                    ha="center", fontsize=8, color=INK,
                )  # fmt: skip
        axes.set_xticks(range(len(groups)), [_short(group) for group in groups], rotation=0 if len(groups) < 7 else 25)
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
        _finish(axes, title, "", "success, % of episodes (bars: 95% interval)", grid="y")
        _legend(figure, axes, len(rates))
    return path


def differences(path: Path, rows: Sequence[tuple[str, Difference, int]], title: str) -> Path:
    """Paired differences of success in percentage points, each with its interval, beside the line of no difference.

    rows: (label, difference of shares, episodes compared), top to bottom.
    """
    with _figure(path, (7.2, 1.5 + 0.36 * len(rows))) as figure:
        axes = figure.add_subplot()
        axes.axvline(0, color=INK, linewidth=1, zorder=1)
        for place, (label, difference, _) in enumerate(rows):
            # Blue and orange, so that better and worse do not depend on telling red from green.
            color = COLORS[0] if difference.low > 0 else COLORS[4] if difference.high < 0 else COLORS[6]
            low, high = 100 * difference.low, 100 * difference.high
            axes.plot([low, high], [place, place], color=color, linewidth=2.4, solid_capstyle="round", zorder=2)
            size = 8 if label.startswith("all") else 6
            axes.plot(100 * difference.difference, place, "o", color=color, markersize=size, zorder=3)
        axes.set_yticks(range(len(rows)), [f"{_short(label, 34)}  (n={n:,})" for label, _, n in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        reach = max([1.0, *(abs(100 * bound) for _, d, _ in rows for bound in (d.low, d.high))]) * 1.1
        axes.set_xlim(-reach if any(d.low < 0 for _, d, _ in rows) else -0.08 * reach, reach)
        _finish(axes, title, "difference of success, percentage points (bars: 95% interval)", "", grid="x")
    return path


def distributions(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    """Histograms, one panel for each quantity (its name is the x label), one outline for each model."""
    with _figure(path, (4.1 * len(panels), 3.7)) as figure:
        for axes, (name, by_model) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            edges = _bins([value for values in by_model.values() for value in values])
            for index, (model, values) in enumerate(by_model.items()):
                if not len(values):
                    continue
                # Values beyond the last edge (the tail's half per cent) share the last bin.
                shares = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] * 100 / len(values)
                color = COLORS[index % len(COLORS)]
                axes.stairs(shares, edges, color=color, linewidth=1.8, label=model, zorder=3)
                axes.stairs(shares, edges, color=color, fill=True, alpha=0.13, zorder=2)
                axes.axvline(float(np.mean(values)), color=color, linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
            _finish(axes, "", f"{name} (dashed: mean)", "", grid="y")
            axes.set_ylim(bottom=0)
        figure.axes[0].set_ylabel("share of trajectories, %")
        figure.suptitle("How rewards and lengths are distributed", x=0.01, ha="left", fontsize=12, fontweight="bold")
        _legend(figure, figure.axes[0], len(next(iter(panels.values()))))
    return path


def tool_heat_map(
    path: Path, models: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, label: str, digits: int = 1
) -> Path:
    """One table of coloured cells for each model: tools across, levels down.

    models: model -> level -> tool -> value; label: what the value is, for the colour bar.
    """
    levels = list(dict.fromkeys(level for table in models.values() for level in table))
    tools = list(dict.fromkeys(tool for table in models.values() for row in table.values() for tool in row))
    top = max([1e-9, *(value for table in models.values() for row in table.values() for value in row.values())])
    size = (1.9 + len(models) * (0.75 * len(tools) + 0.5), 1.7 + 0.48 * len(levels))
    with _figure(path, (max(6.4, size[0]), size[1])) as figure:
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, (model, table) in zip(panels, models.items(), strict=True):
            cells = np.array([[table.get(level, {}).get(tool, 0.0) for tool in tools] for level in levels])
            image = axes.imshow(cells, cmap="cividis", vmin=0, vmax=top, aspect="auto")
            for row, column in np.ndindex(cells.shape):
                value = cells[row, column]
                color = "white" if value < 0.6 * top else "black"
                axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=9, color=color)
            axes.set_xticks(range(len(tools)), [_short(tool, 14) for tool in tools], rotation=30, ha="right")
            axes.set_yticks(range(len(levels)), [_short(level) for level in levels])
            axes.set_title(_short(model), fontsize=10, color=INK)
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        figure.colorbar(image, ax=list(panels), label=label, pad=0.015, fraction=0.05)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return path


def reward_parts(path: Path, parts: Mapping[str, Mapping[str, float]]) -> Path:
    """Mean of each raw reward component, one cluster for each component, one bar for each model.

    parts: model -> component -> mean.
    """
    names = list(dict.fromkeys(name for by_name in parts.values() for name in by_name))
    height = 0.8 / len(parts)
    with _figure(path, (7.2, 1.5 + 0.3 * len(names) * max(2, len(parts)))) as figure:
        axes = figure.add_subplot()
        for index, (model, by_name) in enumerate(parts.items()):
            places = [place + (index - (len(parts) - 1) / 2) * height for place in range(len(names))]
            values = [by_name.get(name, 0.0) for name in names]
            bars = axes.barh(places, values, height * 0.92, color=COLORS[index % len(COLORS)], label=model, zorder=2)
            axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8, color=INK)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        _finish(axes, "Reward components", "mean over trajectories, before weighing", "", grid="x")
        _legend(figure, axes, len(parts))
    return path


def training(path: Path, runs: TrainingCurves, name: str) -> Path | None:
    """Curves of one training run, with bands for its curriculum stages and dashed lines where it was rolled back.

    None where it logged nothing to draw.
    """
    panels = [(title, unit, curve) for title, unit, names in PANELS if (curve := runs.named(*names)) is not None]
    by_level = {metric: curve for metric, curve in runs.curves.items() if metric.startswith(LEVEL_PREFIXES)}
    has_curriculum = len(runs.stages) > 1 or bool(runs.stages and runs.rollbacks)
    total = len(panels) + bool(by_level) + has_curriculum
    if not total:
        return None
    columns = 2 if total == 4 else min(3, total)
    rows = -(-total // columns)
    with _figure(path, (4.3 * columns, 0.6 + 2.9 * rows)) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (title, unit, curve) in zip(grid, panels, strict=False):
            _curve(axes, curve, COLORS[0])
            if title in SHARES:
                axes.set_ylim(0, 1.02)
            _finish(axes, title, "", unit, grid="y")
        place = len(panels)
        if by_level:
            for index, (metric, curve) in enumerate(by_level.items()):
                smooth = moving_average(curve.values, _window(curve))
                axes = grid[place]
                axes.plot(
                    curve.steps,
                    smooth,
                    color=COLORS[index % len(COLORS)],
                    linewidth=1.7,
                    label=_short(metric.split("/")[-1]),
                )
            axes.set_ylim(0, 1.02)
            axes.legend(fontsize=8, frameon=False, loc="best")
            _finish(axes, "Success by level", "", "moving average", grid="y")
            place += 1
        last = max((curve.steps[-1] for curve in runs.curves.values() if curve.steps), default=0.0)
        if has_curriculum:
            axes = grid[place]
            steps = [step for step, _ in runs.stages]
            axes.stairs([stage for _, stage in runs.stages], [*steps, max(last, steps[-1] + 1)], baseline=None,
                        color=COLORS[4], linewidth=2.2)  # fmt: skip
            axes.set_yticks(sorted({stage for _, stage in runs.stages}))
            axes.set_ylim(min(s for _, s in runs.stages) - 0.4, max(s for _, s in runs.stages) + 0.4)
            _finish(axes, "Curriculum", "", "stage", grid="y")
        for axes in grid[:total]:
            _bands(axes, runs.stages, last)
            for step in runs.rollbacks:
                axes.axvline(step, color=COLORS[4], linestyle="--", linewidth=1.1, zorder=1)
            axes.set_xlabel("optimizer step")
        for axes in grid[total:]:
            axes.set_visible(False)
        figure.suptitle(
            f"Training of {_short(name, 40)}  (thin: as logged, thick: moving average"
            f"{', bands: curriculum stages' if len(runs.stages) > 1 else ''}"
            f"{', dashed: rollbacks' if runs.rollbacks else ''})",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
    return path


def _window(curve: Curve) -> int:
    return max(3, len(curve.values) // 20)


def _curve(axes: Axes, curve: Curve, color: str) -> None:
    axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.9)
    axes.plot(curve.steps, moving_average(curve.values, _window(curve)), color=color, linewidth=2)


def _bands(axes: Axes, stages: Sequence[tuple[float, int]], last: float) -> None:
    """Alternating shades behind the curves, a number at the top of each stage."""
    if len(stages) < 2:
        return
    ends = [step for step, _ in stages[1:]] + [last]
    for (start, stage), end in zip(stages, ends, strict=True):
        axes.axvspan(start, end, color="#56B4E9", alpha=0.05 if stage % 2 else 0.17, linewidth=0, zorder=0)
        if end - start > 0.04 * last:
            axes.text((start + end) / 2, 0.985, str(stage), transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=8, color="#5A6570")  # fmt: skip


def _bins(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bin edges: one bin for each whole number where they are few, else 30 even ones up to the 99.5th percentile."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return np.array([0.0, 1.0])
    low, high = float(array.min()), float(np.quantile(array, 0.995))
    if np.all(array == np.round(array)) and high - low <= 40:
        return np.arange(low - 0.5, high + 1.5)
    if high <= low:
        return np.array([low - 0.5, low + 0.5])
    return np.linspace(low, high, 31)


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is saved on leaving; drawn without pyplot, so without global state or a display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9.5, "axes.edgecolor": "#8A94A0", "axes.labelcolor": INK, "text.color": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
        "text.parse_math": False,  # a '$' in a tool's or model's name is a dollar
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        # A fixed software tag: the same numbers give the same bytes.
        figure.savefig(path, dpi=140, metadata={"Software": "posttrain"})


def _finish(axes: Axes, title: str, x_label: str, y_label: str, grid: str) -> None:
    if title:
        axes.set_title(_short(title, 70), loc="left", fontsize=11, fontweight="bold", pad=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(length=0 if grid else 3)


def _legend(figure: Figure, axes: Axes, models: int) -> None:
    """One legend below the panels, so that it never covers data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, [_short(label, 30) for label in labels], loc="outside lower center", ncols=min(4, models),
                  frameon=False, fontsize=9)  # fmt: skip


def _short(text: str, width: int = 24) -> str:
    """Text that can be drawn: lone surrogates and control characters replaced, length capped."""
    shown = "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode("utf-8"))
    return shown if len(shown) <= width else shown[: width - 1] + "…"
