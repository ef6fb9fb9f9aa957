"""Online tab: the newest learning service of the output folder, from the files that it leaves.

Service tab: the training service of the output folder, from its store, which is read and never written.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.monitor.charts import (
    MISSING_VALUE,
    DrawingOptions,
    build_chart,
    build_table,
    format_duration,
    format_number,
    format_percent,
)
from posttrain.monitor.tail import read_json_object
from posttrain.online.service_report import OnlineServiceRecord, read_service_record
from rl_core.errors import BackendError
from rl_core.online.learning_folder import read_events, read_service_facts

_MAX_EVENTS = 30
_MAX_CURVE_POINTS = 2000  # of a curve


def find_newest_online_service(output: Path) -> Path | None:
    """Folder of the service that began last, of all pipelines of an output folder; None without one."""
    found = [
        (facts["began"], path)
        for path in output.glob("*/online/*")
        if (facts := read_service_facts(path)).get("began")
    ]
    return max(found)[1] if found else None


def build_online_tab(output: Path) -> list[dict[str, Any]]:
    """Numbers, guardrails, decisions and alarms of the service."""
    folder = find_newest_online_service(output)
    if folder is None:
        lines = [
            "Nothing learns from its traffic in this folder.",
            "It is shown as soon as something does:",
            "$ posttrain serve CONFIG --learn",
        ]
        return [{"kind": "note", "id": "online", "lines": lines}]
    record = read_service_record(folder)
    blocks = [
        _build_online_tiles(record),
        *_build_online_charts(record),
        _build_decisions_table(record),
        _build_events_table(record),
    ]
    lines = ["All of it as one file:", f"$ posttrain online report {folder}"]
    return [*blocks, {"kind": "note", "id": "online-report", "tone": "small", "lines": lines}]


def _build_online_tiles(record: OnlineServiceRecord) -> dict[str, Any]:
    numbers = record.worker_metrics
    paused = str(numbers.get("paused") or "")
    is_used = bool(numbers.get("online/trusts_consensus", 1.0))

    def told(name: str, form: Callable[[float], str] = "{:,.0f}".format) -> str:
        value = numbers.get(f"online/{name}")
        return form(float(value)) if isinstance(value, int | float) else MISSING_VALUE

    items = [
        {
            "label": "learning",
            "value": "paused" if paused else "on",
            "sub": paused[:120] or record.folder.name,
        },
        {"label": "updates", "value": told("updates"), "sub": f"{told('updates_taken')} taken"},
        {
            "label": "live snapshot",
            "value": told("live_version"),
            "sub": f"newest {told('snapshot_version')}",
        },
        {
            "label": "mean KL",
            "value": _format_newest_value(record, "mean_kl"),
            "sub": f"target {_format_newest_value(record, 'target_kl')}",
        },
        {
            "label": "experiences",
            "value": told("buffer_size"),
            "sub": f"{told('buffer_drawable')} with a label",
        },
        {
            "label": "pseudo-labels right",
            "value": told("pseudo_label_precision", format_percent),
            "sub": f"{told('pseudo_labels_checked')} checked by feedback{'' if is_used else '; not learned from'}",
        },
    ]
    return {"kind": "tiles", "id": "online", "items": items}


def _format_newest_value(record: OnlineServiceRecord, name: str) -> str:
    """A number of the last update that has it: one that was left out, as while learning is paused, has none."""
    points = record.extract_series("kl_control", name)
    return format_number(points[-1][1]) if points else MISSING_VALUE


def _build_online_charts(record: OnlineServiceRecord) -> list[dict[str, Any]]:
    drawn = []
    for key, title, path, level in (
        ("kl", "KL to the old policy", ("kl_control", "mean_kl"), ("kl_control", "target_kl")),
        ("coefficient", "KL coefficient", ("kl_control", "coefficient"), ()),
        ("norm", "Gradient norm", ("gradients", "norm"), ()),
        ("rate", "Learning rate", ("learning_rate",), ()),
    ):
        points = record.extract_series(*path)[-_MAX_CURVE_POINTS:]
        if points:
            lines = [_build_online_line(title, points, 0)]
            if level and (target := record.extract_series(*level)[-_MAX_CURVE_POINTS:]):
                lines.append(_build_online_line("target", target, 1))
            drawn.append(build_chart(key, title, lines, DrawingOptions(window=1), x="update"))
    return (
        [{"kind": "charts", "id": "online-charts", "title": "", "note": "", "charts": drawn}]
        if drawn
        else []
    )


def _build_online_line(name: str, points: list[tuple[float, float]], colour: int) -> dict[str, Any]:
    x, y = [point[0] for point in points], [point[1] for point in points]
    return {"name": name, "colour": colour, "dash": colour > 0, "x": x, "y": y, "last": y[-1]}


def _build_decisions_table(record: OnlineServiceRecord) -> dict[str, Any]:
    rows = [
        [_format_age(one["time"]), f"{one['version']}", one["verdict"], one["reason"]]
        for one in reversed(record.gate.get("decisions", [])[-_MAX_EVENTS:])
    ]
    note = "" if rows else "No snapshot has been decided about."
    return build_table("gate", "Gate", ["when", "#snapshot", "decision", "~why"], rows, note)


def _build_events_table(record: OnlineServiceRecord) -> dict[str, Any]:
    rows = [
        [_format_age(one["time"]), one["kind"], one["text"]]
        for one in reversed(read_events(record.folder)[-_MAX_EVENTS:])
    ]
    return build_table(
        "online-events",
        "Newest events",
        ["when", "event", "~text"],
        rows,
        "" if rows else "Nothing yet.",
    )


def _format_age(seconds: float) -> str:
    return f"{format_duration(max(0.0, time.time() - seconds))} ago"


CHART_SECONDS = 3600.0  # of the charts
RATE_SECONDS = 60.0
HEALTH_TIMEOUT_SECONDS = 0.5
LATE_REQUEST_SECONDS = 30.0  # for which a request waits while nothing is computed
_RUN_STATE_TONES = {"live": "good", "creating": "info", "failed": "bad", "unloaded": "none"}


def find_service_folder(output: Path) -> Path | None:
    """Folder of a service in an output folder, or this folder itself; None without one."""
    return next(
        (one for one in (output / "service", output) if (one / "settings.json").is_file()), None
    )


def build_service_tab(output: Path) -> list[dict[str, Any]]:
    """Queue, waits, throughput, runs and errors of the service."""
    folder = find_service_folder(output)
    if folder is None:
        lines = [
            "No training service in this folder.",
            "It is shown as soon as one runs here:",
            f"$ posttrain service up service --set folder={output / 'service'}",
        ]
        return [{"kind": "note", "id": "service", "lines": lines}]
    settings = read_json_object(folder / "settings.json")
    from posttrain.training_service.store.overview import (
        read_store_overview,  # SQLAlchemy, for those who open this tab
    )

    now = time.time()
    try:
        found = read_store_overview(
            str(settings.get("store") or f"sqlite:///{folder / 'service.db'}"),
            (now - CHART_SECONDS) // 60 * 60,
        )
    except BackendError as error:
        return [{"kind": "note", "id": "service", "tone": "small", "lines": [str(error)]}]
    blocks = [_build_service_tiles(found, settings, now), _build_queue_table(found)]
    if found.minutes:
        blocks.append(_build_rate_charts(found, now))
    return [*blocks, _build_runs_table(found, now), _build_errors_table(found, now)]


def _is_server_healthy(settings: dict[str, Any]) -> bool:
    """True where the server's health check answers."""
    server = settings.get("server") or {}
    host = str(server.get("host") or "127.0.0.1")
    address = (
        f"http://{f'[{host}]' if ':' in host else host}:{server.get('port', 8123)}/api/v1/healthz"
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=HEALTH_TIMEOUT_SECONDS) as answer:
            return bool(json.load(answer).get("status") == "ok")
    except (OSError, ValueError, AttributeError):
        return False


