"""`posttrain online report`: one HTML file about a learning service."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.analysis.report_html import escape_text, render_page, render_table
from rl_core.errors import DataError
from rl_core.online.learning_folder import read_events, read_service_facts
from rl_core.online.service_files import (
    CONTRIBUTION_FILE,
    METRICS_FILE,
    read_gate_state,
    read_json_object,
)
from rl_core.storage.atomic_files import write_text_atomic

REPORT_FILE = "report.html"
_MAX_POINTS = 600  # of a curve
_MAX_EXPERIENCES = 20  # experiences in the table


@dataclass(frozen=True, slots=True)
class ReportSection:
    """One section of the report: a note, figures as SVG, a table."""

    title: str
    note: str = ""
    table: tuple[tuple[str, ...], Sequence[tuple[str, ...]]] | None = None  # heads, rows
    figures: Sequence[tuple[str, str]] = ()  # caption, SVG
    text_columns: int = 1

    def render_html(self) -> str:
        """The section."""
        parts = [f"<section><h2>{escape_text(self.title)}</h2>"]
        parts += [f"<p>{escape_text(self.note)}</p>"] if self.note else []
        parts += [
            f"<figure>{svg}<figcaption>{escape_text(caption)}</figcaption></figure>"
            for caption, svg in self.figures
        ]
        if self.table is not None and self.table[1]:
            rows = [[escape_text(cell) for cell in row] for row in self.table[1]]
            parts.append(
                render_table(
                    [escape_text(head) for head in self.table[0]],
                    rows,
                    text_columns=self.text_columns,
                )
            )
        elif not self.figures:
            parts.append("<p>Nothing yet.</p>")
        return "".join([*parts, "</section>"])


@dataclass(slots=True)
class OnlineServiceRecord:
    """All that a service's folder tells."""

    folder: Path
    facts: dict[str, Any]
    updates: list[dict[str, Any]]  # one record each, the oldest first
    worker_metrics: dict[str, Any]  # the worker's newest
    gate: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)

    def extract_series(self, *path: str) -> list[tuple[float, float]]:
        """(update, value) of a number of the updates that have it."""
        found = []
        for update in self.updates:
            value: Any = update
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.append((float(update["number"]), float(value)))
        return found


def read_service_record(folder: Path) -> OnlineServiceRecord:
    """The record of a service. Raises: DataError for a folder that holds none."""
    updates: dict[int, dict[str, Any]] = {}
    for path in _list_rotated_files(folder / CONTRIBUTION_FILE):
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
                updates[int(row["number"])] = row  # of one that was computed again, the last
            except (ValueError, KeyError, TypeError):  # torn by a kill
                continue
    facts = read_service_facts(folder)
    if not facts and not updates:
        raise DataError(
            f"{folder}: holds no record of online learning; name the folder of a service, as "
            "outputs/NAME/online/version-N, or that of `posttrain online worker`"
        )
    numbers = read_json_object(folder / METRICS_FILE)
    ordered = [updates[number] for number in sorted(updates)]
    return OnlineServiceRecord(
        folder, facts, ordered, numbers, read_gate_state(folder), read_events(folder)
    )


def _list_rotated_files(path: Path) -> list[Path]:
    """A rotated log's files, the oldest first."""
    found = [
        (int(p.name.rpartition(".")[2]), p)
        for p in path.parent.glob(f"{path.name}.*")
        if p.name.rpartition(".")[2].isdigit()
    ]
    return [p for _, p in sorted(found, reverse=True)] + ([path] if path.is_file() else [])


def write_service_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a service's folder; returns its path. Raises: DataError; CheckpointError."""
    record = read_service_record(folder)
    place = output or folder / REPORT_FILE
    name = record.facts.get("name") or folder.name
    began = f", since {_format_time(record.facts['began'])}" if record.facts.get("began") else ""
    start = f" from version {record.facts['version']}" if record.facts.get("version") else ""
    sections = [
        _summarize_service(record),
        _summarize_components(record),
        _draw_guardrails(record),
        _rank_experiences(record),
        _list_gate_decisions(record),
        _list_events(record),
    ]
    lead = escape_text(f"{name}{start}{began}: {len(record.updates)} updates on record.")
    body = f"<p class='lead'>{lead}</p>{''.join(section.render_html() for section in sections)}"
    write_text_atomic(place, render_page(f"Online learning of {name}", body))
    return place


