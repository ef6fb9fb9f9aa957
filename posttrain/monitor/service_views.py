"""Online and service tabs: the newest learning service and the training service of an output folder.

Both are read from the services' files and store, and nothing is written.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.monitor.charts import (
    MISSING_VALUE,
    DrawingOptions,
    build_chart,
    build_charts_block,
    build_note,
    build_table,
    format_duration,
    format_number,
    format_percent,
)
from posttrain.monitor.tail import read_json_object
from posttrain.online.service_report import OnlineServiceRecord, read_service_record
from rl_core.errors import BackendError
from rl_core.json_client import RequestError, fetch_json
from rl_core.online.learning_folder import read_events, read_service_facts

if TYPE_CHECKING:
    from posttrain.training_service.store.overview import StoreOverview

CHART_SECONDS = 3600.0  # time span of the charts
RATE_SECONDS = 60.0
HEALTH_TIMEOUT_SECONDS = 0.5
LATE_REQUEST_SECONDS = 30.0  # a request that waits longer while nothing is computed is late
_MAX_EVENTS = 30
_MAX_CURVE_POINTS = 2000
_RUN_STATE_TONES = {"live": "good", "creating": "info", "failed": "bad", "unloaded": "none"}
_ONLINE_CURVES = (  # id, title, path of the values, path of the target
    ("kl", "KL to the old policy", ("kl_control", "mean_kl"), ("kl_control", "target_kl")),
    ("coefficient", "KL coefficient", ("kl_control", "coefficient"), ()),
    ("norm", "Gradient norm", ("gradients", "norm"), ()),
    ("rate", "Learning rate", ("learning_rate",), ()),
)


def find_newest_online_service(output: Path) -> Path | None:
    """Find the folder of the newest learning service of all pipelines of an output folder; None without one."""
    services = []
    for path in output.glob("*/online/*"):
        began = read_service_facts(path).get("began")
        if began:
            services.append((began, path))
    return max(services)[1] if services else None


def build_online_tab(output: Path) -> list[dict[str, Any]]:
    """Build the online tab: metrics, guardrails, decisions and alarms of the learning service."""
    folder = find_newest_online_service(output)
    if folder is None:
        lines = [
            "Nothing learns from its traffic in this folder.",
            "It is shown as soon as something does:",
            "$ posttrain serve CONFIG --learn",
        ]
        return [build_note("online", lines)]
    record = read_service_record(folder)
    blocks = [_build_online_tiles(record)]
    if charts := _build_online_charts(record):
        blocks.append(build_charts_block("online-charts", charts))
    blocks += [_build_decisions_table(record), _build_events_table(record)]
    lines = ["All of it as one file:", f"$ posttrain online report {shlex.quote(str(folder))}"]
    return [*blocks, build_note("online-report", lines, "small")]


def _build_online_tiles(record: OnlineServiceRecord) -> dict[str, Any]:
    metrics = record.worker_metrics
    paused = str(metrics.get("paused") or "")
    is_trusted = bool(metrics.get("online/trusts_consensus", 1.0))

    def format_metric(name: str, form: Callable[[float], str] = "{:,.0f}".format) -> str:
        value = metrics.get(f"online/{name}")
        return form(float(value)) if isinstance(value, int | float) else MISSING_VALUE

    precision = format_metric("pseudo_label_precision", format_percent)
    checked = f"{format_metric('pseudo_labels_checked')} checked by feedback"
    target = record.find_kl_target()
    tiles = (
        ("learning", "paused" if paused else "on", paused[:120] or record.folder.name),
        ("updates", format_metric("updates"), f"{format_metric('updates_taken')} taken"),
        (
            "live snapshot",
            format_metric("live_version"),
            f"newest {format_metric('snapshot_version')}",
        ),
        (
            "mean KL",
            _format_newest_value(record, "mean_kl"),
            "coefficient is fixed" if target is None else f"target {format_number(target)}",
        ),
        (
            "experiences",
            format_metric("buffer_size"),
            f"{format_metric('buffer_drawable')} with a label",
        ),
        (
            "pseudo-labels right",
            precision,
            checked if is_trusted else f"{checked}; not learned from",
        ),
    )
    items = [{"label": label, "value": value, "sub": sub} for label, value, sub in tiles]
    return {"kind": "tiles", "id": "online", "items": items}


def _format_newest_value(record: OnlineServiceRecord, name: str) -> str:
    """Format the value of the last update that has it; a skipped update, as while learning is paused, has none."""
    points = record.extract_series("kl_control", name)
    return format_number(points[-1][1]) if points else MISSING_VALUE


def _build_online_charts(record: OnlineServiceRecord) -> list[dict[str, Any]]:
    charts = []
    for key, title, path, target_path in _ONLINE_CURVES:
        points = record.extract_series(*path)[-_MAX_CURVE_POINTS:]
        if not points:
            continue
        lines = [_build_online_line(title, points, 0)]
        targets = record.extract_series(*target_path)[-_MAX_CURVE_POINTS:] if target_path else []
        if targets:
            lines.append(_build_online_line("target", targets, 1))
        charts.append(build_chart(key, title, lines, DrawingOptions(window=1), x="update"))
    return charts


def _build_online_line(name: str, points: list[tuple[float, float]], colour: int) -> dict[str, Any]:
    x, y = [point[0] for point in points], [point[1] for point in points]
    return {"name": name, "colour": colour, "dash": colour > 0, "x": x, "y": y, "last": y[-1]}


def _build_decisions_table(record: OnlineServiceRecord) -> dict[str, Any]:
    decisions = record.gate.get("decisions", [])[-_MAX_EVENTS:]
    rows = [
        [
            _format_age(decision["time"]),
            f"{decision['version']}",
            decision["verdict"],
            decision["reason"],
        ]
        for decision in reversed(decisions)
    ]
    note = "" if rows else "No snapshot has been decided about."
    return build_table("gate", "Gate", ["when", "#snapshot", "decision", "~why"], rows, note)


def _build_events_table(record: OnlineServiceRecord) -> dict[str, Any]:
    rows = [
        [_format_age(event["time"]), event["kind"], event["text"]]
        for event in reversed(read_events(record.folder)[-_MAX_EVENTS:])
    ]
    note = "" if rows else "Nothing yet."
    heads = ["when", "event", "~text"]
    return build_table("online-events", "Newest events", heads, rows, note)


def _format_age(time_s: float) -> str:
    return f"{format_duration(max(0.0, time.time() - time_s))} ago"


def find_service_folder(output: Path) -> Path | None:
    """Find the folder of a training service in an output folder, or this folder itself; None without one."""
    for folder in (output / "service", output):
        if (folder / "settings.json").is_file():
            return folder
    return None


def build_service_tab(output: Path) -> list[dict[str, Any]]:
    """Build the service tab: queue, waiting times, throughput, runs and errors of the training service."""
    folder = find_service_folder(output)
    if folder is None:
        lines = [
            "No training service in this folder.",
            "It is shown as soon as one runs here:",
            f"$ posttrain service up service --set {shlex.quote(f'folder={output}/service')}",
        ]
        return [build_note("service", lines)]
    # Imports SQLAlchemy, which only this tab needs.
    from posttrain.training_service.store.overview import read_store_overview

    settings = read_json_object(folder / "settings.json")
    address = str(settings.get("store") or f"sqlite:///{folder / 'service.db'}")
    now = time.time()
    try:
        overview = read_store_overview(address, (now - CHART_SECONDS) // 60 * 60)
    except BackendError as error:
        return [build_note("service", [str(error)], "small")]
    blocks = [_build_service_tiles(overview, settings, now), _build_queue_table(overview)]
    if overview.minutes:
        blocks.append(_build_rate_charts(overview, now))
    return [*blocks, _build_runs_table(overview, now), _build_errors_table(overview, now)]


def _is_server_healthy(settings: dict[str, Any]) -> bool:
    """Return whether the server answers its health check."""
    server = settings.get("server") or {}
    host = str(server.get("host") or "127.0.0.1")
    if ":" in host:
        host = f"[{host}]"
    address = f"http://{host}:{server.get('port', 8123)}/api/v1/healthz"
    try:
        health = fetch_json(address, timeout_s=HEALTH_TIMEOUT_SECONDS)
    except RequestError:
        return False
    return isinstance(health, dict) and health.get("status") == "ok"


def _build_service_tiles(
    overview: StoreOverview, settings: dict[str, Any], now: float
) -> dict[str, Any]:
    waiting = sum(stats.waiting for stats in overview.kinds.values())
    running = sum(stats.running for stats in overview.kinds.values())
    port = (settings.get("server") or {}).get("port", 8123)
    oldest_wait, oldest_note = MISSING_VALUE, "since its acceptance"
    if overview.oldest_waiting:
        oldest_wait = format_duration(now - overview.oldest_waiting)
    waited = now - overview.oldest_waiting if overview.oldest_waiting is not None else 0.0
    if not running and waited > LATE_REQUEST_SECONDS:
        oldest_note = "nothing is computed: is the worker up?"
    first_minute = int((now - RATE_SECONDS) // 60)
    recent = [minute for minute in overview.minutes if minute.minute >= first_minute]
    num_finished = sum(minute.done + minute.failed for minute in recent)
    rate = num_finished / max(1.0, RATE_SECONDS + now % 60)
    failed = sum(minute.failed for minute in overview.minutes)
    live = sum(run.state == "live" for run in overview.runs)
    tiles = (
        ("server", "up" if _is_server_healthy(settings) else "no answer", f"port {port}"),
        ("open requests", f"{waiting + running}", f"{waiting} wait, {running} run"),
        ("oldest waits", oldest_wait, oldest_note),
        ("requests/s", format_number(rate, 2), "finished, last minute"),
        ("errors", f"{failed}", "in the last hour"),
        ("training runs", f"{overview.num_runs}", f"{live} live"),
    )
    items = [{"label": label, "value": value, "sub": sub} for label, value, sub in tiles]
    return {"kind": "tiles", "id": "service", "items": items}


def _format_short_duration(seconds: float | None) -> str:
    """Format a duration, in milliseconds below a second."""
    if seconds is not None and 0 <= seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return format_duration(seconds)


def _build_queue_table(overview: StoreOverview) -> dict[str, Any]:
    heads = ["kind", "#waiting", "#running", "#wait p50", "#p90", "#p99"]
    heads += ["#service p50", "#p90", "#p99"]
    rows = []
    for kind, stats in overview.kinds.items():
        row = [kind.replace("_", " "), f"{stats.waiting}", f"{stats.running}"]
        for quantiles in (stats.waited_seconds, stats.served_seconds):
            row += [_format_short_duration(quantiles.get(q)) for q in ("0.5", "0.9", "0.99")]
        rows.append(row)
    note = "Quantiles of the newest 1,000 finished requests: from acceptance to the start of the work, and the work."
    return build_table("kinds", "Queue", heads, rows, note if rows else "No requests yet.")


def _build_rate_charts(overview: StoreOverview, now: float) -> dict[str, Any]:
    """Build charts of requests per second in the last hour, per minute, without the current minute."""
    counts = {minute.minute: minute for minute in overview.minutes}
    current = int(now // 60)
    minutes = range(max(min(counts), current - int(CHART_SECONDS // 60)), current)
    x = [float(minute - current) for minute in minutes]
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
    options = DrawingOptions(window=1)
    chart = build_chart(
        "rate", "Requests finished", lines, options, unit="1/s", x="minutes before now"
    )
    return build_charts_block("rates", [chart])


def _build_runs_table(overview: StoreOverview, now: float) -> dict[str, Any]:
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
        for run in overview.runs
    ]
    num_hidden = overview.num_runs - len(overview.runs)
    note = f"{num_hidden} older ones are not shown." if num_hidden > 0 else ""
    return build_table("runs", "Training runs", heads, rows, note)


def _build_errors_table(overview: StoreOverview, now: float) -> dict[str, Any]:
    if not overview.errors:
        return build_note("errors", ["No request has failed."], "small")
    rows = [
        [
            f"{format_duration(now - failure.finished)} ago",
            failure.kind.replace("_", " "),
            failure.category,
            failure.target,
            failure.error[:500],
        ]
        for failure in overview.errors
    ]
    heads = ["when", "kind", "fault of", "~run or sampler", "~error"]
    return build_table("errors", "Newest errors", heads, rows)