def _build_service_tiles(found: Any, settings: dict[str, Any], now: float) -> dict[str, Any]:
    waiting = sum(stats.waiting for stats in found.kinds.values())
    running = sum(stats.running for stats in found.kinds.values())
    port = (settings.get("server") or {}).get("port", 8123)
    is_late = (
        not running
        and found.oldest_waiting is not None
        and now - found.oldest_waiting > LATE_REQUEST_SECONDS
    )
    last = [one for one in found.minutes if one.minute >= int((now - RATE_SECONDS) // 60)]
    rate = sum(one.done + one.failed for one in last) / max(1.0, RATE_SECONDS + now % 60)
    failed = sum(one.failed for one in found.minutes)
    live = sum(run.state == "live" for run in found.runs)
    items = [
        {
            "label": "server",
            "value": "up" if _is_server_healthy(settings) else "no answer",
            "sub": f"port {port}",
        },
        {
            "label": "open requests",
            "value": f"{waiting + running}",
            "sub": f"{waiting} wait, {running} run",
        },
        {
            "label": "oldest waits",
            "value": format_duration(now - found.oldest_waiting)
            if found.oldest_waiting
            else MISSING_VALUE,
            "sub": "nothing is computed: is the worker up?" if is_late else "since its acceptance",
        },
        {"label": "requests/s", "value": format_number(rate, 2), "sub": "finished, last minute"},
        {"label": "errors", "value": f"{failed}", "sub": "in the last hour"},
        {"label": "training runs", "value": f"{found.num_runs}", "sub": f"{live} live"},
    ]
    return {"kind": "tiles", "id": "service", "items": items}


def _format_short_duration(seconds: float | None) -> str:
    """A duration, in milliseconds below a second."""
    return (
        f"{1000 * seconds:.0f} ms"
        if seconds is not None and 0 <= seconds < 1
        else format_duration(seconds)
    )


def _build_queue_table(found: Any) -> dict[str, Any]:
    heads = [
        "kind",
        "#waiting",
        "#running",
        "#wait p50",
        "#p90",
        "#p99",
        "#service p50",
        "#p90",
        "#p99",
    ]
    rows = [
        [
            kind.replace("_", " "),
            f"{stats.waiting}",
            f"{stats.running}",
            *(
                _format_short_duration(values.get(q))
                for values in (stats.waited_seconds, stats.served_seconds)
                for q in ("0.5", "0.9", "0.99")
            ),
        ]
        for kind, stats in found.kinds.items()
    ]
    note = "Quantiles of the newest 1,000 finished requests: from acceptance to the start of the work, and the work."
    return build_table("kinds", "Queue", heads, rows, note if rows else "No requests yet.")


def _build_rate_charts(found: Any, now: float) -> dict[str, Any]:
    """Requests per second of the last hour, minute by minute; the present minute is left out."""
    counts = {one.minute: one for one in found.minutes}
    last = int(now // 60)
    minutes = range(max(min(counts), last - int(CHART_SECONDS // 60)), last)
    x = [float(minute - last) for minute in minutes]
    lines = []
    for colour, name in enumerate(("done", "failed")):
        y = [getattr(counts[minute], name) / 60 if minute in counts else 0.0 for minute in minutes]
        line = {
            "name": name,
            "colour": colour,
            "dash": False,
            "x": x,
            "y": y,
            "last": y[-1] if y else None,
        }
        lines.append(line)
    drawn = build_chart(
        "rate",
        "Requests finished",
        lines,
        DrawingOptions(window=1),
        unit="1/s",
        x="minutes before now",
    )
    return {"kind": "charts", "id": "rates", "title": "", "note": "", "charts": [drawn]}


def _build_runs_table(found: Any, now: float) -> dict[str, Any]:
    heads = ["~run", "key", "base model", "state", "#updates", "#open", "last request"]
    rows = [
        [
            run.model_id,
            run.key,
            run.base,
            {"t": run.state, "badge": _RUN_STATE_TONES[run.state]},
            f"{run.steps}",
            f"{run.open_requests}",
            f"{format_duration(now - run.touched)} ago",
        ]
        for run in found.runs
    ]
    left = found.num_runs - len(found.runs)
    return build_table(
        "runs",
        "Training runs",
        heads,
        rows,
        f"{left} older ones are not shown." if left > 0 else "",
    )


def _build_errors_table(found: Any, now: float) -> dict[str, Any]:
    rows = [
        [
            f"{format_duration(now - one.finished)} ago",
            one.kind.replace("_", " "),
            one.category,
            one.target,
            one.error[:500],
        ]
        for one in found.errors
    ]
    if not rows:
        return {
            "kind": "note",
            "id": "errors",
            "tone": "small",
            "lines": ["No request has failed."],
        }
    return build_table(
        "errors", "Newest errors", ["when", "kind", "fault of", "~run or sampler", "~error"], rows
    )
