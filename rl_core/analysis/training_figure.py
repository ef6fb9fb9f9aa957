"""Figure of one training run: curves, reward components, curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.analysis.canvas import COLORS, MUTED, add_headroom, canvas, label_axes, shades, short
from rl_core.analysis.statistics import moving_average
from rl_core.analysis.training_curves import Curve, TrainingCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PREFIXES", "WANTED", "training"]

# Panels: title, y label, and candidate metrics, of which the first that was logged is drawn.
PANELS = (
    ("Success", "share of rollouts", ("train/success_rate", "success_rate")),
    ("Reward", "mean reward", ("reward/mean",)),
    ("Loss", "loss", ("train/loss", "policy/loss")),
    ("Held-out loss", "loss", ("eval/loss",)),
    ("Held-out accuracy", "share of pairs or tokens", ("eval/accuracy",)),
    ("KL to the starting policy", "nats per token", ("policy/ref_kl",)),
    ("KL of one update", "nats per token", ("policy/update_kl",)),
    ("Entropy", "nats per token", ("policy/entropy",)),
    ("Sampled tokens", "tokens per episode", ("train/action_tokens",)),
    ("Misuse of tools", "share of turns", ("tool/misuse_rate",)),
    ("Gradient norm", "before clipping", ("train/grad_norm",)),
)
SHARES = frozenset({"Success", "Held-out accuracy"})  # drawn on the full scale from 0 to 1
LEVELS, PARTS = "train/success_rate_by_level/", "reward/weighted/"
PREFIXES = (LEVELS, PARTS)  # metrics drawn together in one panel
WANTED = frozenset({name for _, _, names in PANELS for name in names} | {"curriculum/stage", "curriculum/rollbacks"})


def training(
    path: Path, run: TrainingCurves, name: str, color: str = COLORS[6], curriculum: Sequence[str] = ()
) -> Path | None:
    """Curves of one training run, with bands for curriculum stages and dashed lines at rollbacks.

    color: of the trained model, as in the other figures. curriculum: names of its stages.
    Returns: None if none of the metrics was logged.
    """
    panels = [
        (title, unit, curve)
        for title, unit, names in PANELS
        if (curve := run.named(*names)) is not None and len(curve.values) > 1 and any(curve.values)
    ]
    groups = [
        (title, unit, found)
        for title, unit, prefix, least in (
            ("Success by level", "share of rollouts", LEVELS, 1),
            ("Reward by component", "what each adds, mean", PARTS, 2),
        )
        if len(found := {key.removeprefix(prefix): c for key, c in run.curves.items() if key.startswith(prefix)})
        >= least
    ]
    has_curriculum = len(run.stages) > 1 or bool(run.stages and run.rollbacks)
    total = len(panels) + len(groups) + has_curriculum
    if not total:
        return None
    columns = 2 if total == 4 else min(3, total)
    rows = -(-total // columns)
    last = max((curve.steps[-1] for curve in run.curves.values() if curve.steps), default=0.0)
    with canvas(path, (4.3 * columns, 0.6 + 2.9 * rows)) as figure:
        grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for axes, (title, unit, curve) in zip(grid, panels, strict=False):
            _curve(axes, curve, color)
            if title in SHARES:
                axes.set_ylim(0, 1.02)
            label_axes(axes, title, "", unit, grid="y")
        for axes, (title, unit, curves) in zip(grid[len(panels) :], groups, strict=False):
            _group(axes, curves, color if title == "Success by level" else None)
            label_axes(axes, f"{title} (moving average)", "", unit, grid="y")
        if has_curriculum:
            _staircase(grid[total - 1], run, last, curriculum)
        for axes in grid[:total]:
            _bands(axes, run.stages, last)
            for step in run.rollbacks:
                axes.axvline(step, color=COLORS[4], linestyle="--", linewidth=1.1, zorder=1)
            axes.set_xlabel("optimizer step")
        for axes in grid[total:]:
            axes.set_visible(False)
        figure.suptitle(
            f"Training of {short(name, 40)}  (thin: as logged, thick: moving average"
            f"{', bands: curriculum stages' if len(run.stages) > 1 else ''}"
            f"{', dashed: rollbacks' if run.rollbacks else ''})",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
    return path


def _window(curve: Curve) -> int:
    return max(3, min(25, len(curve.values) // 20))


def _curve(axes: Axes, curve: Curve, color: str) -> None:
    axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.9)
    axes.plot(curve.steps, moving_average(curve.values, _window(curve)), color=color, linewidth=2)


def _group(axes: Axes, curves: dict[str, Curve], color: str | None) -> None:
    """Draw several metrics in one panel: shades of the model's colour if ordered, else distinct colours."""
    colors = shades(color, len(curves)) if color else [COLORS[(2 + n) % len(COLORS)] for n in range(len(curves))]
    for (label, curve), line in zip(curves.items(), colors, strict=True):
        smooth = moving_average(curve.values, _window(curve))
        axes.plot(curve.steps, smooth, color=line, linewidth=1.8, label=short(label))
    if color:
        axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _staircase(axes: Axes, run: TrainingCurves, last: float, names: Sequence[str]) -> None:
    """Draw the curriculum stage over time."""
    steps, stages = [step for step, _ in run.stages], [stage for _, stage in run.stages]
    axes.stairs(stages, [*steps, max(last, steps[-1] + 1)], baseline=None, color=COLORS[4], linewidth=2.2)
    shown = sorted(set(stages))
    axes.set_yticks(shown, [f"{short(names[n], 14)}  {n}" if 0 <= n < len(names) else str(n) for n in shown])
    axes.set_ylim(min(stages) - 0.4, max(stages) + 0.4)
    label_axes(axes, "Curriculum", "", "stage", grid="y")


def _bands(axes: Axes, stages: Sequence[tuple[float, int]], last: float) -> None:
    """Draw alternating background bands with the stage number above the data."""
    if len(stages) < 2:
        return
    add_headroom(axes)
    ends = [step for step, _ in stages[1:]] + [last]
    for (start, stage), end in zip(stages, ends, strict=True):
        axes.axvspan(start, end, color="#56B4E9", alpha=0.05 if stage % 2 else 0.17, linewidth=0, zorder=0)
        if end - start > 0.04 * last:
            axes.text((start + end) / 2, 0.985, str(stage), transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=8, color=MUTED)  # fmt: skip
