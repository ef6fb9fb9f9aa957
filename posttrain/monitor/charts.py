"""Names of metrics for people; the raw name appears on hover, with its meaning from the metric reference.

Charts and tables as plain dictionaries for the browser.

Selection of an open page: run, stage, smoothing, metrics, trajectory file.

JSON for the browser of whatever runs have written down.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.series import MetricSeries, compute_moving_average, downsample_curve
from rl_core.analysis.metric_reference import METRIC_GROUPS
from rl_core.analysis.training_metrics import MetricDescription

_LABELS = {
    "train/success_rate": "Success in training",
    "train/success_rate_by_level/*": "Success in training, {}",
    "eval/success_rate": "Success, held out",
    "eval/success_rate_by_level/*": "Success, held out, {}",
    "eval/accuracy": "Pairs ranked rightly, held out",
    "train/accuracy": "Pairs ranked rightly in training",
    "train/margin": "Margin in training",
    "eval/margin": "Margin, held out",
    "train/loss": "Loss in training",
    "eval/loss": "Loss, held out",
    "eval/perplexity": "Perplexity, held out",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "train/epoch": "Epochs",
    "train/turns": "Turns",
    "train/action_tokens": "Sampled tokens",
    "train/action_tokens_p10": "Sampled tokens, 10th percentile",
    "train/action_tokens_p90": "Sampled tokens, 90th percentile",
    "train/completion_tokens": "Tokens after the prompt",
    "train/truncation_rate": "Cut by a limit",
    "train/loop_rate": "Rollouts with a loop",
    "train/coherent_rate": "Coherent rollouts",
    "train/right_action_rate": "Right action, right place",
    "train/exploration_efficiency": "Exploration efficiency",
    "train/advantages_mean": "Mean advantage",
    "train/advantages_std": "Spread of advantages",
    "train/zero_advantage_rate": "Samples with advantage 0",
    "train/trained_rollouts": "Rollouts trained on",
    "train/filtering_rate": "Samples filtered out",
    "train/failed_rate": "Failed episodes, share",
    "train/failed_episodes": "Failed episodes so far",
    "train/skipped_steps": "Skipped steps",
    "train/empty_updates": "Steps without a token to learn from",
    "train/tokens": "Tokens",
    "train/episode_return": "Return in training",
    "eval/episode_return": "Return, held out",
    "reward/mean": "Reward",
    "reward/std": "Spread of rewards",
    "reward/alarm": "Alarm: reward hacking",
    "reward/correlation/*": "Correlation with success, {}",
    "reward/weighted/*": "Weighted reward, {}",
    "reward/*": "Reward, {}",
    "policy/update_kl": "KL of the update",
    "policy/update_kl_k1": "KL of the update (k1)",
    "policy/ref_kl": "KL to the reference",
    "policy/sampler_kl": "KL of sampler and trainer",
    "policy/sampler_difference_max": "Largest difference of sampler and trainer",
    "policy/entropy": "Entropy",
    "policy/entropy_coef": "Weight of the entropy bonus",
    "policy/kl_coef": "Weight of the KL",
    "policy/loss": "Loss of the policy",
    "policy/mean_logprob": "Mean log-probability",
    "policy/ratio_mean": "Mean ratio",
    "policy/ratio_max": "Largest ratio",
    "policy/clip_fraction": "Clipped tokens",
    "policy/clip_fraction_low": "Tokens clipped below",
    "policy/clip_fraction_high": "Tokens clipped above",
    "perf/tokens_per_second": "Throughput",
    "perf/rollout_tokens_per_second": "Throughput of rollouts",
    "perf/memory_gb": "Memory",
    "perf/step_seconds": "Iteration",
    "perf/*_seconds": "Time: {}",
    "tool/misuse_rate": "Calls that failed",
    "tool/calls": "Tool calls",
    "tool/used_rate": "Rollouts with a call",
    "tool/hung_calls": "Calls that hang",
    "tool/share/*": "Share of calls, {}",
    "curriculum/stage": "Stage of the curriculum",
    "curriculum/stage_iterations": "Iterations in the stage",
    "curriculum/average/*": "Moving average, {}",
}


@functools.lru_cache(maxsize=4096)
def find_label(name: str) -> str:
    """Name for people; the metric's own where there is none."""
    if (label := _LABELS.get(name)) is not None:
        return label
    for pattern, label in _LABEL_PATTERNS:
        if found := pattern.fullmatch(name):
            return label.format(found[1].replace("_", " "))
    return name


_LABEL_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*", "([^/]+)")), label)
    for name, label in _LABELS.items()
    if "*" in name
]