def _summarize_service(record: OnlineServiceRecord) -> ReportSection:
    taken = sum(not update.get("refused") for update in record.updates)
    refused = Counter(str(update["refused"]) for update in record.updates if update.get("refused"))
    paused = record.worker_metrics.get("paused") or ""
    facts = [
        ("updates on record", f"{len(record.updates)}, {taken} taken"),
        ("refused", ", ".join(f"{why}: {count}" for why, count in refused.items()) or "none"),
        ("learning", f"paused: {paused}" if paused else "on"),
        ("live snapshot", _format_number(record.worker_metrics.get("online/live_version"))),
        ("newest snapshot", _format_number(record.worker_metrics.get("online/snapshot_version"))),
        (
            "experiences in the buffer",
            _format_number(record.worker_metrics.get("online/buffer_size")),
        ),
        ("precision of pseudo-labels", _format_precision(record.worker_metrics)),
        ("fresh rollouts", _format_number(record.worker_metrics.get("online/fresh/rollouts"))),
    ]
    return ReportSection("Now", table=(("", ""), facts), text_columns=2)


def _format_precision(numbers: Mapping[str, Any]) -> str:
    if "online/pseudo_label_precision" not in numbers:
        return "no feedback on a pseudo-label yet"
    low, high = (
        numbers["online/pseudo_label_precision_low"],
        numbers["online/pseudo_label_precision_high"],
    )
    count = numbers["online/pseudo_labels_checked"]
    used = "" if numbers.get("online/trusts_consensus", 1.0) else "; too low to be learned from"
    return f"{numbers['online/pseudo_label_precision']:.1%} (95%: {low:.1%} to {high:.1%}; {count:g} checked{used})"


def _summarize_components(record: OnlineServiceRecord) -> ReportSection:
    """Share of each component in what told the answers of one request apart."""
    spread: dict[str, float] = defaultdict(float)
    totals: dict[str, list[float]] = defaultdict(list)
    for update in record.updates:
        for one in update.get("experiences", ()):
            names, rows = (
                one["rewards"]["components"],
                [row for row in one["rewards"]["rollouts"] if row],
            )
            for index, name in enumerate(names):
                values = [row["weighted"][index] for row in rows]
                totals[name] += values
                if len(values) > 1:
                    mean = sum(values) / len(values)
                    spread[name] += sum((value - mean) ** 2 for value in values)
    whole = sum(spread.values())
    rows = [
        (
            name,
            f"{sum(values) / len(values):.4g}" if values else "-",
            f"{spread[name] / whole:.1%}" if whole else "-",
        )
        for name, values in totals.items()
    ]
    rows.sort(key=lambda row: -spread[row[0]])
    note = (
        "An update learns from differences between the answers to one request. The share is that of the squared "
        "differences which a component makes; where the components work against each other it says nothing of the sign."
    )
    return ReportSection(
        "Components that drove learning", note, (("component", "mean contribution", "share"), rows)
    )


def _draw_guardrails(record: OnlineServiceRecord) -> ReportSection:
    drawn = [
        (
            "KL to the old policy, nats per token",
            record.extract_series("kl_control", "mean_kl"),
            next(
                (value for _, value in reversed(record.extract_series("kl_control", "target_kl"))),
                None,
            ),
        ),
        ("KL coefficient", record.extract_series("kl_control", "coefficient"), None),
        ("gradient norm, before it is clipped", record.extract_series("gradients", "norm"), None),
        ("learning rate", record.extract_series("learning_rate"), None),
    ]
    figures = [(title, draw_curve_svg(points, target)) for title, points, target in drawn if points]
    bounds = sum(bool(update.get("is_lower_bound")) for update in record.updates)
    note = (
        f"KL of {bounds} updates is a lower bound, from recorded tokens: the snapshot was gone."
        if bounds
        else ""
    )
    return ReportSection("Guardrails", note, figures=figures)


