"""Charts and tables of a run as plain dictionaries for the browser; metric labels; the selection of an open page.

Pages show a metric's label; its raw name, with its meaning from the metric reference, appears on hover.
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
from posttrain.monitor.seed_groups import build_band_line, group_seed_runs
from posttrain.monitor.series import MetricSeries, compute_moving_average, downsample_curve
from rl_core.analysis.metric_reference import METRIC_GROUPS, MetricDescription

MISSING_VALUE = "\u2013"
NUM_COLOURS = 8  # of the style sheet; further lines reuse them, dashed
DEFAULT_WINDOW = 10  # observations of the moving average

# The selected run first, then those it is compared with.
ComparedStages = Sequence[tuple[RunView, StageView]]

_LABELS = {
    "train/success_rate": "Success in training",
    "train/success_rate_by_level/*": "Success in training, {}",
    "train/success_rate_by_environment/*": "Success in training, {}",
    "train/rollout_share_by_environment/*": "Share of rollouts, {}",
    "reward/mean_by_environment/*": "Reward, {}",
    "eval/success_rate_by_environment/*": "Success, held out, {}",
    "eval/reward_mean_by_environment/*": "Reward, held out, {}",
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
    "tool/rapr": "Pixel-space reasoning (RaPR)",
    "tool/hung_calls": "Calls that hang",
    "tool/share/*": "Share of calls, {}",
    "curriculum/stage": "Stage of the curriculum",
    "curriculum/stage_iterations": "Iterations in the stage",
    "curriculum/average/*": "Moving average, {}",
}

_LABEL_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*", "([^/]+)")), label)
    for name, label in _LABELS.items()
    if "*" in name
]
_NAME_FIELD = re.compile(r"\{\w+\}")

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

    window: int = DEFAULT_WINDOW  # observations of the moving average; 1 = none
    by_time: bool = False  # x axis: minutes since the start of the run instead of steps

    def select_for_metric(self, name: str) -> DrawingOptions:
        """Return the options for one metric: no moving average for scheduled or averaged metrics."""
        if name.endswith(_UNSMOOTHED_SUFFIXES) or name.startswith(_UNSMOOTHED_PREFIXES):
            return DrawingOptions(1, self.by_time)
        return self


@dataclass(frozen=True)
class PageSelection:
    """The selection on one open page."""

    run: str = ""  # "" = the newest run
    compare: tuple[str, ...] = ()
    stage: str = ""  # "" = the stage that trains, or trained last
    window: int = DEFAULT_WINDOW
    by_time: bool = False
    groups: tuple[str, ...] = ()  # metric prefixes on the tab of curves; () = train, reward, policy
    metrics: tuple[str, ...] = ()  # individually selected metrics; they override groups
    source: str = ""  # trajectory file; "" = the first
    outcome: str = "all"  # all, right, wrong, with misuse
    search: str = ""  # words in the names of metrics; they override single metrics and groups

    @property
    def drawing_options(self) -> DrawingOptions:
        """Smoothing and x axis of the curves."""
        return DrawingOptions(self.window, self.by_time)


@functools.lru_cache(maxsize=4096)
def find_label(name: str) -> str:
    """Find the label of a metric; without one, return its name."""
    if (label := _LABELS.get(name)) is not None:
        return label
    for pattern, label in _LABEL_PATTERNS:
        if match := pattern.fullmatch(name):
            return label.format(match[1].replace("_", " "))
    return name


@functools.lru_cache(maxsize=4096)
def build_hint(name: str) -> str:
    """Build the hover text of a metric: raw name, meaning, warning sign."""
    description = _find_description(name)
    if description is None:
        return name
    worry = f"\nWorry: {description.worry}" if description.worry else ""
    return f"{name}: {description.meaning}{worry}"


def is_share(name: str) -> bool:
    """Return whether the metric reference says that a metric is a share between 0 and 1."""
    description = _find_description(name)
    return description is not None and description.unit == "share"


@functools.lru_cache(maxsize=4096)
def _find_description(name: str) -> MetricDescription | None:
    by_name, patterns = _load_metric_reference()
    if (description := by_name.get(name)) is not None:
        return description
    return next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


@functools.cache
def _load_metric_reference() -> tuple[
    dict[str, MetricDescription], list[tuple[re.Pattern[str], MetricDescription]]
]:
    """Load the descriptions by name, and as patterns those with fields, most text outside their fields first."""
    metrics = [metric for group in METRIC_GROUPS for metric in group.metrics]
    with_fields = [metric for metric in metrics if "{" in metric.name]
    with_fields.sort(key=lambda metric: -len(_NAME_FIELD.sub("", metric.name)))
    patterns = [(_compile_name_pattern(metric.name), metric) for metric in with_fields]
    return {metric.name: metric for metric in metrics}, patterns


def _compile_name_pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(re.escape(part) for part in _NAME_FIELD.split(name)))


def find_unit(name: str) -> str:
    """Find the unit of a metric; "" = none."""
    if name in ("policy/entropy_coef", "policy/kl_coef"):
        return ""
    units = (unit for part, unit in _UNITS if name.startswith(part) or name.endswith(part))
    return next(units, "") or ("share" if is_share(name) else "")


def build_line(
    series: MetricSeries,
    name: str,
    colour: int,
    options: DrawingOptions,
    start: float,
    *,
    dash: bool = False,
) -> dict[str, Any]:
    """Build one line: observations, and optionally their moving average.

    Args:
        start: seconds since the epoch of minute 0.
    """
    steps, times, values = series.read_arrays()
    xs = (times - start) / 60 if options.by_time else steps
    order = np.argsort(xs, kind="stable")  # a resumed run repeats steps
    xs, values = xs[order], values[order]
    x, y = downsample_curve(xs, values)
    line: dict[str, Any] = {
        "name": name,
        "colour": colour % NUM_COLOURS,
        "dash": dash or colour >= NUM_COLOURS,
        "x": x,
        "y": y,
        "last": None if math.isnan(series.last) else series.last,
    }
    window = max(1, options.window // series.stride)
    if window > 1 and len(values) > 3:
        averages = compute_moving_average(values, window)
        line["ax"], line["avg"] = downsample_curve(xs, averages)
        line["last"] = float(averages[-1])
    return line


def build_chart(
    identity: str,
    title: str,
    lines: Sequence[dict[str, Any]],
    options: DrawingOptions,
    *,
    unit: str = "",
    x: str = "step",
    span: tuple[float, float] | None = None,
    moves: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Build one chart.

    Args:
        span: (lowest, highest) that the y axis shows at least.
        moves: vertical lines, see `build_move_marks`.
        names: names of the values 0, 1, 2, ...; the line is then drawn in steps.
    """
    chart: dict[str, Any] = {
        "id": identity,
        "title": title,
        "unit": unit,
        "x": "minutes since the run began" if options.by_time else x,
        "lines": list(lines),
    }
    if (label := find_label(title)) != title:
        chart["label"] = label
    if (hint := build_hint(title)) != title:
        chart["hint"] = hint
    if unit == "share":  # drawn as percent
        chart |= {"unit": "", "percent": True}
    if span is not None:
        chart["range"] = list(span)
    if names:
        chart |= {"names": list(names), "step": True, "range": [-0.3, len(names) - 0.7]}
    chart["marks"] = list(moves)
    return chart


