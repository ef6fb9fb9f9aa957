"""HTML report about a learning service (`posttrain online report`)."""

from __future__ import annotations

import contextlib
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
from rl_core.storage.append_log import list_log_files, read_records
from rl_core.storage.atomic_files import write_text_atomic

REPORT_FILE = "report.html"
_MAX_POINTS = 600  # of a curve
_MAX_EXPERIENCES = 20  # in the table
_MAX_EVENTS = 200  # in the table


@dataclass(frozen=True, slots=True)
class ReportSection:
    """One section of the report: a note, figures as SVG, a table."""

    title: str
    note: str = ""
    table: tuple[tuple[str, ...], Sequence[tuple[str, ...]]] | None = None  # heads, rows
    figures: Sequence[tuple[str, str]] = ()  # caption, SVG
    text_columns: int = 1

    def render_html(self) -> str:
        """Render the section as HTML."""
        parts = [f"<section><h2>{escape_text(self.title)}</h2>"]
        if self.note:
            parts.append(f"<p>{escape_text(self.note)}</p>")
        for caption, svg in self.figures:
            parts.append(f"<figure>{svg}<figcaption>{escape_text(caption)}</figcaption></figure>")
        if self.table is not None and self.table[1]:
            heads = [escape_text(head) for head in self.table[0]]
            rows = [[escape_text(cell) for cell in row] for row in self.table[1]]
            parts.append(render_table(heads, rows, text_columns=self.text_columns))
        elif not self.figures:
            parts.append("<p>Nothing yet.</p>")
        return "".join([*parts, "</section>"])


@dataclass(slots=True)
class OnlineServiceRecord:
    """The contents of a service's folder."""

    folder: Path
    facts: dict[str, Any]
    updates: list[dict[str, Any]]  # one record each, oldest first
    worker_metrics: dict[str, Any]  # the newest
    gate: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)

    def extract_series(self, *path: str) -> list[tuple[float, float]]:
        """Extract (update, value) of a field from the updates that have it. `path`: nested keys."""
        points = []
        for update in self.updates:
            value: Any = update
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                points.append((float(update["number"]), float(value)))
        return points

    def find_kl_target(self) -> float | None:
        """Find the KL target of the newest update that was computed; None = its coefficient was fixed."""
        for update in reversed(self.updates):
            if kl := update.get("kl_control"):
                return kl.get("target_kl")
        return None