def _rank_experiences(record: OnlineServiceRecord) -> ReportSection:
    weight: dict[str, float] = defaultdict(float)
    known: dict[str, dict[str, Any]] = {}
    for update in record.updates:
        for one in update.get("experiences", ()) if not update.get("refused") else ():
            weight[one["request_id"]] += one["importance_weight"] * sum(
                abs(value) for value in one["advantages"]
            )
            known[one["request_id"]] = one
    best = sorted(weight, key=lambda request: -weight[request])[:_MAX_EXPERIENCES]
    rows = [
        (
            request,
            known[request]["label"]["source"],
            f"{known[request]['label']['confidence']:.2f}",
            str(known[request]["policy_version"]),
            f"{weight[request]:.3g}",
        )
        for request in best
    ]
    note = "Weight: importance weight times the absolute advantages of its answers, over all updates that took it."
    return ReportSection(
        "Experiences that mattered most",
        note,
        (("request", "label", "confidence", "snapshot", "weight"), rows),
        text_columns=2,
    )


def _list_gate_decisions(record: OnlineServiceRecord) -> ReportSection:
    rows = [
        (_format_time(one["time"]), str(one["version"]), one["verdict"], one["reason"])
        for one in reversed(record.gate.get("decisions", []))
    ]
    return ReportSection(
        "Decisions of the gate", "", (("when", "snapshot", "decision", "why"), rows), text_columns=4
    )


def _list_events(record: OnlineServiceRecord) -> ReportSection:
    rows = [
        (_format_time(one["time"]), one["kind"], one["text"])
        for one in reversed(record.events)
        if one.get("kind") not in ("promoted", "rejected", "abandoned")
    ]
    return ReportSection(
        "Alarms, rollbacks, restarts", "", (("when", "event", "text"), rows[:200]), text_columns=3
    )


def draw_curve_svg(points: Sequence[tuple[float, float]], target: float | None = None) -> str:
    """A line over updates as SVG, thinned to a few hundred points; `target`: a level to compare with."""
    width, height, left, low = 640, 170, 64, 24
    step = max(1, len(points) // _MAX_POINTS)
    shown = [*points[::step], points[-1]]
    values = [value for _, value in shown] + ([target] if target is not None else [])
    bottom, top = min(values), max(values)
    span, first, last = (top - bottom) or 1.0, shown[0][0], shown[-1][0]

    def place(x: float, y: float) -> str:
        return (
            f"{left + (width - left - 8) * (x - first) / ((last - first) or 1.0):.1f},"
            f"{height - low - (height - low - 12) * (y - bottom) / span:.1f}"
        )

    line = " ".join(place(x, y) for x, y in shown)
    parts = [
        f"<svg viewBox='0 0 {width} {height}' role='img' style='max-width:720px;fill:var(--faint);font-size:11px'>"
    ]
    if target is not None:
        level, dashed = (
            f"{place(first, target)} {place(last, target)}",
            "stroke:var(--orange);stroke-dasharray:5 4",
        )
        parts.append(f"<polyline points='{level}' style='{dashed};fill:none'/>")
    parts.append(f"<polyline points='{line}' style='stroke:var(--blue);fill:none'/>")
    for value, y in ((top, 12), (bottom, height - low)):
        parts.append(f"<text x='{left - 6}' y='{y + 4}' text-anchor='end'>{value:.3g}</text>")
    parts.append(f"<text x='{left}' y='{height - 6}'>update {first:g}</text>")
    parts.append(f"<text x='{width - 8}' y='{height - 6}' text-anchor='end'>{last:g}</text></svg>")
    return "".join(parts)


def _format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "-"


def _format_time(seconds: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(seconds)))
