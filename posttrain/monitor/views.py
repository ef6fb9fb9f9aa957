"""Tabs of the page: a run as blocks of tiles, charts, tables and trajectories."""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

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
    build_metric_cell,
    build_overlay_chart,
    build_table,
    encode_browser_json,
    format_duration,
    format_metric_value,
    format_number,
    format_percent,
)
from posttrain.monitor.overview_views import (
    build_alarm_notes,
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
from posttrain.monitor.series import MetricSeries
from posttrain.monitor.service_views import build_online_tab, build_service_tab
from tasks.command_hints import format_posttrain_command

log = logging.getLogger(__name__)

# Shown first, if logged; shares are drawn on the full axis.
_HEADLINE_METRICS = (
    "train/success_rate",
    "eval/success_rate",
    "reward/mean",
    "train/accuracy",
    "train/loss",
    "eval/loss",
    "policy/update_kl",
    "policy/entropy",
    "train/grad_norm",
)
_SHARE_SUFFIXES = ("success_rate", "accuracy", "misuse_rate")
_STATUS_TONES = {
    "running": "info",
    "finished": "good",
    "cached": "good",
    "failed": "bad",
    "killed": "bad",
    "stopped": "bad",
    "silent": "bad",
}
MAX_CHARTS = 24  # on one tab
RELATIVE_ROUNDING = 1e-9  # relative differences below this are rounding


def build_view(reader: RunReader, choice: PageSelection, tab: str) -> dict[str, Any]:
    """{head, tab, blocks, version} for the browser; `version` changes with the blocks."""
    with reader.lock:  # another page's view would add metrics to the tables meanwhile
        return _build_tab_view(reader, choice, tab)


def _build_tab_view(reader: RunReader, choice: PageSelection, tab: str) -> dict[str, Any]:
    run = reader.load_run(choice.run)
    if tab == SERVICE_TAB:
        return _add_version(
            _build_empty_header(reader) if run is None else _build_header(run),
            tab,
            build_service_tab(reader.output),
        )
    if tab == ONLINE_TAB:
        return _add_version(
            _build_empty_header(reader) if run is None else _build_header(run),
            tab,
            build_online_tab(reader.output),
        )
    if run is None:
        return _add_version(_build_empty_header(reader), tab, [_build_welcome_note(reader, choice)])
    stage = run.find_stage(choice.stage)
    pairs: list[tuple[RunView, StageView]] = []
    if stage is not None:
        pairs.append((run, stage))
        for name in choice.compare:
            other = reader.load_run(name) if name != run.id else None
            found = other.find_stage(stage.label) if other is not None else None
            if other is not None and found is not None:
                pairs.append((other, found))
    try:
        blocks = TAB_BUILDERS[tab](run, pairs, choice)
    except (
        Exception
    ) as error:  # files of another version or incomplete: one tab fails, the page continues
        log.warning("%s of %s cannot be drawn", tab, run.id, exc_info=True)
        blocks = [
            _build_empty_note(
                f"This cannot be drawn from what is there: {type(error).__name__}: {error}"
            )
        ]
    if run.status in ("killed", "failed", "silent") and run.source == "files":
        blocks.insert(0, _build_warning_note(run))
    return _add_version(_build_header(run), tab, blocks)


def _add_version(head: dict[str, Any], tab: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    digest = hashlib.sha256(encode_browser_json([tab, blocks])).hexdigest()[:16]
    return {"head": head, "tab": tab, "blocks": blocks, "version": digest}


def _build_header(run: RunView) -> dict[str, Any]:
    now = time.time()
    live = run.status in ("running", "silent")
    running = [stage for stage in run.stages if stage.status == "running"]
    current = running[-1] if running else None
    what = run.result or run.status_reason
    fraction = left = None
    if current is not None and live:
        what = current.label.replace("_", " ")
        if current.total > 1:
            what += f" · {current.done:,.0f} of {current.total:,.0f}"
        if current.message:
            what += f" · {current.message}"
        fraction = min(1.0, current.done / current.total) if current.total else None
        left = current.seconds_left
    return {
        "status": run.status,
        "tone": _STATUS_TONES.get(run.status, ""),
        "name": f"{run.pipeline} · {run.started_text}",
        "now": "" if not live and run.result else what if live else "",
        "why": run.result
        if not live and run.result
        else run.status_reason
        if run.status != "killed"
        else "",
        "fraction": fraction,
        "left": left,
        "elapsed": _compute_elapsed_seconds(run, now, live=live),
        "age": now - run.modified if run.modified else None,
        "live": live,
    }


def _compute_elapsed_seconds(run: RunView, now: float, *, live: bool) -> float | None:
    if run.seconds is not None:
        return run.seconds
    return ((now if live else run.ended or run.modified) - run.started) if run.started else None


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
        return {"kind": "note", "id": "welcome", "lines": lines}
    if not reader.output.is_dir():
        lines = [
            f"The folder {reader.output} no longer exists.",
            "The page resumes as soon as it is back.",
        ]
        return {"kind": "note", "id": "welcome", "lines": lines}
    lines = [
        "No runs here yet.",
        f"This page watches {reader.output}. It shows a run as soon as one starts there:",
        "$ posttrain run demo",
    ]
    return {"kind": "note", "id": "welcome", "lines": lines}


def _build_warning_note(run: RunView) -> dict[str, Any]:
    words = {
        "killed": "This run was killed.",
        "failed": "This run failed.",
        "silent": "This run is silent.",
    }
    return {
        "kind": "note",
        "id": "warning",
        "tone": "bad",
        "lines": [words[run.status], run.status_reason or "No reason is known."],
    }


# ------------------------------------------------------------------------------------------------------- overview


def build_overview_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Stages, headline curves, throughput and load."""
    blocks = [
        *build_alarm_notes(run),
        *filter(None, (build_headline_tiles(run, pairs[0][1] if pairs else None),)),
        build_stage_table(run),
    ]
    if pairs and (charts := _build_headline_charts(pairs, choice)):
        title = f"Stage {pairs[0][1].label.replace('_', ' ')}"
        note = _describe_averages(choice)
        blocks.append(
            {"kind": "charts", "id": "headlines", "title": title, "note": note, "charts": charts}
        )
    load = build_load_charts(run)[:3]
    if load:
        blocks.append(
            {"kind": "charts", "id": "load", "title": "Machine", "note": "", "charts": load}
        )
    if (
        differing := build_settings_diff_table(pairs)
    ) is not None:  # last: nothing above moves when a run is compared
        blocks.append(differing)
    return blocks


def _describe_averages(choice: PageSelection) -> str:
    if choice.window <= 1:
        return ""
    return (
        f"Thick lines are moving averages over {choice.window} observations, and so are the numbers beside the names. "
        "Drag to zoom, double-click to reset. Metrics that are chosen singly under Curves stand here, too."
    )


def _build_headline_charts(pairs: ComparedStages, choice: PageSelection) -> list[dict[str, Any]]:
    names = set(pairs[0][1].table.series)
    wanted = [
        name
        for name in _HEADLINE_METRICS
        if name in names and _has_variation(pairs[0][1].table.series[name])
    ]
    speed = build_speed_charts(pairs, choice)[:1]
    pinned = [
        name for name in choice.metrics if name in names and name not in wanted[: 6 - len(speed)]
    ]
    return [
        _build_metric_chart(name, pairs, choice) for name in (*pinned, *wanted[: 6 - len(speed)])
    ] + speed


def _has_variation(series: MetricSeries) -> bool:
    """True if a curve varies beyond rounding; a KL of exactly 0 gets no chart."""
    values = series.read_arrays()[2]
    if len(values) < 2:
        return False
    low, high = float(values.min()), float(values.max())
    return high - low > RELATIVE_ROUNDING * max(1.0, abs(low), abs(high))


def _build_metric_chart(name: str, pairs: ComparedStages, choice: PageSelection) -> dict[str, Any]:
    span = (0.0, 1.0) if name.endswith(_SHARE_SUFFIXES) else None
    return build_overlay_chart(name, pairs, choice.drawing_options, span=span)


def build_stage_table(run: RunView) -> dict[str, Any]:
    """One row per stage: status, progress, elapsed and remaining seconds, result."""
    now = time.time()
    rows = []
    for stage in run.stages:
        share = min(1.0, stage.done / stage.total) if stage.total else None
        far = (
            f"{stage.done:,.0f} / {stage.total:,.0f}"
            if stage.total > 1
            else format_percent(share)
            if share is not None
            else ""
        )
        elapsed = None
        if stage.started and stage.status != "cached":
            last = (
                now
                if stage.status == "running"
                else stage.journal.modified
                if stage.journal is not None
                else 0.0
            )
            elapsed = max(
                0.0, (stage.ended or last) - stage.started
            )  # of a killed one: up to its last record
            elapsed = (
                elapsed if stage.seconds is None else stage.seconds
            )  # the time between two processes is not its
        message = stage.message if stage.status == "running" else stage.result
        rows.append(
            [
                stage.label.replace("_", " "),
                {"t": stage.status, "badge": _STATUS_TONES.get(stage.status, "none")},
                {"t": far, "bar": share} if share is not None else "",
                format_duration(elapsed) if elapsed is not None else "",
                format_duration(stage.seconds_left) if stage.seconds_left is not None else "",
                _format_success(run, stage),
                _format_speed(stage),
                {"t": message, "c": "faint"},
            ]
        )
    columns = ("stage", "status", "progress", "#took", "#left", "#success", "#tokens/s", "~result")
    return build_table("stages", "Stages", columns, rows)


def _format_success(run: RunView, stage: StageView) -> str:
    """Success on held-out episodes where the run was evaluated, else in training; what a reward model ranks rightly."""
    if (rate := find_heldout_success(run, stage.label)) is not None:
        return format_percent(rate)
    for name in (
        "train/success_rate",
        "eval/success_rate",
        "eval/accuracy",
        "train/accuracy",
    ):
        series = stage.table.series.get(name)
        if series is not None:
            told = format_percent(series.compute_mean(10))
            return f"ranks {told}" if name.endswith("/accuracy") else told
    return ""


def _format_speed(stage: StageView) -> str:
    series = stage.table.series.get("perf/tokens_per_second")
    return format_number(series.compute_mean(20), 0) if series is not None else ""


# --------------------------------------------------------------------------------------------------------- curves


def group_metrics_by_prefix(run: RunView | None, stage: str) -> dict[str, list[str]]:
    """Metrics of a stage by the first part of their name, without system metrics, which have their own tab."""
    found: dict[str, list[str]] = {}
    chosen = run.find_stage(stage) if run is not None else None
    for name in sorted(chosen.table.series) if chosen is not None else ():
        if not name.startswith("system/"):
            found.setdefault(name.partition("/")[0], []).append(name)
    return found


def build_curves_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Selected metrics, one chart each, with compared runs overlaid."""
    if not pairs:
        return [_build_empty_note("No stage of this run has recorded a metric yet.")]
    known = group_metrics_by_prefix(run, pairs[0][1].label)
    groups = [name for name in choice.groups if name in known] or [
        n for n in ("train", "reward", "policy") if n in known
    ]
    names = [name for name in choice.metrics if name in pairs[0][1].table.series]
    names = names or [name for group in groups or list(known)[:2] for name in known[group]]
    curved = [
        name
        for name in names
        if any(name in s.table.series and _has_variation(s.table.series[name]) for _, s in pairs)
    ]
    blocks: list[dict[str, Any]] = []
    if curved:
        note = _describe_averages(choice)
        if len(curved) > MAX_CHARTS:
            note = f"The first {MAX_CHARTS} of {len(curved)} metrics; select metrics above. {note}"
        charts = [_build_metric_chart(name, pairs, choice) for name in curved[:MAX_CHARTS]]
        blocks.append(
            {"kind": "charts", "id": "curves", "title": "", "note": note, "charts": charts}
        )
    once = [name for name in names if name not in curved]
    if once:
        rows = [
            [build_metric_cell(name), *[_format_last_value(stage, name) for _, stage in pairs]]
            for name in once
        ]
        heads = ["metric", *(f"#{other.pipeline} {other.started_text}" for other, _ in pairs)]
        blocks.append(build_table("single", "Measured once, or always the same", heads, rows))
    if pairs[0][1].table.series:
        blocks.append(build_metric_table(pairs[0][1], choice))
    return blocks or [_build_empty_note("Nothing was measured under these names yet.")]


def _format_last_value(stage: StageView, name: str) -> str:
    series = stage.table.series.get(name)
    return format_metric_value(name, series.last, 4) if series is not None else MISSING_VALUE


def _build_empty_note(text: str) -> dict[str, Any]:
    return {"kind": "note", "id": "nothing", "tone": "small", "lines": [text]}


# --------------------------------------------------------------------------------------------------------- export


def build_export_tab(
    run: RunView, pairs: ComparedStages, choice: PageSelection
) -> list[dict[str, Any]]:
    """Links to all files."""

    def link(name: str, label: str, sub: str) -> dict[str, str]:
        return {
            "href": f"export/{name}?{urlencode({'run': run.id}, quote_via=quote)}",
            "label": label,
            "sub": sub,
        }

    items = [
        link(
            "metrics.csv",
            "metrics.csv",
            "every value of every stage: stage, metric, step, time, value",
        ),
        link(
            "run.json",
            "run.json",
            "stages, settings, curriculum, and for each metric its last value and mean",
        ),
        link("stages.csv", "stages.csv", "the table of stages"),
    ]
    lines = [
        "The same from a terminal, for this run:",
        f"$ {format_posttrain_command(f'monitor --run {shlex.quote(run.id)} --export FOLDER', run.output)}",
    ]
    return [
        {"kind": "links", "id": "links", "items": items},
        {"kind": "note", "id": "how", "lines": lines},
    ]


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
SERVICE_TAB = "service"  # of the output folder rather than of a run
ONLINE_TAB = "online"  # as well
TAB_NAMES = (*list(TAB_BUILDERS)[:-1], ONLINE_TAB, SERVICE_TAB, "export")
