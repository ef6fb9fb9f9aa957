"""Tabs of the page: a run as blocks of tiles, charts, tables and trajectories."""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from posttrain.monitor.agent_views import (
    build_curriculum_tab,
    build_rewards_tab,
    build_tools_tab,
    build_trajectories_tab,
)
from posttrain.monitor.charts import (
    MISSING_VALUE,
    ComparedStages,
    PageSelection,
    build_charts_block,
    build_metric_cell,
    build_note,
    build_overlay_chart,
    build_table,
    encode_browser_json,
    find_label,
    format_duration,
    format_metric_value,
    format_number,
    format_percent,
)
from posttrain.monitor.overview_views import (
    build_alarm_notes,
    build_environment_chart,
    build_environment_table,
    build_headline_tiles,
    build_load_charts,
    build_metric_table,
    build_settings_diff_table,
    build_speed_charts,
    build_system_tab,
    find_heldout_success,
)
from posttrain.monitor.reader import RunReader
from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.seed_groups import MAX_SEEDS, SEEDS, list_other_seeds
from posttrain.monitor.series import MetricSeries
from posttrain.monitor.service_views import build_online_tab, build_service_tab
from rl_core.analysis.metric_reference import sort_by_importance
from tasks.command_hints import format_posttrain_command

log = logging.getLogger(__name__)

MAX_CHARTS = 36  # on one tab
RELATIVE_ROUNDING = 1e-9  # smaller relative differences are rounding errors
_MAX_HEADLINE_CHARTS = 6
_GROUP_TITLES = dict(  # of metrics' prefixes
    [
        ("train", "Training"),
        ("eval", "Held out"),
        ("reward", "Reward"),
        ("policy", "Policy"),
        ("value", "Value function"),
        ("curriculum", "Curriculum"),
        ("tool", "Tools"),
        ("thoughts", "Thoughts"),
        ("perf", "Speed and memory"),
        ("online", "Online training"),
        ("analysis", "Analysis"),
    ]
)
_DEFAULT_GROUPS = ("train", "reward", "policy")
# Shown first, if logged.
_HEADLINE_METRICS = (
    "train/success_rate",
    "eval/success_rate",
    "eval/exploitability",
    "reward/mean",
    "train/accuracy",
    "train/loss",
    "eval/loss",
    "policy/update_kl",
    "policy/entropy",
    "train/grad_norm",
)
_SUCCESS_METRICS = ("train/success_rate", "eval/success_rate", "eval/accuracy", "train/accuracy")
_SHARE_SUFFIXES = ("success_rate", "accuracy", "misuse_rate")  # drawn on the full axis
_STATUS_TONES = {
    "running": "info",
    "finished": "good",
    "cached": "good",
    "failed": "bad",
    "killed": "bad",
    "stopped": "bad",
    "silent": "bad",
}
_WARNINGS = {
    "killed": "This run was killed.",
    "failed": "This run failed.",
    "silent": "This run is silent.",
}


def build_view(reader: RunReader, choice: PageSelection, tab: str) -> dict[str, Any]:
    """Build {head, tab, blocks, version} for the browser; `version` changes with the blocks."""
    with reader.lock:  # another page's view would add metrics to the tables meanwhile
        run = reader.load_run(choice.run)
        head = _build_empty_header(reader) if run is None else _build_header(run)
        if tab == SERVICE_TAB:
            blocks = build_service_tab(reader.output)
        elif tab == ONLINE_TAB:
            blocks = build_online_tab(reader.output)
        elif run is None:
            blocks = [_build_welcome_note(reader, choice)]
        else:
            blocks = _build_run_blocks(reader, run, choice, tab)
        digest = hashlib.sha256(encode_browser_json([tab, blocks])).hexdigest()[:16]
        return {"head": head, "tab": tab, "blocks": blocks, "version": digest}


def _build_run_blocks(
    reader: RunReader, run: RunView, choice: PageSelection, tab: str
) -> list[dict[str, Any]]:
    stage = run.find_stage(choice.stage)
    pairs: list[tuple[RunView, StageView]] = []
    if stage is not None:
        pairs.append((run, stage))
        for name in _list_compared_runs(reader, run, choice):
            other = reader.load_run(name) if name != run.id else None
            other_stage = other.find_stage(stage.label) if other is not None else None
            if other is not None and other_stage is not None:
                pairs.append((other, other_stage))
    try:
        blocks = TAB_BUILDERS[tab](run, pairs, choice)
    except Exception as error:  # incomplete files, or of another version: the other tabs still work
        log.warning("%s of %s cannot be drawn", tab, run.id, exc_info=True)
        text = f"This cannot be drawn from the run's files: {type(error).__name__}: {error}"
        blocks = [_build_empty_note(text)]
    if run.status in _WARNINGS and run.source == "files":
        lines = [_WARNINGS[run.status], run.status_reason or "No reason is known."]
        blocks.insert(0, build_note("warning", lines, "bad"))
    return blocks