@functools.lru_cache(maxsize=4096)
def build_hint(name: str) -> str:
    """Raw name, meaning and warning sign, for the mouse that rests on a name."""
    found = _find_reference_row(name)
    if found is None:
        return name
    worry = f"\nWorry: {found.worry}" if found.worry else ""
    return f"{name}: {found.meaning}{worry}"


def is_share(name: str) -> bool:
    """True = the metric reference has it between 0 and 1, a part of a whole."""
    found = _find_reference_row(name)
    return found is not None and found.unit == "share"


@functools.lru_cache(maxsize=4096)
def _find_reference_row(name: str) -> MetricDescription | None:
    exact, rows = _load_metric_reference()
    return exact.get(name) or next(
        (metric for pattern, metric in rows if pattern.fullmatch(name)), None
    )


@functools.cache
def _load_metric_reference() -> tuple[
    dict[str, MetricDescription], list[tuple[re.Pattern[str], MetricDescription]]
]:
    """Rows by name, and those with fields, the ones with the most text outside their fields first."""
    metrics = [metric for group in METRIC_GROUPS for metric in group.metrics]
    open_ones = [metric for metric in metrics if "{" in metric.name]
    open_ones.sort(key=lambda metric: -len(_NAME_FIELD.sub("", metric.name)))
    patterns = [(_compile_name_pattern(metric.name), metric) for metric in open_ones]
    return {metric.name: metric for metric in metrics}, patterns


_NAME_FIELD = re.compile(r"\{\w+\}")


def _compile_name_pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(re.escape(part) for part in _NAME_FIELD.split(name)))


MISSING_VALUE = "\u2013"  # missing value
NUM_COLOURS = 8  # of the style sheet; further lines reuse them, dashed

# Units by prefix or suffix of a metric's name; first match.
_UNITS = (
    ("perf/tokens_per_second", "tokens/s"),
    ("_tokens_per_second", "tokens/s"),
    ("perf/memory_gb", "GB"),
    ("learning_rate", ""),
    ("_seconds", "s"),
    ("_percentage", "%"),
    ("_megabytes", "MiB"),
    ("_watts", "W"),
    ("success_rate", "share"),
    ("_rate", "share"),
    ("accuracy", "share"),
    ("_fraction", "share"),
    ("policy/update_kl", "nats per token"),
    ("policy/sampler_kl", "nats per token"),
    ("policy/entropy", "nats per token"),
    ("logprob", "nats per token"),
    ("eval/perplexity", ""),
    ("train/tokens", "tokens per step"),
    ("_tokens", "tokens per episode"),
    ("train/turns", "per episode"),
    ("tool/calls", "per episode"),
    ("train/epoch", "epochs"),
    ("explained_variance", "share"),
    ("reward/correlation", "Pearson's r"),
    ("reward/mean", "per episode"),
    ("reward/std", "over episodes"),
    ("reward/alarm", "1 = total rises while success falls"),
    ("curriculum/stage_iterations", "iterations"),
)

# Scheduled or already averaged metrics, for which a moving average only adds lag.
_UNSMOOTHED_SUFFIXES = ("learning_rate", "_coef", "train/epoch", "perf/memory_gb")
_UNSMOOTHED_PREFIXES = ("curriculum/",)


@dataclass(frozen=True)
class DrawingOptions:
    """Drawing options of curves."""

    window: int = 10  # observations of the moving average; 1 = none
    by_time: bool = False  # x axis: minutes since the start of the run instead of steps

    def select_for_metric(self, name: str) -> DrawingOptions:
        """Options for one metric; no moving average for scheduled or averaged metrics."""
        plain = name.endswith(_UNSMOOTHED_SUFFIXES) or name.startswith(_UNSMOOTHED_PREFIXES)
        return DrawingOptions(1, self.by_time) if plain else self


def find_unit(name: str) -> str:
    """Unit of a metric; "" = none."""
    if name in ("policy/entropy_coef", "policy/kl_coef"):
        return ""
    known = next(
        (unit for part, unit in _UNITS if name.startswith(part) or name.endswith(part)), ""
    )
    return known or ("share" if is_share(name) else "")


