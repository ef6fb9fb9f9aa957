"""Charts and tables as plain dictionaries for the browser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flows.monitor.metric_names import hint_of, is_share, label_of
from flows.monitor.runs import RunView, StageView
from flows.monitor.series import Series, moving_average, thin

__all__ = [
    "COLOURS",
    "NONE",
    "Drawn",
    "apart",
    "chart",
    "duration",
    "line",
    "marks",
    "measured",
    "metric_cell",
    "number",
    "percent",
    "table",
    "unit_of",
]

NONE = "\u2013"  # missing value
COLOURS = 8  # of the style sheet; further lines reuse them, dashed

# Units by prefix or suffix of a metric's name; first match.
_UNITS = (
    ("perf/tokens_per_second", "tokens/s"), ("_tokens_per_second", "tokens/s"), ("perf/memory_gb", "GB"),
    ("learning_rate", ""), ("_seconds", "s"), ("_percentage", "%"), ("_megabytes", "MiB"), ("_watts", "W"),
    ("success_rate", "share"), ("_rate", "share"), ("accuracy", "share"), ("_fraction", "share"),
    ("policy/update_kl", "nats per token"),
    ("policy/sampler_kl", "nats per token"), ("policy/entropy", "nats per token"),
    ("logprob", "nats per token"), ("eval/perplexity", ""), ("train/tokens", "tokens per step"),
    ("_tokens", "tokens per episode"), ("train/turns", "per episode"), ("tool/calls", "per episode"),
    ("train/epoch", "epochs"), ("explained_variance", "share"),
    ("reward/correlation", "Pearson's r"), ("reward/mean", "per episode"), ("reward/std", "over episodes"),
    ("reward/alarm", "1 = total rises while success falls"),
    ("curriculum/stage_iterations", "iterations"),
)  # fmt: skip

# Scheduled or already averaged metrics, for which a moving average only adds lag.
_EXACT = ("learning_rate", "_coef", "train/epoch", "perf/memory_gb")
_EXACT_GROUPS = ("curriculum/",)


@dataclass(frozen=True)
class Drawn:
    """Drawing options of curves."""

    window: int = 10  # observations of the moving average; 1 = none
    by_time: bool = False  # x axis: minutes since the start of the run instead of steps

    def of(self, name: str) -> Drawn:
        """Options for one metric; no moving average for scheduled or averaged metrics."""
        plain = name.endswith(_EXACT) or name.startswith(_EXACT_GROUPS)
        return Drawn(1, self.by_time) if plain else self


def unit_of(name: str) -> str:
    """Unit of a metric; "" = none."""
    if name in ("policy/entropy_coef", "policy/kl_coef"):
        return ""
    known = next((unit for part, unit in _UNITS if name.startswith(part) or name.endswith(part)), "")
    return known or ("share" if is_share(name) else "")


def line(series: Series, name: str, colour: int, drawn: Drawn, start: float, *, dash: bool = False) -> dict[str, Any]:
    """One line: observations, and optionally their moving average.

    Args:
        start: seconds since the epoch of minute 0.
    """
    steps, times, values = series.arrays()
    xs = (times - start) / 60 if drawn.by_time else steps
    order = np.argsort(xs, kind="stable")  # a resumed run plays steps again
    xs, values = xs[order], values[order]
    x, y = thin(xs, values)
    found: dict[str, Any] = {
        "name": name, "colour": colour % COLOURS, "dash": dash or colour >= COLOURS, "x": x, "y": y,
        "last": None if math.isnan(series.last) else series.last,
    }  # fmt: skip
    window = max(1, drawn.window // series.stride)
    if window > 1 and len(values) > 3:
        averages = moving_average(values, window)
        found["ax"], found["avg"] = thin(xs, averages)
        found["last"] = float(averages[-1])
    return found


def chart(
    identity: str,
    title: str,
    lines: Sequence[dict[str, Any]],
    drawn: Drawn,
    *,
    unit: str = "",
    x: str = "step",
    span: tuple[float, float] | None = None,
    moves: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """One chart.

    Args:
        span: (lowest, highest) that the y axis shows at least.
        moves: vertical lines, see `marks`.
        names: what the values 0, 1, 2, ... are called; the line is then drawn in steps.
    """
    axis = "minutes since the run began" if drawn.by_time else x
    found: dict[str, Any] = {"id": identity, "title": title, "unit": unit, "x": axis, "lines": list(lines)}
    if (label := label_of(title)) != title:
        found["label"] = label
    if (hint := hint_of(title)) != title:
        found["hint"] = hint
    if unit == "share":  # drawn as percent
        found |= {"unit": "", "percent": True}
    if span is not None:
        found["range"] = list(span)
    if names:
        found |= {"names": list(names), "step": True, "range": [-0.3, len(names) - 0.7]}
    found["marks"] = list(moves)
    return found


def marks(stage: StageView, drawn: Drawn, start: float) -> list[dict[str, Any]]:
    """The curriculum's moves as vertical lines, rollbacks in their own colour."""
    found = []
    series = stage.table.series.get("reward/mean")
    if not stage.curriculum or series is None:
        return []
    steps, times, _ = series.arrays()
    for move in stage.curriculum:
        try:
            iteration = float(move["iteration"])
        except (KeyError, TypeError, ValueError):
            continue
        index = min(len(steps) - 1, max(0, round(iteration) - 1))  # the n-th iteration is the n-th observation
        at = (float(times[index]) - start) / 60 if drawn.by_time else float(steps[index])
        kind = str(move.get("kind", ""))
        label = str(move.get("to", "")).strip("()") if kind == "advance" else f"{kind} to {move.get('to', '')}"
        found.append({"x": at, "label": label, "kind": "" if kind == "advance" else "rollback"})
    return found


