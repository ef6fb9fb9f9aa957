"""Online tab: the newest learning service of the output folder, from the files that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.monitor.charts import NONE, Drawn, chart, duration, number, percent, table
from flows.online.learning_folder import read_events, read_service
from flows.online.service_report import ServiceRecord, read_record

__all__ = ["newest_service", "online"]

_EVENTS = 30
_POINTS = 2000  # of a curve


def newest_service(output: Path) -> Path | None:
    """Folder of the service that began last, of all pipelines of an output folder; None without one."""
    found = [(facts["began"], path) for path in output.glob("*/online/*") if (facts := read_service(path)).get("began")]
    return max(found)[1] if found else None


def online(output: Path) -> list[dict[str, Any]]:
    """Numbers, guardrails, decisions and alarms of the service."""
    folder = newest_service(output)
    if folder is None:
        lines = ["Nothing learns from its traffic in this folder.", "It is shown as soon as something does:",
                 "$ posttrain serve CONFIG --learn"]  # fmt: skip
        return [{"kind": "note", "id": "online", "lines": lines}]
    record = read_record(folder)
    blocks = [_tiles(record), *_charts(record), _decisions(record), _events(record)]
    lines = ["All of it as one file:", f"$ posttrain online report {folder}"]
    return [*blocks, {"kind": "note", "id": "online-report", "tone": "small", "lines": lines}]


def _tiles(record: ServiceRecord) -> dict[str, Any]:
    numbers = record.numbers
    paused = str(numbers.get("paused") or "")
    is_used = bool(numbers.get("online/trusts_consensus", 1.0))

    def told(name: str, form: Callable[[float], str] = "{:,.0f}".format) -> str:
        value = numbers.get(f"online/{name}")
        return form(float(value)) if isinstance(value, int | float) else NONE

    items = [
        {"label": "learning", "value": "paused" if paused else "on", "sub": paused[:120] or record.folder.name},
        {"label": "updates", "value": told("updates"), "sub": f"{told('updates_taken')} taken"},
        {"label": "live snapshot", "value": told("live_version"), "sub": f"newest {told('snapshot_version')}"},
        {"label": "mean KL", "value": _newest(record, "mean_kl"), "sub": f"target {_newest(record, 'target_kl')}"},
        {"label": "experiences", "value": told("buffer_size"), "sub": f"{told('buffer_drawable')} with a label"},
        {"label": "pseudo-labels right", "value": told("pseudo_label_precision", percent),
         "sub": f"{told('pseudo_labels_checked')} checked by feedback{'' if is_used else '; not learned from'}"},
    ]  # fmt: skip
    return {"kind": "tiles", "id": "online", "items": items}


def _newest(record: ServiceRecord, name: str) -> str:
    """A number of the last update that has it: one that was left out, as while learning is paused, has none."""
    points = record.series("kl_control", name)
    return number(points[-1][1]) if points else NONE


def _charts(record: ServiceRecord) -> list[dict[str, Any]]:
    drawn = []
    for key, title, path, level in (
        ("kl", "KL to the old policy", ("kl_control", "mean_kl"), ("kl_control", "target_kl")),
        ("coefficient", "KL coefficient", ("kl_control", "coefficient"), ()),
        ("norm", "Gradient norm", ("gradients", "norm"), ()),
        ("rate", "Learning rate", ("learning_rate",), ()),
    ):
        points = record.series(*path)[-_POINTS:]
        if points:
            lines = [_line(title, points, 0)]
            if level and (target := record.series(*level)[-_POINTS:]):
                lines.append(_line("target", target, 1))
            drawn.append(chart(key, title, lines, Drawn(window=1), x="update"))
    return [{"kind": "charts", "id": "online-charts", "title": "", "note": "", "charts": drawn}] if drawn else []


def _line(name: str, points: list[tuple[float, float]], colour: int) -> dict[str, Any]:
    x, y = [point[0] for point in points], [point[1] for point in points]
    return {"name": name, "colour": colour, "dash": colour > 0, "x": x, "y": y, "last": y[-1]}


def _decisions(record: ServiceRecord) -> dict[str, Any]:
    rows = [
        [_ago(one["time"]), f"{one['version']}", one["verdict"], one["reason"]]
        for one in reversed(record.gate.get("decisions", [])[-_EVENTS:])
    ]
    note = "" if rows else "No snapshot has been decided about."
    return table("gate", "Gate", ["when", "#snapshot", "decision", "~why"], rows, note)


def _events(record: ServiceRecord) -> dict[str, Any]:
    rows = [[_ago(one["time"]), one["kind"], one["text"]] for one in reversed(read_events(record.folder)[-_EVENTS:])]
    return table("online-events", "Newest events", ["when", "event", "~text"], rows, "" if rows else "Nothing yet.")


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, time.time() - seconds))} ago"
