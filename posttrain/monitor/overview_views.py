"""Blocks about the present: every metric's value, mean and slope; shares of tools and of reward components as bars.

Top of the overview: the numbers that matter now, or the results of a finished run; alarms; settings that differ.

System tab: throughput of a stage; CPU, memory and GPU over the whole run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.monitor.charts import (
    MISSING_VALUE,
    NUM_COLOURS,
    ComparedStages,
    DrawingOptions,
    PageSelection,
    build_chart,
    build_family_chart,
    build_hint,
    build_line,
    build_metric_cell,
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

_TOOL_SHARE_PREFIX, _WEIGHTED_REWARD_PREFIX = "tool/share/", "reward/weighted/"


def build_metric_table(stage: StageView, choice: PageSelection) -> dict[str, Any]:
    """One row per metric of a stage: present value, mean and slope over the window, observations."""
    window = max(2, choice.window)
    rows = []
    for name, series in sorted(stage.table.series.items()):
        if name.startswith("system/"):
            continue
        lean = compute_slope(series, window)
        steep = (
            MISSING_VALUE
            if lean is None
            else f"{100 * lean:+.3g}%"
            if find_unit(name) == "share"
            else f"{lean:+.3g}"
        )
        now, mean = (
            format_metric_value(name, series.last, 4),
            format_metric_value(name, series.compute_mean(window), 4),
        )
        rows.append([build_metric_cell(name), now, mean, steep, f"{series.count:,}"])
    note = (
        f"Mean and slope are over the newest {window} observations of each metric; the slope is least squares, per "
        "step of the optimizer. Metrics with fewer than two steps have none."
    )
    heads = ("metric", "#present", f"#mean of {window}", "#slope", "#observations")
    return build_table("present", "Every metric now", heads, rows, note)


def compute_slope(series: MetricSeries, window: int) -> float | None:
    """Least-squares slope per step over the newest `window` observations, at the stored resolution; None = no slope."""
    steps, _, values = series.read_arrays()
    count = max(2, math.ceil(window / series.stride))
    steps, values = steps[-count:], values[-count:]
    centred = steps - steps.mean() if len(steps) else steps
    spread = float(centred @ centred)
    return float(centred @ (values - values.mean())) / spread if spread > 0 else None


def build_tool_bars(
    stage: StageView, choice: PageSelection, episodes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any] | None:
    """Share of each tool among the calls, now: of training's metrics, else of recorded trajectories; None = no call.

    episodes: rows of `summarize_tool_calls`.
    """
    window = max(1, choice.window)
    shares = {
        name.removeprefix(_TOOL_SHARE_PREFIX): _compute_tool_share(series, stage, window)
        for name, series in stage.table.series.items()
        if name.startswith(_TOOL_SHARE_PREFIX)
    }
    told = f"Mean over the newest {window} iterations with calls."
    if not shares and (total := sum(row["calls"] for row in episodes)):
        shares, told = (
            {row["tool"]: row["calls"] / total for row in episodes},
            "Of the newest trajectories.",
        )
    return _build_bars("tool shares", "Tools by share of the calls", shares, told)


def _compute_tool_share(series: MetricSeries, stage: StageView, window: int) -> float:
    """Mean over the newest iterations with calls; one in which the tool was not called recorded no share, so 0."""
    calls = stage.table.series.get("tool/calls")
    if calls is None or calls.stride > 1 or series.stride > 1:
        return series.compute_mean(window)
    at, _, number_of = calls.read_arrays()
    recent = at[number_of > 0][-window:]
    steps, _, values = series.read_arrays()
    return float(values[steps >= recent[0]].sum() / len(recent)) if len(recent) else math.nan


def build_reward_share_bars(stage: StageView, choice: PageSelection) -> dict[str, Any] | None:
    """Share of each component in the total reward, by the size of what it adds, now; None = one component or none."""
    window = max(1, choice.window)
    sizes = {
        name.removeprefix(_WEIGHTED_REWARD_PREFIX): series.compute_mean(window)
        for name, series in stage.table.series.items()
        if name.startswith(_WEIGHTED_REWARD_PREFIX)
    }
    total = sum(map(abs, sizes.values()))
    if len(sizes) < 2 or not total:
        return None
    told = f"|mean| of each weighted part over their sum, over the newest {window} iterations; a cost has a minus."
    found = _build_bars(
        "reward shares",
        "Parts of the reward by size",
        {n: abs(v) / total for n, v in sizes.items()},
        told,
    )
    assert found is not None
    for item in found["items"]:
        item["text"] += f" ({format_number(sizes[item['id']])})"
    return found


def _build_bars(
    identity: str, title: str, shares: Mapping[str, float], note: str
) -> dict[str, Any] | None:
    known = {name: share for name, share in shares.items() if math.isfinite(share)}
    if not known:
        return None
    colours = {
        name: index % NUM_COLOURS for index, name in enumerate(sorted(known))
    }  # a tool keeps its colour
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


_MEAN_WINDOW = 10  # observations of a mean
_MAX_SETTINGS = 40  # settings
_IGNORED_SETTINGS = (
    "output",
    "name",
    "tracking",
    "run",
)  # settings that decide nothing of what is computed


def find_heldout_success(run: RunView, label: str) -> float | None:
    """Success of a trained stage on held-out episodes, as the evaluation recorded it."""
    series = next(
        (s for stage in run.stages if (s := stage.table.series.get(f"eval/{label}/success_rate"))),
        None,
    )
    return series.last if series is not None else None


def build_headline_tiles(run: RunView, stage: StageView | None) -> dict[str, Any] | None:
    """Results of a run that is over and was evaluated, else the numbers of its stage; None = there are none yet."""
    items = _build_result_tiles(run) if run.is_over or run.status == "waiting" else []
    items = items or (_build_current_tiles(stage) if stage is not None else [])
    return {"kind": "tiles", "id": "headline", "items": items} if items else None


def _build_result_tiles(run: RunView) -> list[dict[str, str]]:
    rates = [
        (stage.label, rate)
        for stage in run.stages
        if (rate := find_heldout_success(run, stage.label)) is not None
    ]
    items = []
    for index, (label, rate) in enumerate(rates):
        change = (
            f"{100 * (rate - rates[0][1]):+.1f} points over {rates[0][0]}"
            if index
            else "success, held out"
        )
        items.append(
            {
                "label": label.replace("_", " "),
                "value": format_percent(rate),
                "sub": change.replace("_", " "),
            }
        )
    promote = next(
        (stage for stage in run.stages if stage.label == "promote" and stage.result), None
    )
    if items and promote is not None:
        decision = (
            "promoted" if re.search(r"(?<!not) promoted\b", promote.result) else "not promoted"
        )
        decision = "champion already" if "is the champion already" in promote.result else decision
        decision = "waits for approval" if run.status == "waiting" else decision
        why = _cut_first_clause(promote.result)
        items.append({"label": "champion", "value": decision, "sub": why, "title": promote.result})
    return items


def _cut_first_clause(note: str) -> str:
    """Decision with its first reason; a tile has no room for all of them."""
    return note.partition("; ")[0]


def _build_current_tiles(stage: StageView) -> list[dict[str, str]]:
    items: list[dict[str, str]] = []
    for label, name in (
        ("success", "train/success_rate"),
        ("reward", "reward/mean"),
        ("KL", "policy/ref_kl"),
        ("KL", "policy/update_kl"),
        ("entropy", "policy/entropy"),
        ("loss", "train/loss"),
        ("held-out loss", "eval/loss"),
    ):
        series = stage.table.series.get(name)
        if series is None or (name == "train/loss" and "reward/mean" in stage.table.series):
            continue
        if label in ("KL", "entropy") and any(item["label"] == "KL" for item in items):
            continue  # one of them: entropy where no KL is measured
        values = series.read_arrays()[2]
        if label == "KL" and not values.any():
            continue  # of one step per rollout it is 0 by definition
        now, first = float(values[-_MEAN_WINDOW:].mean()), float(values[:_MEAN_WINDOW].mean())
        is_rate = name.endswith("_rate")
        change = f"{100 * (now - first):+.1f} points" if is_rate else f"{now - first:+.3g}"
        told = f"{change} since the start" if len(values) > _MEAN_WINDOW else ""
        items.append(
            {
                "label": label,
                "value": format_percent(now) if is_rate else format_number(now),
                "sub": told,
                "title": build_hint(name),
            }
        )
    if stage.seconds_left is not None:
        items.append(
            {"label": "left in this stage", "value": format_duration(stage.seconds_left), "sub": ""}
        )
    return items


def build_alarm_notes(run: RunView) -> list[dict[str, Any]]:
    """Notes about alarms that are on: of the reward, and conditions of `tracking.alerts` that are true now."""
    tracking = run.config.get("tracking")
    conditions = (tracking.get("alerts") if isinstance(tracking, Mapping) else None) or {}
    found = []
    for stage in run.stages:
        label = stage.label.replace("_", " ")
        series = stage.table.series.get("reward/alarm")
        if series is not None and series.last > 0:
            lines = [
                f"Stage {label}: the reward may be hacked.",
                f"Since step {_find_first_step(series, '>', 0.0):.0f} the total reward rises while success falls (reward/alarm).",
            ]
            found.append(
                {"kind": "note", "id": f"alarm-{stage.label}", "tone": "bad", "lines": lines}
            )
        for name, text in conditions.items():
            series = stage.table.series.get(name)
            if series is None or name == "reward/alarm" or not isinstance(text, str):
                continue
            sign, bound = parse_condition(text)
            if series.last > bound if sign == ">" else series.last < bound:
                lines = [
                    f"Stage {label}: {find_label(name)} is {format_metric_value(name, series.last)}.",
                    f"Since step {_find_first_step(series, sign, bound):.0f} {name} is {sign} {bound:g} (tracking.alerts).",
                ]
                found.append(
                    {
                        "kind": "note",
                        "id": f"alarm-{stage.label}-{name}",
                        "tone": "bad",
                        "lines": lines,
                    }
                )
    return found


def _find_first_step(series: MetricSeries, sign: str, bound: float) -> float:
    """First step of those up to the newest at which a condition holds without a break."""
    steps, _, values = series.read_arrays()
    held = values > bound if sign == ">" else values < bound
    broken = np.flatnonzero(~held)
    first = broken[-1] + 1 if len(broken) else 0
    return float(steps[first]) if first < len(steps) else series.last_step


def build_settings_diff_table(runs: ComparedStages) -> dict[str, Any] | None:
    """Table of the settings in which the compared runs differ; None where nothing is compared or nothing differs."""
    if len(runs) < 2:
        return None
    flat = [_flatten_settings(run.config) for run, _ in runs]
    keys = dict.fromkeys(
        key for one in flat for key in one if key.split(".")[0] not in _IGNORED_SETTINGS
    )
    differ = [key for key in keys if len({one.get(key, "-") for one in flat}) > 1]
    if not differ:
        return None
    rows = [[key, *(one.get(key, "-") for one in flat)] for key in differ[:_MAX_SETTINGS]]
    heads = ["setting", *(f"{run.pipeline} {run.started_text}" for run, _ in runs)]
    note = f"The first {_MAX_SETTINGS} of {len(differ)}." if len(differ) > _MAX_SETTINGS else ""
    return build_table("settings", "Settings that differ", heads, rows, note)


def _flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten_settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)[:60]
    return found


def build_system_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Throughput of the stage, and machine load over the whole run."""
    blocks: list[dict[str, Any]] = []
    newest = run.system.series
    tiles = [
        {"label": label, "value": f"{format_number(newest[name].last, 1)} {unit}", "sub": sub}
        for name, label, unit, sub in (
            ("system/process_cpu_percentage", "CPU of the run", "%", "100 % is one core"),
            ("system/cpu_utilization_percentage", "CPU of the machine", "%", "of all cores"),
            ("system/process_memory_megabytes", "memory of the run", "MiB", "resident"),
            ("system/system_memory_usage_percentage", "memory of the machine", "%", "in use"),
            ("system/disk_available_megabytes", "disk", "MiB", "free"),
        )
        if name in newest
    ]
    if tiles:
        blocks.append({"kind": "tiles", "id": "machine", "items": tiles})
    speed = build_speed_charts(pairs, choice) if pairs else []
    if speed:
        label = pairs[0][1].label.replace("_", " ")
        blocks.append(
            {
                "kind": "charts",
                "id": "speed",
                "title": f"Speed of {label}",
                "note": "",
                "charts": speed,
            }
        )
    load = build_load_charts(run)
    if load:
        blocks.append(
            {"kind": "charts", "id": "load", "title": "Machine", "note": "", "charts": load}
        )
    return blocks or [
        {
            "kind": "note",
            "id": "nothing",
            "tone": "small",
            "lines": [
                "No readings: tracking.system_metrics_seconds is 0 in this run, or it has just begun."
            ],
        }
    ]


