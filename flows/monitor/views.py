"""Tabs of the page: a run as blocks of tiles, charts, tables and trajectories."""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

from flows.monitor.agent_views import curriculum, rewards, tools, trajectories
from flows.monitor.charts import NONE, duration, measured, metric_cell, number, overlay, percent, table
from flows.monitor.choice import Choice, Runs
from flows.monitor.headline import alarms, held_out, settings_that_differ, tiles
from flows.monitor.machine_views import load_charts, speed_charts, system
from flows.monitor.online_views import online
from flows.monitor.plain_json import plain_json
from flows.monitor.present_views import metric_table
from flows.monitor.reader import Reader
from flows.monitor.runs import RunView, StageView
from flows.monitor.series import Series
from flows.monitor.service_views import service
from tasks.own_commands import own_command

__all__ = ["TABS", "TAB_NAMES", "prefixes", "view"]

log = logging.getLogger(__name__)

# Shown first, if logged; shares are drawn on the full axis.
_HEADLINES = (
    "train/success_rate", "eval/success_rate", "reward/mean", "train/accuracy", "train/loss", "eval/loss",
    "policy/update_kl",
    "policy/entropy", "train/grad_norm",
)  # fmt: skip
_SHARES = ("success_rate", "accuracy", "misuse_rate")
_TONES = {
    "running": "info", "finished": "good", "cached": "good", "failed": "bad", "killed": "bad", "stopped": "bad",
    "silent": "bad",
}  # fmt: skip
MAX_CHARTS = 24  # on one tab
ROUNDING = 1e-9  # relative differences below this are rounding


def view(reader: Reader, choice: Choice, tab: str) -> dict[str, Any]:
    """{head, tab, blocks, version} for the browser; `version` changes with the blocks."""
    with reader.lock:  # another page's view would add metrics to the tables meanwhile
        return _view(reader, choice, tab)


def _view(reader: Reader, choice: Choice, tab: str) -> dict[str, Any]:
    run = reader.run(choice.run)
    if tab == SERVICE:
        return _finish(_no_head(reader) if run is None else _head(run), tab, service(reader.output))
    if tab == ONLINE:
        return _finish(_no_head(reader) if run is None else _head(run), tab, online(reader.output))
    if run is None:
        return _finish(_no_head(reader), tab, [_welcome(reader, choice)])
    stage = run.stage(choice.stage)
    pairs: list[tuple[RunView, StageView]] = []
    if stage is not None:
        pairs.append((run, stage))
        for name in choice.compare:
            other = reader.run(name) if name != run.id else None
            found = other.stage(stage.label) if other is not None else None
            if other is not None and found is not None:
                pairs.append((other, found))
    try:
        blocks = TABS[tab](run, pairs, choice)
    except Exception as error:  # files of another version or incomplete: one tab fails, the page continues
        log.warning("%s of %s cannot be drawn", tab, run.id, exc_info=True)
        blocks = [_nothing(f"This cannot be drawn from what is there: {type(error).__name__}: {error}")]
    if run.status in ("killed", "failed", "silent") and run.source == "files":
        blocks.insert(0, _warning(run))
    return _finish(_head(run), tab, blocks)


def _finish(head: dict[str, Any], tab: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    digest = hashlib.sha256(plain_json([tab, blocks])).hexdigest()[:16]
    return {"head": head, "tab": tab, "blocks": blocks, "version": digest}


def _head(run: RunView) -> dict[str, Any]:
    now = time.time()
    live = run.status in ("running", "silent")
    running = [stage for stage in run.stages if stage.status == "running"]
    current = running[-1] if running else None
    what = run.result or run.why
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
        "tone": _TONES.get(run.status, ""),
        "name": f"{run.pipeline} · {run.started_text}",
        "now": "" if not live and run.result else what if live else "",
        "why": run.result if not live and run.result else run.why if run.status != "killed" else "",
        "fraction": fraction,
        "left": left,
        "elapsed": _elapsed(run, now, live=live),
        "age": now - run.modified if run.modified else None,
        "live": live,
    }


def _elapsed(run: RunView, now: float, *, live: bool) -> float | None:
    if run.seconds is not None:
        return run.seconds
    return ((now if live else run.ended or run.modified) - run.started) if run.started else None


def _no_head(reader: Reader) -> dict[str, Any]:
    return {
        "status": "no run", "tone": "", "name": str(reader.output), "now": "", "why": "", "fraction": None,
        "left": None, "elapsed": None, "age": None, "live": False,
    }  # fmt: skip