def read_service_record(folder: Path) -> OnlineServiceRecord:
    """Read the record of a service. Raises: DataError for a folder without one."""
    updates: dict[int, dict[str, Any]] = {}
    for path in list_log_files(folder / CONTRIBUTION_FILE):
        for row in read_records(path, consequence="its update is missing in the report"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                updates[int(row["number"])] = row  # the last one, if it was recomputed
    facts = read_service_facts(folder)
    if not facts and not updates:
        raise DataError(
            f"{folder}: contains no record of online learning; name the folder of a service, as "
            "outputs/NAME/online/version-N, or that of `posttrain online worker`"
        )
    return OnlineServiceRecord(
        folder,
        facts,
        updates=[updates[number] for number in sorted(updates)],
        worker_metrics=read_json_object(folder / METRICS_FILE),
        gate=read_gate_state(folder),
        events=read_events(folder),
    )


def write_service_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a service's folder and return its path. Raises: DataError; CheckpointError."""
    record = read_service_record(folder)
    path = output or folder / REPORT_FILE
    name = record.facts.get("name") or folder.name
    began = f", since {_format_time(record.facts['began'])}" if record.facts.get("began") else ""
    start = f" from version {record.facts['version']}" if record.facts.get("version") else ""
    sections = [
        _summarize_service(record),
        _summarize_components(record),
        _draw_guardrails(record),
        _summarize_learning_rates(record),
        _rank_experiences(record),
        _list_gate_decisions(record),
        _list_events(record),
    ]
    lead = escape_text(f"{name}{start}{began}: {len(record.updates)} updates on record.")
    body = f"<p class='lead'>{lead}</p>{''.join(section.render_html() for section in sections)}"
    write_text_atomic(path, render_page(f"Online learning of {name}", body))
    return path


def _summarize_service(record: OnlineServiceRecord) -> ReportSection:
    metrics = record.worker_metrics
    taken = sum(not update.get("refused") for update in record.updates)
    refused = Counter(str(update["refused"]) for update in record.updates if update.get("refused"))
    num_null = refused.pop("null", 0)
    reasons = ", ".join(f"{reason}: {count}" for reason, count in refused.items())
    paused = metrics.get("paused") or ""
    rows = [
        ("updates on record", f"{len(record.updates)}, {taken} taken"),
        ("with nothing to learn", str(num_null)),
        ("refused", reasons or "none"),
        ("learning", f"paused: {paused}" if paused else "on"),
        ("live snapshot", _format_number(metrics.get("online/live_version"))),
        ("newest snapshot", _format_number(metrics.get("online/snapshot_version"))),
        ("experiences in the buffer", _format_number(metrics.get("online/buffer_size"))),
        ("precision of pseudo-labels", _format_precision(metrics)),
        ("fresh rollouts", _format_number(metrics.get("online/fresh/rollouts"))),
    ]
    return ReportSection("Now", table=(("", ""), rows), text_columns=2)


def _format_precision(metrics: Mapping[str, Any]) -> str:
    name = "online/pseudo_label_precision"
    if name not in metrics:
        return "no feedback on a pseudo-label yet"
    low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
    count = metrics["online/pseudo_labels_checked"]
    is_trusted = metrics.get("online/trusts_consensus", 1.0)
    note = "" if is_trusted else "; too low to be learned from"
    return f"{metrics[name]:.1%} (95%: {low:.1%} to {high:.1%}; {count:g} checked{note})"


def _summarize_components(record: OnlineServiceRecord) -> ReportSection:
    """Summarize each component's share of the differences between the answers to one request."""
    spread: dict[str, float] = defaultdict(float)
    totals: dict[str, list[float]] = defaultdict(list)
    for update in record.updates:
        for experience in update.get("experiences", ()):
            rewards = experience["rewards"]
            rollouts = [rollout for rollout in rewards["rollouts"] if rollout]
            for index, name in enumerate(rewards["components"]):
                values = [rollout["weighted"][index] for rollout in rollouts]
                totals[name] += values
                if len(values) > 1:
                    mean = sum(values) / len(values)
                    spread[name] += sum((value - mean) ** 2 for value in values)
    total_spread = sum(spread.values())
    rows = []
    for name in sorted(totals, key=lambda name: -spread[name]):
        values = totals[name]
        mean_text = f"{sum(values) / len(values):.4g}" if values else "-"
        share_text = f"{spread[name] / total_spread:.1%}" if total_spread else "-"
        rows.append((name, mean_text, share_text))
    note = (
        "An update learns from differences between the answers to one request. The share is that of the squared "
        "differences due to a component; it does not show whether components work against each other."
    )
    return ReportSection(
        "Components that drove learning", note, (("component", "mean contribution", "share"), rows)
    )


def _draw_guardrails(record: OnlineServiceRecord) -> ReportSection:
    curves = [
        (
            "KL to the old policy, nats per token",
            record.extract_series("kl_control", "mean_kl"),
            record.find_kl_target(),
        ),
        ("KL coefficient", record.extract_series("kl_control", "coefficient"), None),
        ("gradient norm, before it is clipped", record.extract_series("gradients", "norm"), None),
        ("learning rate", record.extract_series("learning_rate"), None),
    ]
    figures = [(title, draw_curve_svg(points, level)) for title, points, level in curves if points]
    num_bounds = sum(bool(update.get("is_lower_bound")) for update in record.updates)
    note = ""
    if num_bounds:
        note = f"KL of {num_bounds} updates is a lower bound, from recorded tokens: the snapshot no longer existed."
    return ReportSection("Guardrails", note, figures=figures)


def _summarize_learning_rates(record: OnlineServiceRecord) -> ReportSection:
    """Summarize the distribution of the learning rate over the updates that were taken."""
    rates = sorted(
        float(update["learning_rate"])
        for update in record.updates
        if update.get("losses") and not update.get("refused")
    )
    if not rates:
        return ReportSection("Learning rates")
    low, high = rates[0], rates[-1]
    rows = [
        (name, f"{rates[round(share * (len(rates) - 1))]:.3g}")
        for name, share in (
            ("lowest", 0.0),
            ("10%", 0.1),
            ("median", 0.5),
            ("90%", 0.9),
            ("highest", 1.0),
        )
    ]
    rows.append(("mean", f"{sum(rates) / len(rates):.3g}"))
    rows.append(("updates at the lowest", f"{rates.count(low) / len(rates):.1%}"))
    rows.append(("updates at the highest", f"{rates.count(high) / len(rates):.1%}"))
    note = (
        "The rate follows the error of each update within its bounds (min_learning_rate, max_learning_rate). Many "
        "updates at the lowest or highest rate mean that a bound decides."
    )
    figures = [("updates by learning rate", draw_histogram_svg(rates))]
    return ReportSection("Learning rates", note, (("of taken updates", "rate"), rows), figures)


def _rank_experiences(record: OnlineServiceRecord) -> ReportSection:
    weights: dict[str, float] = defaultdict(float)
    experiences: dict[str, dict[str, Any]] = {}
    for update in record.updates:
        if update.get("refused"):
            continue
        for experience in update.get("experiences", ()):
            request_id = experience["request_id"]
            size = sum(abs(value) for value in experience["advantages"])
            weights[request_id] += experience["importance_weight"] * size
            experiences[request_id] = experience
    rows = []
    for request_id in sorted(weights, key=lambda name: -weights[name])[:_MAX_EXPERIENCES]:
        label, version = (
            experiences[request_id]["label"],
            experiences[request_id]["policy_version"],
        )
        confidence, weight = f"{label['confidence']:.2f}", f"{weights[request_id]:.3g}"
        rows.append((request_id, label["source"], confidence, str(version), weight))
    note = "Weight: importance weight times the absolute advantages of its answers, over all updates that used it."
    return ReportSection(
        "Experiences that mattered most",
        note,
        (("request", "label", "confidence", "snapshot", "weight"), rows),
        text_columns=2,
    )


def _list_gate_decisions(record: OnlineServiceRecord) -> ReportSection:
    rows = [
        (
            _format_time(decision["time"]),
            str(decision["version"]),
            decision["verdict"],
            decision["reason"],
        )
        for decision in reversed(record.gate.get("decisions", []))
    ]
    return ReportSection(
        "Decisions of the gate", "", (("when", "snapshot", "decision", "why"), rows), text_columns=4
    )


def _list_events(record: OnlineServiceRecord) -> ReportSection:
    rows = [
        (_format_time(event["time"]), event["kind"], event["text"])
        for event in reversed(record.events)
        if event.get("kind") not in ("promoted", "rejected", "abandoned")
    ]
    table = (("when", "event", "text"), rows[:_MAX_EVENTS])
    return ReportSection("Alarms, rollbacks, restarts", "", table, text_columns=3)


def draw_curve_svg(points: Sequence[tuple[float, float]], target: float | None = None) -> str:
    """Draw a line over updates as SVG, thinned to a few hundred points. `target`: a level to compare with."""
    width, height, left, low = 640, 170, 64, 24
    step = max(1, len(points) // _MAX_POINTS)
    thinned = [*points[::step], points[-1]]
    values = [value for _, value in thinned] + ([target] if target is not None else [])
    bottom, top = min(values), max(values)
    value_range, first, last = (top - bottom) or 1.0, thinned[0][0], thinned[-1][0]

    def format_position(update: float, value: float) -> str:
        x = left + (width - left - 8) * (update - first) / ((last - first) or 1.0)
        y = height - low - (height - low - 12) * (value - bottom) / value_range
        return f"{x:.1f},{y:.1f}"

    line = " ".join(format_position(update, value) for update, value in thinned)
    parts = [
        f"<svg viewBox='0 0 {width} {height}' role='img' style='max-width:720px;fill:var(--faint);font-size:11px'>"
    ]
    if target is not None:
        level = f"{format_position(first, target)} {format_position(last, target)}"
        style = "stroke:var(--orange);stroke-dasharray:5 4;fill:none"
        parts.append(f"<polyline points='{level}' style='{style}'/>")
    parts.append(f"<polyline points='{line}' style='stroke:var(--blue);fill:none'/>")
    for value, y in ((top, 12), (bottom, height - low)):
        parts.append(f"<text x='{left - 6}' y='{y + 4}' text-anchor='end'>{value:.3g}</text>")
    parts.append(f"<text x='{left}' y='{height - 6}'>update {first:g}</text>")
    parts.append(f"<text x='{width - 8}' y='{height - 6}' text-anchor='end'>{last:g}</text></svg>")
    return "".join(parts)


def draw_histogram_svg(values: Sequence[float], num_bins: int = 20) -> str:
    """Draw the counts of values in equal bins as SVG. Equal values are one bar."""
    width, height, left, low = 640, 170, 64, 24
    start, end = min(values), max(values)
    counts = [0] * (num_bins if end > start else 1)
    for value in values:
        position = (value - start) / (end - start) if end > start else 0.0
        counts[min(len(counts) - 1, int(position * len(counts)))] += 1
    most, bar = max(counts), (width - left - 8) / len(counts)
    parts = [
        f"<svg viewBox='0 0 {width} {height}' role='img' style='max-width:720px;fill:var(--faint);font-size:11px'>"
    ]
    for index, count in enumerate(counts):
        size = (height - low - 12) * count / most
        x, y = left + index * bar, height - low - size
        parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(1.0, bar - 2):.1f}' height='{size:.1f}' "
            "style='fill:var(--blue)'/>"
        )
    parts.append(f"<text x='{left - 6}' y='16' text-anchor='end'>{most}</text>")
    parts.append(f"<text x='{left - 6}' y='{height - low + 4}' text-anchor='end'>0</text>")
    parts.append(f"<text x='{left}' y='{height - 6}'>{start:.3g}</text>")
    parts.append(f"<text x='{width - 8}' y='{height - 6}' text-anchor='end'>{end:.3g}</text></svg>")
    return "".join(parts)


def _format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "-"


def _format_time(seconds: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(seconds)))