def _list_compared_runs(reader: RunReader, run: RunView, choice: PageSelection) -> list[str]:
    """List the ids of the compared runs, each once; SEEDS stands for the other seeds of the selected run."""
    names: dict[str, None] = {}
    for name in choice.compare:
        others = list_other_seeds(run, reader.list_runs())[:MAX_SEEDS] if name == SEEDS else [name]
        names |= dict.fromkeys(others)
    return list(names)


def _build_header(run: RunView) -> dict[str, Any]:
    now = time.time()
    is_live = run.status in ("running", "silent")
    running = [stage for stage in run.stages if stage.status == "running"]
    activity, reason = run.result or run.status_reason, ""
    fraction = seconds_left = None
    if running and is_live:
        current = running[-1]
        activity = current.label.replace("_", " ")
        if current.total > 1:
            activity += f" · {current.done:,.0f} of {current.total:,.0f}"
        if current.message:
            activity += f" · {current.message}"
        fraction = min(1.0, current.done / current.total) if current.total else None
        seconds_left = current.seconds_left
    if run.result and not is_live:
        reason = run.result
    elif run.status != "killed":
        reason = run.status_reason
    return {
        "status": run.status,
        "tone": _STATUS_TONES.get(run.status, ""),
        "name": f"{run.group} · {run.started_text}",
        "now": activity if is_live else "",
        "why": reason,
        "fraction": fraction,
        "left": seconds_left,
        "elapsed": _compute_elapsed_seconds(run, now, is_live=is_live),
        "age": now - run.modified if run.modified else None,
        "live": is_live,
    }


def _compute_elapsed_seconds(run: RunView, now: float, *, is_live: bool) -> float | None:
    if run.seconds is not None:
        return run.seconds
    if not run.started:
        return None
    return (now if is_live else run.ended or run.modified) - run.started


def _build_empty_header(reader: RunReader) -> dict[str, Any]:
    return {
        "status": "no run",
        "tone": "",
        "name": str(reader.output),
        "now": "",
        "why": "",
        "fraction": None,
        "left": None,
        "elapsed": None,
        "age": None,
        "live": False,
    }


def _build_welcome_note(reader: RunReader, choice: PageSelection) -> dict[str, Any]:
    if choice.run and reader.list_runs():
        lines = [
            f"The run {choice.run} no longer exists.",
            "Its folder was moved or removed. Choose another above.",
        ]
    elif not reader.output.is_dir():
        lines = [
            f"The folder {reader.output} no longer exists.",
            "The page resumes as soon as it is back.",
        ]
    else:
        lines = [
            "No runs here yet.",
            f"This page watches {reader.output}. It shows a run as soon as one starts there:",
            "$ posttrain run demo",
        ]
    return build_note("welcome", lines)