def build_move_marks(
    stage: StageView, options: DrawingOptions, start: float
) -> list[dict[str, Any]]:
    """Build vertical lines for the curriculum's moves; rollbacks have another colour."""
    series = stage.table.series.get("reward/mean")
    if not stage.curriculum or series is None:
        return []
    marks = []
    steps, times, _ = series.read_arrays()
    for move in stage.curriculum:
        try:
            iteration = float(move["iteration"])
        except (KeyError, TypeError, ValueError):
            continue
        # The n-th iteration is the n-th observation.
        index = min(len(steps) - 1, max(0, round(iteration) - 1))
        x = (float(times[index]) - start) / 60 if options.by_time else float(steps[index])
        kind, target = str(move.get("kind", "")), str(move.get("to", ""))
        if kind == "advance":
            marks.append({"x": x, "label": target.strip("()"), "kind": ""})
        else:
            marks.append({"x": x, "label": f"{kind} to {target}", "kind": "rollback"})
    return marks


def choose_x_axis_name(stage: StageView) -> str:
    """Return the x-axis name of a stage's steps."""
    rewards = stage.table.series.get("reward/mean")
    return "iteration" if rewards is not None and rewards.last_step == rewards.count else "step"


def build_overlay_chart(
    name: str,
    runs: ComparedStages,
    options: DrawingOptions,
    *,
    span: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Build a chart of one metric of one stage, one line per run or, for seeds of one configuration, one with a band.

    `runs[0]` is the selected run.
    """
    lines = []
    metric_options = options.select_for_metric(name)
    groups = group_seed_runs(runs)
    for index, group in enumerate(groups):
        run, stage = group[0]
        label = shorten_run_name(run, runs[0][0])
        if len(group) > 1:
            band = _build_seeds_line(name, group, label, index, metric_options)
            lines += [band] if band is not None else []
            continue
        series = stage.table.series.get(name)
        if series is None:
            continue
        line = build_line(series, label, index, metric_options, run.started)
        if len(runs) == 1:  # the title names the metric
            line["name"] = f"mean of {metric_options.window}" if "avg" in line else "now"
        lines.append(line)
    run, stage = runs[0]
    chart = build_chart(
        f"{stage.label}:{name}:{'t' if options.by_time else 's'}",
        name,
        lines,
        options,
        unit=find_unit(name),
        x=choose_x_axis_name(stage),
        span=span,
        moves=build_move_marks(stage, options, run.started),
    )
    return chart | ({"compares": True} if len(groups) > 1 else {})


def _build_seeds_line(
    name: str, group: ComparedStages, label: str, colour: int, options: DrawingOptions
) -> dict[str, Any] | None:
    """Build the line of several seeds of one configuration, with a band from the least to the largest."""
    curves, window = [], options.window
    for run, stage in group:
        series = stage.table.series.get(name)
        if series is None:
            continue
        steps, times, values = series.read_arrays()
        xs = (times - run.started) / 60 if options.by_time else steps
        xs, last = np.unique(xs[::-1], return_index=True)  # of a repeated step the newest value
        curves.append((xs, values[::-1][last]))
        window = min(window, max(1, options.window // series.stride))
    return build_band_line(curves, f"{len(curves)} seeds, {label}", colour, window)


def shorten_run_name(run: RunView, selected_run: RunView) -> str:
    """Shorten the name of a compared run to a one-line legend: day and time, and another pipeline's name."""
    day = run.started_text[5:16]
    return day if run.group == selected_run.group else f"{run.group} {day}"


def build_charts_by_scale(
    identity: str,
    names: Iterable[tuple[str, str]],
    runs: ComparedStages,
    options: DrawingOptions,
    *,
    title: str = "{}",
    unit: str = "",
) -> list[dict[str, Any]]:
    """Build charts as `build_family_chart` does, one for each group of metrics of similar scale.

    Args:
        names: metrics with their labels.
        title: of each chart; {} is replaced by the labels of its metrics.
    """
    groups: list[tuple[float, list[tuple[str, str]]]] = []  # scale, metrics with labels
    for name, label in names:
        scale = _measure_scale(name, runs)
        if scale is None:
            continue
        group = next((group for other, group in groups if _is_same_scale(other, scale)), None)
        if group is not None:
            group.append((name, label))
        else:
            groups.append((scale, [(name, label)]))
    charts = []
    for index, (_, group) in enumerate(groups):
        group_title = title.format(", ".join(label for _, label in group))
        charts.append(
            build_family_chart(f"{identity}:{index}", group_title, group, runs, options, unit=unit)
        )
    return [chart for chart in charts if chart is not None]


def _measure_scale(name: str, runs: ComparedStages) -> float | None:
    """Return the largest absolute value of a metric over all runs; None without values."""
    tables = [stage.table.series for _, stage in runs]
    values = [table[name].read_arrays()[2] for table in tables if name in table]
    return max((float(np.abs(part).max()) for part in values if len(part)), default=None)


def _is_same_scale(scale: float, other: float) -> bool:
    """Return whether the smaller of two curves can be read on the axis of the larger."""
    return scale == 0 or other == 0 or max(scale, other) <= 5 * min(scale, other)


def build_family_chart(
    identity: str,
    title: str,
    names: Iterable[tuple[str, str]],
    runs: ComparedStages,
    options: DrawingOptions,
    *,
    unit: str = "",
    span: tuple[float, float] | None = None,
) -> dict[str, Any] | None:
    """Build a chart of several metrics, one colour each; other runs are dashed. None if no run has any of them."""
    lines = []
    for colour, (name, label) in enumerate(names):
        metric_options = options.select_for_metric(name)
        for index, (run, stage) in enumerate(runs):
            series = stage.table.series.get(name)
            if series is None:
                continue
            if index == 0:
                lines.append(build_line(series, label, colour, metric_options, run.started))
            else:
                run_label = f"{label}, {shorten_run_name(run, runs[0][0])}"
                line = build_line(series, run_label, colour, metric_options, run.started, dash=True)
                lines.append(line | {"quiet": True})
    if not lines:
        return None
    run, stage = runs[0]
    return build_chart(
        f"{identity}:{stage.label}:{'t' if options.by_time else 's'}",
        title,
        lines,
        options,
        unit=unit,
        x=choose_x_axis_name(stage),
        span=span,
        moves=build_move_marks(stage, options, run.started),
    )


def build_charts_block(
    identity: str, charts: Sequence[dict[str, Any]], title: str = "", note: str = ""
) -> dict[str, Any]:
    """Build a block of charts."""
    return {"kind": "charts", "id": identity, "title": title, "note": note, "charts": list(charts)}


def build_note(identity: str, lines: Sequence[str], tone: str = "") -> dict[str, Any]:
    """Build a note: a heading and further lines. `tone`: small, bad, or "" for a large note."""
    note: dict[str, Any] = {"kind": "note", "id": identity}
    if tone:
        note["tone"] = tone
    return note | {"lines": list(lines)}


def build_table(
    identity: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
) -> dict[str, Any]:
    """Build a table; a column named '#name' has numbers, '~name' long text."""
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
    """Format a number for display."""
    if value is None or not math.isfinite(value):
        return MISSING_VALUE
    if value and (abs(value) < 10**-digits or abs(value) >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def format_metric_value(name: str, value: float | None, digits: int = 3) -> str:
    """Format the value of a metric for display: shares as percentages."""
    return format_percent(value) if find_unit(name) == "share" else format_number(value, digits)


def build_metric_cell(name: str) -> str | dict[str, str]:
    """Build the cell of a table that names a metric."""
    label, hint = find_label(name), build_hint(name)
    return name if label == hint else {"t": label, "title": hint}


def format_percent(value: float | None) -> str:
    """Format a share as a percentage."""
    return MISSING_VALUE if value is None or not math.isfinite(value) else f"{value:.1%}"


def format_duration(seconds: float | None) -> str:
    """Format a duration for display."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING_VALUE
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def encode_browser_json(value: Any) -> bytes:
    """Encode JSON; half a surrogate pair becomes "?", an integer beyond 64 bits a string.

    Both may occur in a run's files: in a folder name that is not UTF-8, in an observation.
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
