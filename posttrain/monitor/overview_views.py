"""Overview and system tabs: headline numbers, alarms, settings that differ, metric table, bars, speed and load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.monitor.charts import (
    MISSING_VALUE,
    NUM_COLOURS,
    ComparedStages,
    DrawingOptions,
    PageSelection,
    build_chart,
    build_charts_block,
    build_family_chart,
    build_hint,
    build_line,
    build_metric_cell,
    build_note,
    build_table,
    find_label,
    find_unit,
    format_duration,
    format_metric_value,
    format_number,
    format_percent,
)
from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.series import MetricSeries
from rl_core.settings.services import parse_condition
from tasks.stage_registry import START_MODEL

_TOOL_SHARE_PREFIX, _WEIGHTED_REWARD_PREFIX = "tool/share/", "reward/weighted/"
_MEAN_WINDOW = 10  # observations of a mean
_MAX_SETTINGS = 40
_IGNORED_SETTINGS = ("output", "name", "tracking", "run")  # they do not affect the computation
# Of the tiles for a running stage. KL takes precedence over entropy.
_CURRENT_METRICS = (
    ("success", "train/success_rate"),
    ("reward", "reward/mean"),
    ("KL", "policy/ref_kl"),
    ("KL", "policy/update_kl"),
    ("entropy", "policy/entropy"),
    ("loss", "train/loss"),
    ("held-out loss", "eval/loss"),
)
_MACHINE_METRICS = (
    ("system/process_cpu_percentage", "CPU of the run", "%", "100 % is one core"),
    ("system/cpu_utilization_percentage", "CPU of the machine", "%", "of all cores"),
    ("system/process_memory_megabytes", "memory of the run", "MiB", "resident"),
    ("system/system_memory_usage_percentage", "memory of the machine", "%", "in use"),
    ("system/disk_available_megabytes", "disk", "MiB", "free"),
)


def build_metric_table(stage: StageView, choice: PageSelection) -> dict[str, Any]:
    """Build a table with one row per metric of a stage: value, mean and slope over the window, observations."""
    window = max(2, choice.window)
    rows = []
    for name, series in sorted(stage.table.series.items()):
        if name.startswith("system/"):
            continue
        slope, slope_text = compute_slope(series, window), MISSING_VALUE
        if slope is not None:
            is_share = find_unit(name) == "share"
            slope_text = f"{100 * slope:+.3g}%" if is_share else f"{slope:+.3g}"
        value = format_metric_value(name, series.last, 4)
        mean = format_metric_value(name, series.compute_mean(window), 4)
        rows.append([build_metric_cell(name), value, mean, slope_text, f"{series.count:,}"])
    note = (
        f"Mean and slope are over the newest {window} observations of each metric; the slope is least squares, per "
        "step of the optimizer. Metrics with fewer than two steps have none."
    )
    heads = ("metric", "#present", f"#mean of {window}", "#slope", "#observations")
    return build_table("present", "Every metric now", heads, rows, note)


def compute_slope(series: MetricSeries, window: int) -> float | None:
    """Compute the least-squares slope per step over the newest `window` observations, at the stored resolution.

    Returns: None if the steps do not differ.
    """
    steps, _, values = series.read_arrays()
    count = max(2, math.ceil(window / series.stride))
    steps, values = steps[-count:], values[-count:]
    centred = steps - steps.mean() if len(steps) else steps
    variance = float(centred @ centred)
    return float(centred @ (values - values.mean())) / variance if variance > 0 else None


def build_tool_bars(
    stage: StageView, choice: PageSelection, episodes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any] | None:
    """Build bars of each tool's share of the calls: from training metrics, else from recorded trajectories.

    Args:
        episodes: rows of `summarize_tool_calls`.
    Returns: None without calls.
    """
    window = max(1, choice.window)
    shares = {
        name.removeprefix(_TOOL_SHARE_PREFIX): _compute_tool_share(series, stage, window)
        for name, series in stage.table.series.items()
        if name.startswith(_TOOL_SHARE_PREFIX)
    }
    note = f"Mean over the newest {window} iterations with calls."
    if not shares and (total := sum(row["calls"] for row in episodes)):
        shares = {row["tool"]: row["calls"] / total for row in episodes}
        note = "Of the newest trajectories."
    return _build_bars("tool shares", "Tools by share of the calls", shares, note)


def _compute_tool_share(series: MetricSeries, stage: StageView, window: int) -> float:
    """Compute the mean over the newest iterations with calls; a tool that was not called has no record there, so 0."""
    calls = stage.table.series.get("tool/calls")
    if calls is None or calls.stride > 1 or series.stride > 1:
        return series.compute_mean(window)
    call_steps, _, num_calls = calls.read_arrays()
    recent = call_steps[num_calls > 0][-window:]
    if not len(recent):
        return math.nan
    steps, _, values = series.read_arrays()
    return float(values[steps >= recent[0]].sum() / len(recent))


def build_reward_share_bars(stage: StageView, choice: PageSelection) -> dict[str, Any] | None:
    """Build bars of each component's share of the total reward, by absolute size; None below two components."""
    window = max(1, choice.window)
    sizes = {
        name.removeprefix(_WEIGHTED_REWARD_PREFIX): series.compute_mean(window)
        for name, series in stage.table.series.items()
        if name.startswith(_WEIGHTED_REWARD_PREFIX)
    }
    total = sum(map(abs, sizes.values()))
    if len(sizes) < 2 or not total:
        return None
    shares = {name: abs(value) / total for name, value in sizes.items()}
    note = f"|mean| of each weighted part over their sum, over the newest {window} iterations; a cost has a minus."
    bars = _build_bars("reward shares", "Parts of the reward by size", shares, note)
    assert bars is not None
    for item in bars["items"]:
        item["text"] += f" ({format_number(sizes[item['id']])})"
    return bars


