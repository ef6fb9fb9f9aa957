"""Service tab: the training service of the output folder, from its store, which is read and never written."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from flows.monitor.charts import NONE, Drawn, chart, duration, number, table
from flows.monitor.tail import read_json
from rl_core.errors import BackendError

__all__ = ["service", "service_folder"]

SHOWN_SECONDS = 3600.0  # of the charts
RATE_SECONDS = 60.0
HEALTH_SECONDS = 0.5
LATE_SECONDS = 30.0  # for which a request waits while nothing is computed
_TONES = {"live": "good", "creating": "info", "failed": "bad", "unloaded": "none"}


def service_folder(output: Path) -> Path | None:
    """Folder of a service in an output folder, or this folder itself; None without one."""
    return next((one for one in (output / "service", output) if (one / "settings.json").is_file()), None)


def service(output: Path) -> list[dict[str, Any]]:
    """Queue, waits, throughput, runs and errors of the service."""
    folder = service_folder(output)
    if folder is None:
        lines = [
            "No training service in this folder.", "It is shown as soon as one runs here:",
            f"$ posttrain service up service --set folder={output / 'service'}",
        ]  # fmt: skip
        return [{"kind": "note", "id": "service", "lines": lines}]
    settings = read_json(folder / "settings.json")
    from flows.service.store.overview import store_overview  # SQLAlchemy, for those who open this tab

    now = time.time()
    try:
        found = store_overview(
            str(settings.get("store") or f"sqlite:///{folder / 'service.db'}"), (now - SHOWN_SECONDS) // 60 * 60
        )
    except BackendError as error:
        return [{"kind": "note", "id": "service", "tone": "small", "lines": [str(error)]}]
    blocks = [_tiles(found, settings, now), _kinds(found)]
    if found.minutes:
        blocks.append(_charts(found, now))
    return [*blocks, _runs(found, now), _errors(found, now)]


def _answers(settings: dict[str, Any]) -> bool:
    """True where the server's health check answers."""
    server = settings.get("server") or {}
    host = str(server.get("host") or "127.0.0.1")
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.get('port', 8123)}/api/v1/healthz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=HEALTH_SECONDS) as answer:
            return bool(json.load(answer).get("status") == "ok")
    except (OSError, ValueError, AttributeError):
        return False


def _tiles(found: Any, settings: dict[str, Any], now: float) -> dict[str, Any]:
    waiting = sum(stats.waiting for stats in found.kinds.values())
    running = sum(stats.running for stats in found.kinds.values())
    port = (settings.get("server") or {}).get("port", 8123)
    is_late = not running and found.oldest_waiting is not None and now - found.oldest_waiting > LATE_SECONDS
    last = [one for one in found.minutes if one.minute >= int((now - RATE_SECONDS) // 60)]
    rate = sum(one.done + one.failed for one in last) / max(1.0, RATE_SECONDS + now % 60)
    failed = sum(one.failed for one in found.minutes)
    live = sum(run.state == "live" for run in found.runs)
    items = [
        {"label": "server", "value": "up" if _answers(settings) else "no answer", "sub": f"port {port}"},
        {"label": "open requests", "value": f"{waiting + running}", "sub": f"{waiting} wait, {running} run"},
        {"label": "oldest waits", "value": duration(now - found.oldest_waiting) if found.oldest_waiting else NONE,
         "sub": "nothing is computed: is the worker up?" if is_late else "since its acceptance"},
        {"label": "requests/s", "value": number(rate, 2), "sub": "finished, last minute"},
        {"label": "errors", "value": f"{failed}", "sub": "in the last hour"},
        {"label": "training runs", "value": f"{found.num_runs}", "sub": f"{live} live"},
    ]  # fmt: skip
    return {"kind": "tiles", "id": "service", "items": items}


def _span(seconds: float | None) -> str:
    """A duration, in milliseconds below a second."""
    return f"{1000 * seconds:.0f} ms" if seconds is not None and 0 <= seconds < 1 else duration(seconds)


def _kinds(found: Any) -> dict[str, Any]:
    heads = ["kind", "#waiting", "#running", "#wait p50", "#p90", "#p99", "#service p50", "#p90", "#p99"]
    rows = [
        [kind.replace("_", " "), f"{stats.waiting}", f"{stats.running}",
         *(_span(values.get(q)) for values in (stats.waited_seconds, stats.served_seconds)
           for q in ("0.5", "0.9", "0.99"))]
        for kind, stats in found.kinds.items()
    ]  # fmt: skip
    note = "Quantiles of the newest 1,000 finished requests: from acceptance to the start of the work, and the work."
    return table("kinds", "Queue", heads, rows, note if rows else "No requests yet.")


def _charts(found: Any, now: float) -> dict[str, Any]:
    """Requests per second of the last hour, minute by minute; the present minute is left out."""
    counts = {one.minute: one for one in found.minutes}
    last = int(now // 60)
    minutes = range(max(min(counts), last - int(SHOWN_SECONDS // 60)), last)
    x = [float(minute - last) for minute in minutes]
    lines = []
    for colour, name in enumerate(("done", "failed")):
        y = [getattr(counts[minute], name) / 60 if minute in counts else 0.0 for minute in minutes]
        line = {"name": name, "colour": colour, "dash": False, "x": x, "y": y, "last": y[-1] if y else None}
        lines.append(line)
    drawn = chart("rate", "Requests finished", lines, Drawn(window=1), unit="1/s", x="minutes before now")
    return {"kind": "charts", "id": "rates", "title": "", "note": "", "charts": [drawn]}


def _runs(found: Any, now: float) -> dict[str, Any]:
    heads = ["~run", "key", "base model", "state", "#updates", "#open", "last request"]
    rows = [
        [run.model_id, run.key, run.base, {"t": run.state, "badge": _TONES[run.state]}, f"{run.steps}",
         f"{run.open_requests}", f"{duration(now - run.touched)} ago"]
        for run in found.runs
    ]  # fmt: skip
    left = found.num_runs - len(found.runs)
    return table("runs", "Training runs", heads, rows, f"{left} older ones are not shown." if left > 0 else "")


def _errors(found: Any, now: float) -> dict[str, Any]:
    rows = [
        [f"{duration(now - one.finished)} ago", one.kind.replace("_", " "), one.category, one.target, one.error[:500]]
        for one in found.errors
    ]
    if not rows:
        return {"kind": "note", "id": "errors", "tone": "small", "lines": ["No request has failed."]}
    return table("errors", "Newest errors", ["when", "kind", "fault of", "~run or sampler", "~error"], rows)