def build_line(
    series: MetricSeries,
    name: str,
    colour: int,
    drawn: DrawingOptions,
    start: float,
    *,
    dash: bool = False,
) -> dict[str, Any]:
    """One line: observations, and optionally their moving average.

    Args:
        start: seconds since the epoch of minute 0.
    """
    steps, times, values = series.read_arrays()
    xs = (times - start) / 60 if drawn.by_time else steps
    order = np.argsort(xs, kind="stable")  # a resumed run plays steps again
    xs, values = xs[order], values[order]
    x, y = downsample_curve(xs, values)
    found: dict[str, Any] = {
        "name": name,
        "colour": colour % NUM_COLOURS,
        "dash": dash or colour >= NUM_COLOURS,
        "x": x,
        "y": y,
        "last": None if math.isnan(series.last) else series.last,
    }
    window = max(1, drawn.window // series.stride)
    if window > 1 and len(values) > 3:
        averages = compute_moving_average(values, window)
        found["ax"], found["avg"] = downsample_curve(xs, averages)
        found["last"] = float(averages[-1])
    return found


def build_chart(
    identity: str,
    title: str,
    lines: Sequence[dict[str, Any]],
    drawn: DrawingOptions,
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
    found: dict[str, Any] = {
        "id": identity,
        "title": title,
        "unit": unit,
        "x": axis,
        "lines": list(lines),
    }
    if (label := find_label(title)) != title:
        found["label"] = label
    if (hint := build_hint(title)) != title:
        found["hint"] = hint
    if unit == "share":  # drawn as percent
        found |= {"unit": "", "percent": True}
    if span is not None:
        found["range"] = list(span)
    if names:
        found |= {"names": list(names), "step": True, "range": [-0.3, len(names) - 0.7]}
    found["marks"] = list(moves)
    return found


def build_move_marks(stage: StageView, drawn: DrawingOptions, start: float) -> list[dict[str, Any]]:
    """The curriculum's moves as vertical lines, rollbacks in their own colour."""
    found = []
    series = stage.table.series.get("reward/mean")
    if not stage.curriculum or series is None:
        return []
    steps, times, _ = series.read_arrays()
    for move in stage.curriculum:
        try:
            iteration = float(move["iteration"])
        except (KeyError, TypeError, ValueError):
            continue
        index = min(
            len(steps) - 1, max(0, round(iteration) - 1)
        )  # the n-th iteration is the n-th observation
        at = (float(times[index]) - start) / 60 if drawn.by_time else float(steps[index])
        kind = str(move.get("kind", ""))
        label = (
            str(move.get("to", "")).strip("()")
            if kind == "advance"
            else f"{kind} to {move.get('to', '')}"
        )
        found.append({"x": at, "label": label, "kind": "" if kind == "advance" else "rollback"})
    return found


def choose_x_axis_name(stage: StageView) -> str:
    """X-axis name of a stage's steps."""
    series = stage.table.series
    first = series.get("reward/mean")
    return "iteration" if first is not None and first.last_step == first.count else "step"


def build_overlay_chart(
    name: str,
    runs: Sequence[tuple[RunView, StageView]],
    drawn: DrawingOptions,
    *,
    span: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """One metric of one stage, one line per run; `runs[0]` is the selected run."""
    lines = []
    for index, (run, stage) in enumerate(runs):
        series = stage.table.series.get(name)
        if series is not None:
            found = build_line(
                series,
                shorten_run_name(run, runs[0][0]),
                index,
                drawn.select_for_metric(name),
                run.started,
            )
            if len(runs) == 1:  # the title names the metric
                found["name"] = (
                    f"mean of {drawn.select_for_metric(name).window}" if "avg" in found else "now"
                )
            lines.append(found)
    run, stage = runs[0]
    moves = build_move_marks(stage, drawn, run.started)
    identity = f"{stage.label}:{name}:{'t' if drawn.by_time else 's'}"
    drawn_chart = build_chart(
        identity,
        name,
        lines,
        drawn,
        unit=find_unit(name),
        x=choose_x_axis_name(stage),
        span=span,
        moves=moves,
    )
    return drawn_chart | ({"compares": True} if len(runs) > 1 else {})


def shorten_run_name(run: RunView, selected_run: RunView) -> str:
    """Name of a compared run, short enough for a legend of one line: day and time, with the pipeline if another's."""
    day = run.started_text[5:16]
    return day if run.pipeline == selected_run.pipeline else f"{run.pipeline} {day}"


def build_charts_by_scale(
    identity: str,
    names: Iterable[tuple[str, str]],
    runs: Sequence[tuple[RunView, StageView]],
    drawn: DrawingOptions,
    *,
    title: str = "{}",
    unit: str = "",
) -> list[dict[str, Any]]:
    """As `family`, with a chart of its own for each metric whose scale is another than the first one's.

    Args:
        title: of such a chart, with the metric's label in it.
    """
    groups: list[tuple[float, list[tuple[str, str]]]] = []
    for name, label in names:
        found = [
            values
            for _, stage in runs
            if (s := stage.table.series.get(name)) and len(values := s.read_arrays()[2])
        ]
        if not found:
            continue
        size = max(float(np.abs(values).max()) for values in found)
        near = next((group for top, group in groups if _is_same_scale(top, size)), None)
        if near is not None:
            near.append((name, label))
        else:
            groups.append((size, [(name, label)]))
    charts = []
    for index, (_, group) in enumerate(groups):
        labels = ", ".join(label for _, label in group)
        charts.append(
            build_family_chart(
                f"{identity}:{index}", title.format(labels), group, runs, drawn, unit=unit
            )
        )
    return [found for found in charts if found is not None]


def _is_same_scale(one: float, other: float) -> bool:
    """True = the smaller of two curves is still read on the axis of the larger."""
    return one == 0 or other == 0 or max(one, other) <= 5 * min(one, other)


def build_family_chart(
    identity: str,
    title: str,
    names: Iterable[tuple[str, str]],
    runs: Sequence[tuple[RunView, StageView]],
    drawn: DrawingOptions,
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
                shown = label if index == 0 else f"{label}, {shorten_run_name(run, runs[0][0])}"
                drawn_line = build_line(
                    series,
                    shown,
                    colour,
                    drawn.select_for_metric(name),
                    run.started,
                    dash=index > 0,
                )
                lines.append(drawn_line | ({"quiet": True} if index else {}))
    if not lines:
        return None
    run, stage = runs[0]
    identity = f"{identity}:{stage.label}:{'t' if drawn.by_time else 's'}"
    moves = build_move_marks(stage, drawn, run.started)
    return build_chart(
        identity,
        title,
        lines,
        drawn,
        unit=unit,
        x=choose_x_axis_name(stage),
        span=span,
        moves=moves,
    )


def build_table(
    identity: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
) -> dict[str, Any]:
    """A table; a column named '#name' holds numbers, '~name' long text."""
    kinds = {"#": "num", "~": "text"}
    heads = [{"t": name.lstrip("#~"), "c": kinds.get(name[:1], "")} for name in columns]
    return {
        "kind": "table",
        "id": identity,
        "title": title,
        "columns": heads,
        "rows": list(rows),
        "note": note,
    }


def format_number(value: float | None, digits: int = 3) -> str:
    """Number formatted for display."""
    if value is None or not math.isfinite(value):
        return MISSING_VALUE
    if value and (abs(value) < 10**-digits or abs(value) >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def format_metric_value(name: str, value: float | None, digits: int = 3) -> str:
    """Value of a metric for display: shares as percentages."""
    return format_percent(value) if find_unit(name) == "share" else format_number(value, digits)


def build_metric_cell(name: str) -> str | dict[str, str]:
    """Cell of a table that names a metric for people."""
    label, hint = find_label(name), build_hint(name)
    return name if label == hint else {"t": label, "title": hint}


def format_percent(value: float | None) -> str:
    """Share as a percentage."""
    return MISSING_VALUE if value is None or not math.isfinite(value) else f"{value:.1%}"


def format_duration(seconds: float | None) -> str:
    """Duration formatted for display."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING_VALUE
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


DEFAULT_WINDOW = 10  # observations of the moving average, unless another number is chosen

ComparedStages = Sequence[
    tuple[RunView, StageView]
]  # the chosen run first, then those it is compared with


@dataclass(frozen=True)
class PageSelection:
    """Selection made on one open page."""

    run: str = ""  # "" = the newest run
    compare: tuple[str, ...] = ()
    stage: str = ""  # "" = the stage that trains, or trained last
    window: int = DEFAULT_WINDOW
    by_time: bool = False
    groups: tuple[str, ...] = ()  # metric prefixes on the tab of curves; () = train, reward, policy
    metrics: tuple[str, ...] = ()  # individually chosen metrics; they override groups
    source: str = ""  # trajectory file; "" = the first
    outcome: str = "all"  # all, right, wrong, with misuse

    @property
    def drawing_options(self) -> DrawingOptions:
        """Smoothing and x axis of the curves."""
        return DrawingOptions(self.window, self.by_time)


def encode_browser_json(value: Any) -> bytes:
    """As orjson.dumps; half a surrogate pair becomes "?", an integer beyond 64 bits a text.

    Both may be in what a run has left: the name of a folder that is not UTF-8, an observation.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_replace_unencodable(value))


def _replace_unencodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {
            _replace_unencodable(str(name)): _replace_unencodable(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_unencodable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _replace_unencodable(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    return value