def _build_bars(
    identity: str, title: str, shares: Mapping[str, float], note: str
) -> dict[str, Any] | None:
    known = {name: share for name, share in shares.items() if math.isfinite(share)}
    if not known:
        return None
    # By name, so that a tool keeps its colour.
    colours = {name: index % NUM_COLOURS for index, name in enumerate(sorted(known))}
    items = [
        {
            "id": name,
            "label": name,
            "share": min(1.0, max(0.0, share)),
            "text": format_percent(share),
            "colour": colours[name],
        }
        for name, share in sorted(known.items(), key=lambda item: (-item[1], item[0]))
    ]
    return {"kind": "bars", "id": identity, "title": title, "note": note, "items": items}


def find_heldout_success(run: RunView, label: str) -> float | None:
    """Find the success of a trained stage on held-out episodes, as recorded by the evaluation."""
    for stage in run.stages:
        if series := stage.table.series.get(f"eval/{label}/success_rate"):
            return series.last
    return None


def build_headline_tiles(run: RunView, stage: StageView | None) -> dict[str, Any] | None:
    """Build tiles of results if a run is over and was evaluated, else of its stage's numbers; None without any."""
    items: list[dict[str, str]] = []
    if run.has_process_ended:
        items = _build_result_tiles(run)
    if not items and stage is not None:
        items = _build_current_tiles(stage)
    return {"kind": "tiles", "id": "headline", "items": items} if items else None


_ENVIRONMENT_PREFIX = "success_rate_by_environment/"


def build_environment_chart(pairs: ComparedStages, choice: PageSelection) -> dict[str, Any] | None:
    """Build the curves of success by environment of a mixture; None for any other stage."""
    prefix = f"train/{_ENVIRONMENT_PREFIX}"
    names = [
        (name, name.removeprefix(prefix))
        for name in sorted(pairs[0][1].table.series)
        if name.startswith(prefix)
    ]
    return build_family_chart(
        "by environment",
        "Success by environment",
        names,
        pairs,
        choice.drawing_options,
        unit="share",
        span=(0.0, 1.0),
    )