def build_overview_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the overview tab: alarms, headline numbers, stages, headline curves, throughput and load."""
    blocks = build_alarm_notes(run)
    if (tiles := build_headline_tiles(run, pairs[0][1] if pairs else None)) is not None:
        blocks.append(tiles)
    blocks.append(build_stage_table(run))
    if (environments := build_environment_table(run, pairs, choice)) is not None:
        blocks.append(environments)
    if pairs and (charts := _build_headline_charts(pairs, choice)):
        title = f"Stage {pairs[0][1].label.replace('_', ' ')}"
        blocks.append(build_charts_block("headlines", charts, title, _describe_averages(choice)))
    if load_charts := build_load_charts(run)[:3]:
        blocks.append(build_charts_block("load", load_charts, "Machine"))
    if run.folder is not None:
        blocks.append(
            {"kind": "notes", "id": f"notes {run.id}", "run": run.id, **run.notes.to_json()}
        )
    # Last, so that nothing above moves when a run is compared.
    if (differences := build_settings_diff_table(pairs)) is not None:
        blocks.append(differences)
    return blocks


def _describe_averages(choice: PageSelection) -> str:
    if choice.window <= 1:
        return ""
    return (
        f"Thick lines are moving averages over {choice.window} observations, as are the numbers next to the names. "
        "Drag to zoom, double-click to reset. Single metrics selected under Curves are shown here, too."
    )


def _build_headline_charts(pairs: ComparedStages, choice: PageSelection) -> list[dict[str, Any]]:
    series = pairs[0][1].table.series
    speed_charts = build_speed_charts(pairs, choice)[:1]
    names = [name for name in _HEADLINE_METRICS if name in series and _has_variation(series[name])]
    names = names[: _MAX_HEADLINE_CHARTS - len(speed_charts)]
    selected = [name for name in choice.metrics if name in series and name not in names]
    charts = [_build_metric_chart(name, pairs, choice) for name in (*selected, *names)]
    if (environments := build_environment_chart(pairs, choice)) is not None:
        charts.insert(0, environments)
    return charts + speed_charts


def _has_variation(series: MetricSeries) -> bool:
    """Return whether a curve varies beyond rounding; a KL of exactly 0 gets no chart."""
    values = series.read_arrays()[2]
    if len(values) < 2:
        return False
    low, high = float(values.min()), float(values.max())
    return high - low > RELATIVE_ROUNDING * max(1.0, abs(low), abs(high))


def _build_metric_chart(name: str, pairs: ComparedStages, choice: PageSelection) -> dict[str, Any]:
    span = (0.0, 1.0) if name.endswith(_SHARE_SUFFIXES) else None
    return build_overlay_chart(name, pairs, choice.drawing_options, span=span)


def build_stage_table(run: RunView) -> dict[str, Any]:
    """Build a table with one row per stage: status, progress, elapsed and remaining seconds, result."""
    now = time.time()
    rows = []
    for stage in run.stages:
        elapsed = _compute_stage_seconds(stage, now)
        message = stage.message if stage.status == "running" else stage.result
        rows.append(
            [
                stage.label.replace("_", " "),
                {"t": stage.status, "badge": _STATUS_TONES.get(stage.status, "none")},
                _build_progress_cell(stage),
                format_duration(elapsed) if elapsed is not None else "",
                format_duration(stage.seconds_left) if stage.seconds_left is not None else "",
                _format_success(run, stage),
                _format_speed(stage),
                {"t": message, "c": "faint"},
            ]
        )
    columns = ("stage", "status", "progress", "#took", "#left", "#success", "#tokens/s", "~result")
    return build_table("stages", "Stages", columns, rows)


def _build_progress_cell(stage: StageView) -> str | dict[str, Any]:
    if not stage.total:
        return ""
    share = min(1.0, stage.done / stage.total)
    text = format_percent(share)
    if stage.total > 1:
        text = f"{stage.done:,.0f} / {stage.total:,.0f}"
    return {"t": text, "bar": share}


def _compute_stage_seconds(stage: StageView, now: float) -> float | None:
    """Compute the time that a stage has taken; None if it has not begun or is cached."""
    if not stage.started or stage.status == "cached":
        return None
    if stage.seconds is not None:  # without the time between two processes
        return stage.seconds
    end = stage.ended
    if not end and stage.status == "running":
        end = now
    elif not end and stage.journal is not None:  # killed: up to its last record
        end = stage.journal.modified
    return max(0.0, end - stage.started)


def _format_success(run: RunView, stage: StageView) -> str:
    """Format the success on held-out episodes if evaluated, else in training, or a reward model's accuracy.

    An evaluation of one model, such as `evaluate base`, has that model's success.
    """
    model = re.sub("^evaluate[ _]", "", stage.label)
    if (rate := find_heldout_success(run, model)) is not None:
        return format_percent(rate)
    for name in _SUCCESS_METRICS:
        series = stage.table.series.get(name)
        if series is not None:
            text = format_percent(series.compute_mean(10))
            return f"ranks {text}" if name.endswith("/accuracy") else text
    return ""


def _format_speed(stage: StageView) -> str:
    """Format the newest tokens per second of a running stage; of an ended one the mean, as the terminal prints it."""
    rates = stage.table.series.get("perf/tokens_per_second")
    seconds = stage.table.series.get("perf/step_seconds")
    if rates is None:
        return ""
    if stage.status != "running" and seconds is not None:
        values, weights = rates.read_arrays()[2], seconds.read_arrays()[2]
        if len(values) == len(weights) and weights.sum() > 0:
            return format_number(float(np.average(values, weights=weights)), 0)
    return format_number(rates.compute_mean(20), 0)


def group_metrics_by_prefix(run: RunView | None, stage: str) -> dict[str, list[str]]:
    """Group the metrics of a stage by the first part of their name, without system metrics, which have a tab."""
    groups: dict[str, list[str]] = {}
    view = run.find_stage(stage) if run is not None else None
    for name in sorted(view.table.series) if view is not None else ():
        if not name.startswith("system/"):
            groups.setdefault(name.partition("/")[0], []).append(name)
    return groups


def build_curves_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the curves tab: the selected metrics by group, one chart each, with compared runs overlaid."""
    if not pairs:
        return [_build_empty_note("No stage of this run has recorded a metric yet.")]
    stage = pairs[0][1]
    names = _select_metrics(run, stage, choice)
    curves = [name for name in names if _varies_in_any(name, pairs)]
    blocks: list[dict[str, Any]] = []
    note = _describe_averages(choice)
    if len(curves) > MAX_CHARTS:
        left_out = f"{MAX_CHARTS} of {len(curves)} curves are shown: search or select metrics above to see others."
        blocks.append(build_note("left out", [left_out], "small"))
    for prefix, members in _group_by_prefix(curves[:MAX_CHARTS]).items():
        charts = [_build_metric_chart(name, pairs, choice) for name in members]
        title = _GROUP_TITLES.get(prefix, prefix)
        blocks.append(build_charts_block(f"curves {prefix}", charts, title, note))
        note = ""  # once, above the first group
    if choice.search.strip() and not names:
        blocks.append(_build_empty_note(f"No metric's name contains '{choice.search.strip()}'."))
    constants = [name for name in names if name not in curves]
    if constants:
        rows = [
            [build_metric_cell(name), *(_format_last_value(stage, name) for _, stage in pairs)]
            for name in constants
        ]
        heads = ["metric", *(f"#{other.group} {other.started_text}" for other, _ in pairs)]
        blocks.append(build_table("single", "Measured once, or always the same", heads, rows))
    if stage.table.series:
        blocks.append(build_metric_table(stage, choice))
    return blocks or [_build_empty_note("Nothing was measured under these names yet.")]