def build_speed_charts(pairs: ComparedStages, choice: PageSelection) -> list[dict[str, Any]]:
    """Throughput, iteration time and memory of a stage, as far as measured."""
    parts = ("step", "rollout", "reward", "update")
    charts = [
        build_family_chart(
            "speed",
            "Throughput",
            [
                ("perf/tokens_per_second", "all tokens"),
                ("perf/rollout_tokens_per_second", "rollouts"),
            ],
            pairs,
            choice.drawing_options,
            unit="tokens/s",
        ),
        build_family_chart(
            "seconds",
            "Time of one iteration",
            [(f"perf/{part}_seconds", part) for part in parts],
            pairs,
            choice.drawing_options,
            unit="s",
        ),
        build_family_chart(
            "memory",
            "Peak memory",
            [("perf/memory_gb", "peak")],
            pairs,
            choice.drawing_options,
            unit="GB",
        ),
    ]
    return [found for found in charts if found is not None]


def build_load_charts(run: RunView) -> list[dict[str, Any]]:
    """CPU, memory and GPU over the whole run, with stage starts marked."""
    drawn = DrawingOptions(window=1, by_time=True)
    begun = [
        {
            "x": (stage.started - run.started) / 60,
            "label": stage.label.replace("_", " "),
            "kind": "",
        }
        for stage in run.stages
        if stage.started >= run.started > 0 and stage.status != "cached"
    ]
    gpus = sorted(
        {
            name.split("/")[1].split("_")[1]
            for name in run.system.series
            if name.startswith("system/gpu_")
        }
    )
    wanted: list[tuple[str, str, list[tuple[str, str]], tuple[float, float] | None]] = [
        ("CPU of the run", "% of one core", [("process_cpu_percentage", "run")], (0.0, 100.0)),
        (
            "CPU of the machine",
            "% of all cores",
            [("cpu_utilization_percentage", "machine")],
            (0.0, 100.0),
        ),
        (
            "Memory",
            "MiB",
            [("process_memory_megabytes", "run"), ("system_memory_usage_megabytes", "machine")],
            None,
        ),
        (
            "GPU",
            "%",
            [(f"gpu_{gpu}_utilization_percentage", f"GPU {gpu}") for gpu in gpus],
            (0.0, 100.0),
        ),
        (
            "GPU memory",
            "MiB",
            [(f"gpu_{gpu}_memory_usage_megabytes", f"GPU {gpu}") for gpu in gpus],
            None,
        ),
        ("Free disk", "MiB", [("disk_available_megabytes", "free")], None),
    ]
    charts = []
    for title, unit, names, span in wanted:
        lines = [
            build_line(run.system.series[f"system/{name}"], label, colour, drawn, run.started)
            for colour, (name, label) in enumerate(names)
            if f"system/{name}" in run.system.series
        ]
        if lines:
            charts.append(
                build_chart(f"load:{title}", title, lines, drawn, unit=unit, span=span, moves=begun)
            )
    return charts