def build_environment_table(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> dict[str, Any] | None:
    """Build a table with one row per environment of a mixture; None for any other run.

    Columns: share of the rollouts, success and reward in training, and success of every evaluated model.
    """
    evaluations = [stage for stage in run.stages if stage.label.startswith("evaluate")]
    models = [
        label
        for label in dict.fromkeys((START_MODEL, *(stage.label for stage in run.stages)))
        if _find_environment_rates(evaluations, label)
    ]
    training = pairs[0][1].table.series if pairs else {}
    prefix = "train/rollout_share_by_environment/"
    names = {name.removeprefix(prefix) for name in training if name.startswith(prefix)}
    for label in models:
        names |= _find_environment_rates(evaluations, label).keys()
    if not names:
        return None
    window = max(1, choice.window)

    def format_mean(prefix: str, name: str, *, is_share: bool) -> str:
        series = training.get(prefix + name)
        if series is None:
            return MISSING_VALUE
        mean = series.compute_mean(window)
        return format_percent(mean) if is_share else format_number(mean)

    rows = []
    for name in sorted(names):
        row = [name, format_mean(prefix, name, is_share=True)]
        row.append(format_mean("train/success_rate_by_environment/", name, is_share=True))
        row.append(format_mean("reward/mean_by_environment/", name, is_share=False))
        for label in models:
            rate = _find_environment_rates(evaluations, label).get(name)
            row.append(MISSING_VALUE if rate is None else format_percent(rate))
        rows.append(row)
    heads = [f"#{label.replace('_', ' ')}, held out" for label in models]
    columns = ("environment", "#share of rollouts", "#success in training", "#reward", *heads)
    note = f"Training: means over the newest {window} observations."
    return build_table("environments", "Environments", columns, rows, note if training else "")


def _find_environment_rates(stages: Iterable[StageView], label: str) -> dict[str, float]:
    """Return the held-out success of a model by environment."""
    prefix = f"eval/{label}/{_ENVIRONMENT_PREFIX}"
    return {
        name.removeprefix(prefix): series.last
        for stage in stages
        for name, series in stage.table.series.items()
        if name.startswith(prefix)
    }


def _build_result_tiles(run: RunView) -> list[dict[str, str]]:
    labels = dict.fromkeys((START_MODEL, *(stage.label for stage in run.stages)))
    rates = [
        (label, rate) for label in labels if (rate := find_heldout_success(run, label)) is not None
    ]
    items = []
    for index, (label, rate) in enumerate(rates):
        change = "success, held out"
        if label == START_MODEL:
            change = "the start model, held out"
        elif index:
            first_label, first_rate = rates[0]
            change = f"{100 * (rate - first_rate):+.1f} points over {first_label}"
        items.append(
            {
                "label": label.replace("_", " "),
                "value": format_percent(rate),
                "sub": change.replace("_", " "),
            }
        )
    results = [stage.result for stage in run.stages if stage.label == "promote" and stage.result]
    if items and results:
        items.append(_build_champion_tile(run, results[0]))
    return items


def _build_champion_tile(run: RunView, result: str) -> dict[str, str]:
    if run.status == "waiting":
        decision = "waits for approval"
    elif "is the champion already" in result:
        decision = "champion already"
    elif re.search(r"(?<!not) promoted\b", result):
        decision = "promoted"
    else:
        decision = "not promoted"
    reason = result.partition("; ")[0]  # a tile has no room for all reasons
    return {"label": "champion", "value": decision, "sub": reason, "title": result}


def _build_current_tiles(stage: StageView) -> list[dict[str, str]]:
    items: list[dict[str, str]] = []
    for label, name in _CURRENT_METRICS:
        series = stage.table.series.get(name)
        if series is None or (name == "train/loss" and "reward/mean" in stage.table.series):
            continue
        if label in ("KL", "entropy") and any(item["label"] == "KL" for item in items):
            continue
        values = series.read_arrays()[2]
        if label == "KL" and not values.any():
            continue  # with one step per rollout it is 0 by definition
        current = float(values[-_MEAN_WINDOW:].mean())
        difference = current - float(values[:_MEAN_WINDOW].mean())
        is_rate = name.endswith("_rate")
        change = f"{100 * difference:+.1f} points" if is_rate else f"{difference:+.3g}"
        items.append(
            {
                "label": label,
                "value": format_percent(current) if is_rate else format_number(current),
                "sub": f"{change} since the start" if len(values) > _MEAN_WINDOW else "",
                "title": build_hint(name),
            }
        )
    if stage.seconds_left is not None:
        items.append(
            {"label": "left in this stage", "value": format_duration(stage.seconds_left), "sub": ""}
        )
    return items


def build_alarm_notes(run: RunView) -> list[dict[str, Any]]:
    """Build notes about active alarms: of the reward, and conditions of `tracking.alerts` that are true now."""
    tracking = run.config.get("tracking")
    conditions = (tracking.get("alerts") if isinstance(tracking, Mapping) else None) or {}
    notes = []
    for stage in run.stages:
        label = stage.label.replace("_", " ")
        series = stage.table.series.get("reward/alarm")
        if series is not None and series.last > 0:
            step = _find_first_step(series, ">", 0.0)
            lines = [
                f"Stage {label}: the reward may be hacked.",
                f"Since step {step:.0f} the total reward rises while success falls (reward/alarm).",
            ]
            notes.append(build_note(f"alarm-{stage.label}", lines, "bad"))
        for name, condition in conditions.items():
            series = stage.table.series.get(name)
            if series is None or name == "reward/alarm" or not isinstance(condition, str):
                continue
            sign, bound = parse_condition(condition)
            is_true = series.last > bound if sign == ">" else series.last < bound
            if not is_true:
                continue
            step = _find_first_step(series, sign, bound)
            value = format_metric_value(name, series.last)
            lines = [
                f"Stage {label}: {find_label(name)} is {value}.",
                f"Since step {step:.0f} {name} is {sign} {bound:g} (tracking.alerts).",
            ]
            notes.append(build_note(f"alarm-{stage.label}-{name}", lines, "bad"))
    return notes


def _find_first_step(series: MetricSeries, sign: str, bound: float) -> float:
    """Find the first step from which a condition has held without a break up to the newest."""
    steps, _, values = series.read_arrays()
    is_true = values > bound if sign == ">" else values < bound
    breaks = np.flatnonzero(~is_true)
    first = breaks[-1] + 1 if len(breaks) else 0
    return float(steps[first]) if first < len(steps) else series.last_step


def build_settings_diff_table(runs: ComparedStages) -> dict[str, Any] | None:
    """Build a table of the settings in which the compared runs differ; None without a comparison or difference."""
    if len(runs) < 2:
        return None
    settings = [_flatten_settings(run.config) for run, _ in runs]
    keys = dict.fromkeys(key for values in settings for key in values)
    differing = [
        key
        for key in keys
        if key.split(".")[0] not in _IGNORED_SETTINGS
        and len({values.get(key, "-") for values in settings}) > 1
    ]
    if not differing:
        return None
    rows = [
        [key, *(values.get(key, "-") for values in settings)] for key in differing[:_MAX_SETTINGS]
    ]
    heads = ["setting", *(f"{run.group} {run.started_text}" for run, _ in runs)]
    note = ""
    if len(differing) > _MAX_SETTINGS:
        note = f"The first {_MAX_SETTINGS} of {len(differing)}."
    return build_table("settings", "Settings that differ", heads, rows, note)


def _flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)[:60]
    return flat