def _select_metrics(run: RunView, stage: StageView, choice: PageSelection) -> list[str]:
    """Return the metrics of a stage that the search finds, or that are selected singly, else those of the selected or
    default groups. Within a group the most important ones come first.
    """
    if words := choice.search.lower().split():
        by_prefix = group_metrics_by_prefix(run, stage.label)
        return [
            name
            for members in by_prefix.values()
            for name in sort_by_importance(members)
            if all(word in f"{name} {find_label(name)}".lower() for word in words)
        ]
    names = [name for name in choice.metrics if name in stage.table.series]
    if names:
        return names
    known = group_metrics_by_prefix(run, stage.label)
    groups = [name for name in choice.groups if name in known]
    groups = groups or [name for name in _DEFAULT_GROUPS if name in known] or list(known)[:2]
    return [name for group in groups for name in sort_by_importance(known[group])]


def _group_by_prefix(names: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return groups


def _varies_in_any(name: str, pairs: ComparedStages) -> bool:
    tables = [stage.table.series for _, stage in pairs]
    return any(name in series and _has_variation(series[name]) for series in tables)


def _format_last_value(stage: StageView, name: str) -> str:
    series = stage.table.series.get(name)
    return format_metric_value(name, series.last, 4) if series is not None else MISSING_VALUE


def _build_empty_note(text: str) -> dict[str, Any]:
    return build_note("nothing", [text], "small")


def build_export_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Build the export tab: links to all files."""
    files = (
        ("metrics.csv", "every value of every stage: stage, metric, step, time, value"),
        ("run.json", "stages, settings, curriculum, and for each metric its last value and mean"),
        ("stages.csv", "the table of stages"),
    )
    query = urlencode({"run": run.id}, quote_via=quote)
    items = [
        {"href": f"export/{name}?{query}", "label": name, "sub": description}
        for name, description in files
    ]
    command = f"ui {shlex.quote(run.short_id or run.id)} --export FOLDER"
    lines = [
        "The same from a terminal, for this run:",
        f"$ {format_posttrain_command(command, run.output)}",
    ]
    return [{"kind": "links", "id": "links", "items": items}, build_note("how", lines)]


TAB_BUILDERS: dict[
    str, Callable[[RunView, ComparedStages, PageSelection], list[dict[str, Any]]]
] = {
    "overview": build_overview_tab,
    "curves": build_curves_tab,
    "rewards": build_rewards_tab,
    "tools": build_tools_tab,
    "curriculum": build_curriculum_tab,
    "trajectories": build_trajectories_tab,
    "system": build_system_tab,
    "export": build_export_tab,
}
# Tabs of the output folder rather than of a run.
SERVICE_TAB, ONLINE_TAB = "service", "online"
TAB_NAMES = (*list(TAB_BUILDERS)[:-1], ONLINE_TAB, SERVICE_TAB, "export")