def x_name(stage: StageView) -> str:
    """X-axis name of a stage's steps."""
    series = stage.table.series
    first = series.get("reward/mean")
    return "iteration" if first is not None and first.last_step == first.count else "step"


def overlay(
    name: str, runs: Sequence[tuple[RunView, StageView]], drawn: Drawn, *, span: tuple[float, float] | None = None
) -> dict[str, Any]:
    """One metric of one stage, one line per run; `runs[0]` is the selected run."""
    lines = []
    for index, (run, stage) in enumerate(runs):
        series = stage.table.series.get(name)
        if series is not None:
            found = line(series, short_name(run, runs[0][0]), index, drawn.of(name), run.started)
            if len(runs) == 1:  # the title names the metric
                found["name"] = f"mean of {drawn.of(name).window}" if "avg" in found else "now"
            lines.append(found)
    run, stage = runs[0]
    moves = marks(stage, drawn, run.started)
    identity = f"{stage.label}:{name}:{'t' if drawn.by_time else 's'}"
    drawn_chart = chart(identity, name, lines, drawn, unit=unit_of(name), x=x_name(stage), span=span, moves=moves)
    return drawn_chart | ({"compares": True} if len(runs) > 1 else {})


def short_name(run: RunView, beside: RunView) -> str:
    """Name of a compared run, short enough for a legend of one line: day and time, with the pipeline if another's."""
    day = run.started_text[5:16]
    return day if run.pipeline == beside.pipeline else f"{run.pipeline} {day}"


def apart(
    identity: str, names: Iterable[tuple[str, str]], runs: Sequence[tuple[RunView, StageView]], drawn: Drawn,
    *, title: str = "{}", unit: str = "",
) -> list[dict[str, Any]]:  # fmt: skip
    """As `family`, with a chart of its own for each metric whose scale is another than the first one's.

    Args:
        title: of such a chart, with the metric's label in it.
    """
    groups: list[tuple[float, list[tuple[str, str]]]] = []
    for name, label in names:
        found = [values for _, stage in runs if (s := stage.table.series.get(name)) and len(values := s.arrays()[2])]
        if not found:
            continue
        size = max(float(np.abs(values).max()) for values in found)
        near = next((group for top, group in groups if _same_scale(top, size)), None)
        if near is not None:
            near.append((name, label))
        else:
            groups.append((size, [(name, label)]))
    charts = []
    for index, (_, group) in enumerate(groups):
        labels = ", ".join(label for _, label in group)
        charts.append(family(f"{identity}:{index}", title.format(labels), group, runs, drawn, unit=unit))
    return [found for found in charts if found is not None]


def _same_scale(one: float, other: float) -> bool:
    """True = the smaller of two curves is still read on the axis of the larger."""
    return one == 0 or other == 0 or max(one, other) <= 5 * min(one, other)


def family(
    identity: str,
    title: str,
    names: Iterable[tuple[str, str]],
    runs: Sequence[tuple[RunView, StageView]],
    drawn: Drawn,
    *,
    unit: str = "",
    span: tuple[float, float] | None = None,
) -> dict[str, Any] | None:
    """Several metrics in one chart, one colour each; other runs dashed. None if no run has any of them."""
    lines = []
    for colour, (name, label) in enumerate(names):
        for index, (run, stage) in enumerate(runs):
            series = stage.table.series.get(name)
            if series is not None:
                shown = label if index == 0 else f"{label}, {short_name(run, runs[0][0])}"
                drawn_line = line(series, shown, colour, drawn.of(name), run.started, dash=index > 0)
                lines.append(drawn_line | ({"quiet": True} if index else {}))
    if not lines:
        return None
    run, stage = runs[0]
    identity = f"{identity}:{stage.label}:{'t' if drawn.by_time else 's'}"
    moves = marks(stage, drawn, run.started)
    return chart(identity, title, lines, drawn, unit=unit, x=x_name(stage), span=span, moves=moves)


def table(
    identity: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
) -> dict[str, Any]:
    """A table; a column named '#name' holds numbers, '~name' long text."""
    kinds = {"#": "num", "~": "text"}
    heads = [{"t": name.lstrip("#~"), "c": kinds.get(name[:1], "")} for name in columns]
    return {"kind": "table", "id": identity, "title": title, "columns": heads, "rows": list(rows), "note": note}


def number(value: float | None, digits: int = 3) -> str:
    """Number formatted for display."""
    if value is None or not math.isfinite(value):
        return NONE
    if value and (abs(value) < 10**-digits or abs(value) >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def measured(name: str, value: float | None, digits: int = 3) -> str:
    """Value of a metric for display: shares as percentages."""
    return percent(value) if unit_of(name) == "share" else number(value, digits)


def metric_cell(name: str) -> str | dict[str, str]:
    """Cell of a table that names a metric for people."""
    label, hint = label_of(name), hint_of(name)
    return name if label == hint else {"t": label, "title": hint}


def percent(value: float | None) -> str:
    """Share as a percentage."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Duration formatted for display."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