def build_system_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the system tab: throughput of the stage, and machine load over the whole run."""
    blocks: list[dict[str, Any]] = []
    series = run.system.series
    tiles = [
        {"label": label, "value": f"{format_number(series[name].last, 1)} {unit}", "sub": sub}
        for name, label, unit, sub in _MACHINE_METRICS
        if name in series
    ]
    if tiles:
        blocks.append({"kind": "tiles", "id": "machine", "items": tiles})
    speed_charts = build_speed_charts(pairs, choice) if pairs else []
    if speed_charts:
        title = f"Speed of {pairs[0][1].label.replace('_', ' ')}"
        blocks.append(build_charts_block("speed", speed_charts, title))
    load_charts = build_load_charts(run)
    if load_charts:
        blocks.append(build_charts_block("load", load_charts, "Machine"))
    if not blocks:
        text = (
            "No readings: tracking.system_metrics_seconds is 0 in this run, or it has just begun."
        )
        blocks.append(build_note("nothing", [text], "small"))
    return blocks


def build_speed_charts(pairs: ComparedStages, choice: PageSelection) -> list[dict[str, Any]]:
    """Build charts of throughput, iteration time and memory of a stage, as far as measured."""
    throughput = [
        ("perf/tokens_per_second", "all tokens"),
        ("perf/rollout_tokens_per_second", "rollouts"),
    ]
    seconds = [(f"perf/{part}_seconds", part) for part in ("step", "rollout", "reward", "update")]
    families = (
        ("speed", "Throughput", throughput, "tokens/s"),
        ("seconds", "Time of one iteration", seconds, "s"),
        ("memory", "Peak memory", [("perf/memory_gb", "peak")], "GB"),
    )
    charts = [
        build_family_chart(identity, title, names, pairs, choice.drawing_options, unit=unit)
        for identity, title, names, unit in families
    ]
    return [chart for chart in charts if chart is not None]


def build_load_charts(run: RunView) -> list[dict[str, Any]]:
    """Build charts of CPU, memory and GPU over the whole run, with stage starts marked."""
    options = DrawingOptions(window=1, by_time=True)
    starts = [
        {
            "x": (stage.started - run.started) / 60,
            "label": stage.label.replace("_", " "),
            "kind": "",
        }
        for stage in run.stages
        if stage.started >= run.started > 0 and stage.status != "cached"
    ]
    charts = []
    for title, unit, names, span in _list_load_families(run):
        lines = [
            build_line(run.system.series[f"system/{name}"], label, colour, options, run.started)
            for colour, (name, label) in enumerate(names)
            if f"system/{name}" in run.system.series
        ]
        if lines:
            chart = build_chart(
                f"load:{title}", title, lines, options, unit=unit, span=span, moves=starts
            )
            charts.append(chart)
    return charts


def _list_load_families(
    run: RunView,
) -> list[tuple[str, str, list[tuple[str, str]], tuple[float, float] | None]]:
    """List the charts of machine load: title, unit, metrics with labels, range of the y axis."""
    gpu_names = [name for name in run.system.series if name.startswith("system/gpu_")]
    gpus = sorted({name.split("/")[1].split("_")[1] for name in gpu_names})
    percent = (0.0, 100.0)
    memory = [("process_memory_megabytes", "run"), ("system_memory_usage_megabytes", "machine")]
    gpu_load = [(f"gpu_{gpu}_utilization_percentage", f"GPU {gpu}") for gpu in gpus]
    gpu_memory = [(f"gpu_{gpu}_memory_usage_megabytes", f"GPU {gpu}") for gpu in gpus]
    machine_cpu = [("cpu_utilization_percentage", "machine")]
    return [
        ("CPU of the run", "% of one core", [("process_cpu_percentage", "run")], percent),
        ("CPU of the machine", "% of all cores", machine_cpu, percent),
        ("Memory", "MiB", memory, None),
        ("GPU", "%", gpu_load, percent),
        ("GPU memory", "MiB", gpu_memory, None),
        ("Free disk", "MiB", [("disk_available_megabytes", "free")], None),
    ]