def _welcome(reader: Reader, choice: Choice) -> dict[str, Any]:
    if choice.run and reader.runs():
        lines = [
            f"The run {choice.run} no longer exists.",
            "Its folder was moved or removed. Choose another above.",
        ]
        return {"kind": "note", "id": "welcome", "lines": lines}
    if not reader.output.is_dir():
        lines = [f"The folder {reader.output} no longer exists.", "The page resumes as soon as it is back."]
        return {"kind": "note", "id": "welcome", "lines": lines}
    lines = [
        "No runs here yet.",
        f"This page watches {reader.output}. It shows a run as soon as one starts there:",
        "$ posttrain run demo",
    ]
    return {"kind": "note", "id": "welcome", "lines": lines}


def _warning(run: RunView) -> dict[str, Any]:
    words = {"killed": "This run was killed.", "failed": "This run failed.", "silent": "This run is silent."}
    return {
        "kind": "note",
        "id": "warning",
        "tone": "bad",
        "lines": [words[run.status], run.why or "No reason is known."],
    }


# ------------------------------------------------------------------------------------------------------- overview


def overview(run: RunView, pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    """Stages, headline curves, throughput and load."""
    blocks = [*alarms(run), *filter(None, (tiles(run, pairs[0][1] if pairs else None),)), stage_table(run)]
    if pairs and (charts := _headline_charts(pairs, choice)):
        title = f"Stage {pairs[0][1].label.replace('_', ' ')}"
        note = _average_note(choice)
        blocks.append({"kind": "charts", "id": "headlines", "title": title, "note": note, "charts": charts})
    load = load_charts(run)[:3]
    if load:
        blocks.append({"kind": "charts", "id": "load", "title": "Machine", "note": "", "charts": load})
    if (differing := settings_that_differ(pairs)) is not None:  # last: nothing above moves when a run is compared
        blocks.append(differing)
    return blocks


def _average_note(choice: Choice) -> str:
    if choice.window <= 1:
        return ""
    return (
        f"Thick lines are moving averages over {choice.window} observations, and so are the numbers beside the names. "
        "Drag to zoom, double-click to reset. Metrics that are chosen singly under Curves stand here, too."
    )


def _headline_charts(pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    names = set(pairs[0][1].table.series)
    wanted = [name for name in _HEADLINES if name in names and _varies(pairs[0][1].table.series[name])]
    speed = speed_charts(pairs, choice)[:1]
    pinned = [name for name in choice.metrics if name in names and name not in wanted[: 6 - len(speed)]]
    return [_metric(name, pairs, choice) for name in (*pinned, *wanted[: 6 - len(speed)])] + speed


def _varies(series: Series) -> bool:
    """True if a curve varies beyond rounding; a KL of exactly 0 gets no chart."""
    values = series.arrays()[2]
    if len(values) < 2:
        return False
    low, high = float(values.min()), float(values.max())
    return high - low > ROUNDING * max(1.0, abs(low), abs(high))


def _metric(name: str, pairs: Runs, choice: Choice) -> dict[str, Any]:
    span = (0.0, 1.0) if name.endswith(_SHARES) else None
    return overlay(name, pairs, choice.drawn, span=span)


def stage_table(run: RunView) -> dict[str, Any]:
    """One row per stage: status, progress, elapsed and remaining seconds, result."""
    now = time.time()
    rows = []
    for stage in run.stages:
        share = min(1.0, stage.done / stage.total) if stage.total else None
        far = (
            f"{stage.done:,.0f} / {stage.total:,.0f}"
            if stage.total > 1
            else percent(share)
            if share is not None
            else ""
        )
        elapsed = None
        if stage.started and stage.status != "cached":
            last = now if stage.status == "running" else stage.journal.modified if stage.journal is not None else 0.0
            elapsed = max(0.0, (stage.ended or last) - stage.started)  # of a killed one: up to its last record
            elapsed = elapsed if stage.seconds is None else stage.seconds  # the time between two processes is not its
        message = stage.message if stage.status == "running" else stage.note
        rows.append(
            [
                stage.label.replace("_", " "),
                {"t": stage.status, "badge": _TONES.get(stage.status, "none")},
                {"t": far, "bar": share} if share is not None else "",
                duration(elapsed) if elapsed is not None else "",
                duration(stage.seconds_left) if stage.seconds_left is not None else "",
                _success(run, stage),
                _speed(stage),
                {"t": message, "c": "faint"},
            ]
        )
    columns = ("stage", "status", "progress", "#took", "#left", "#success", "#tokens/s", "~result")
    return table("stages", "Stages", columns, rows)


def _success(run: RunView, stage: StageView) -> str:
    """Success on held-out episodes where the run was evaluated, else in training; what a reward model ranks rightly."""
    if (rate := held_out(run, stage.label)) is not None:
        return percent(rate)
    for name in (
        "train/success_rate",
        "eval/success_rate",
        "eval/accuracy",
        "train/accuracy",
    ):
        series = stage.table.series.get(name)
        if series is not None:
            told = percent(series.mean(10))
            return f"ranks {told}" if name.endswith("/accuracy") else told
    return ""


def _speed(stage: StageView) -> str:
    series = stage.table.series.get("perf/tokens_per_second")
    return number(series.mean(20), 0) if series is not None else ""


# --------------------------------------------------------------------------------------------------------- curves


def prefixes(run: RunView | None, stage: str) -> dict[str, list[str]]:
    """Metrics of a stage by the first part of their name, without system metrics, which have their own tab."""
    found: dict[str, list[str]] = {}
    chosen = run.stage(stage) if run is not None else None
    for name in sorted(chosen.table.series) if chosen is not None else ():
        if not name.startswith("system/"):
            found.setdefault(name.partition("/")[0], []).append(name)
    return found


def curves(run: RunView, pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    """Selected metrics, one chart each, with compared runs overlaid."""
    if not pairs:
        return [_nothing("No stage of this run has recorded a metric yet.")]
    known = prefixes(run, pairs[0][1].label)
    groups = [name for name in choice.groups if name in known] or [
        n for n in ("train", "reward", "policy") if n in known
    ]
    names = [name for name in choice.metrics if name in pairs[0][1].table.series]
    names = names or [name for group in groups or list(known)[:2] for name in known[group]]
    curved = [name for name in names if any(name in s.table.series and _varies(s.table.series[name]) for _, s in pairs)]
    blocks: list[dict[str, Any]] = []
    if curved:
        note = _average_note(choice)
        if len(curved) > MAX_CHARTS:
            note = f"The first {MAX_CHARTS} of {len(curved)} metrics; select metrics above. {note}"
        charts = [_metric(name, pairs, choice) for name in curved[:MAX_CHARTS]]
        blocks.append({"kind": "charts", "id": "curves", "title": "", "note": note, "charts": charts})
    once = [name for name in names if name not in curved]
    if once:
        rows = [[metric_cell(name), *[_last(stage, name) for _, stage in pairs]] for name in once]
        heads = ["metric", *(f"#{other.pipeline} {other.started_text}" for other, _ in pairs)]
        blocks.append(table("single", "Measured once, or always the same", heads, rows))
    if pairs[0][1].table.series:
        blocks.append(metric_table(pairs[0][1], choice))
    return blocks or [_nothing("Nothing was measured under these names yet.")]


def _last(stage: StageView, name: str) -> str:
    series = stage.table.series.get(name)
    return measured(name, series.last, 4) if series is not None else NONE


def _nothing(text: str) -> dict[str, Any]:
    return {"kind": "note", "id": "nothing", "tone": "small", "lines": [text]}


# --------------------------------------------------------------------------------------------------------- export


def export(run: RunView, pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    """Links to all files."""

    def link(name: str, label: str, sub: str) -> dict[str, str]:
        return {"href": f"export/{name}?{urlencode({'run': run.id}, quote_via=quote)}", "label": label, "sub": sub}

    items = [
        link("metrics.csv", "metrics.csv", "every value of every stage: stage, metric, step, time, value"),
        link("run.json", "run.json", "stages, settings, curriculum, and for each metric its last value and mean"),
        link("stages.csv", "stages.csv", "the table of stages"),
    ]
    lines = [
        "The same from a terminal, for this run:",
        f"$ {own_command(f'monitor --run {shlex.quote(run.id)} --export FOLDER', run.output)}",
    ]
    return [{"kind": "links", "id": "links", "items": items}, {"kind": "note", "id": "how", "lines": lines}]


TABS: dict[str, Callable[[RunView, Runs, Choice], list[dict[str, Any]]]] = {
    "overview": overview,
    "curves": curves,
    "rewards": rewards,
    "tools": tools,
    "curriculum": curriculum,
    "trajectories": trajectories,
    "system": system,
    "export": export,
}
SERVICE = "service"  # of the output folder rather than of a run
ONLINE = "online"  # as well
TAB_NAMES = (*list(TABS)[:-1], ONLINE, SERVICE, "export")
