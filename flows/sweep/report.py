"""Report of a sweep: table for the terminal, CSV, JSON, figure, and a page for the tracking store."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.runtime.terminal import UNLIMITED_COLUMNS, detect_terminal_columns
from flows.sweep.plan import SweepPlan, format_configuration
from flows.sweep.schedule import SweepRecord, TrialOutcome
from flows.sweep.search import Params
from flows.sweep.winner import ALPHA, CHOICE_METHOD, SweepChoice
from rl_core.analysis.significance_tests import compute_seed_interval
from rl_core.analysis.training_curves import (
    SweptConfiguration,
    TrainingCurve,
    draw_sweep_figure,
    read_training_curves,
)
from rl_core.errors import DataError
from rl_core.storage.atomic_files import write_json_atomic, write_text_atomic
from rl_core.storage.faults import inject_fault
from tasks.stage_registry import START_MODEL

REPORT_FILES = ("sweep.csv", "results.json", "sweep.png")
_CURVE_METRICS = (
    "eval/success_rate",
    "train/success_rate",
    "eval/loss",
    "reward/mean",
    "train/loss",
)
_CSV_NUMBERS = ("seeds", "mean", "low", "high", "fresh", "fresh_low", "fresh_high", "seconds")


def build_report_rows(
    record: SweepRecord, plan: SweepPlan, choice: SweepChoice | None
) -> list[dict[str, Any]]:
    """Build one row per configuration, the best first; those without a result last."""
    rows = [
        _build_report_row(number, params, record, plan, choice)
        for number, params in enumerate(record.params)
    ]
    sign = 1 if plan.minimize else -1
    return sorted(
        rows, key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0.0), row["number"])
    )


def _build_report_row(
    number: int, params: Params, record: SweepRecord, plan: SweepPlan, choice: SweepChoice | None
) -> dict[str, Any]:
    trials = [
        record.outcomes[number, seed]
        for seed in range(plan.seeds)
        if (number, seed) in record.outcomes
    ]
    values = [
        trial.value for trial in trials if trial.status == "finished" and trial.value is not None
    ]
    interval = compute_seed_interval(values) if values else None
    fresh = choice.fresh.get(number) if choice is not None else None
    fresh_interval = compute_seed_interval(fresh) if fresh else None
    states = [trial.status for trial in trials]
    counts: dict[str, int] = {state: states.count(state) for state in dict.fromkeys(states)}
    if "pruned" not in states:
        counts["waiting"] = plan.seeds - len(trials)
    return {
        "number": number,
        "settings": dict(params),
        "seeds": len(values),
        "values": values,
        "mean": interval.rate if interval else None,
        "low": _drop_infinite(interval.low) if interval else None,
        "high": _drop_infinite(interval.high) if interval else None,
        "fresh": fresh_interval.rate if fresh_interval else None,
        "fresh_low": _drop_infinite(fresh_interval.low) if fresh_interval else None,
        "fresh_high": _drop_infinite(fresh_interval.high) if fresh_interval else None,
        "status": ", ".join(f"{state} {count}" for state, count in counts.items() if count),
        "why": next((trial.why for trial in trials if trial.why), ""),
        "seconds": round(sum(trial.seconds for trial in trials), 1),
        "is_winner": choice is not None and choice.winner == number,
    }


def _drop_infinite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _list_shown_rows(
    rows: Sequence[Mapping[str, Any]], choice: SweepChoice | None
) -> list[dict[str, Any]]:
    """List the rows of a table for people, with a label; the last is the start model, if it was measured."""
    shown = [{**row, "label": format_configuration(row["settings"])} for row in rows]
    start = choice.start if choice is not None else None
    if start is not None:
        empty = dict.fromkeys(("low", "high", "fresh_low", "fresh_high", "seconds"))
        values = {"mean": start.value, "fresh": start.fresh, "seeds": "", "why": ""}
        label = f"{START_MODEL}, the start model"
        shown.append({**empty, **values, "label": label, "status": "", "is_winner": False})
    return shown


def format_report_table(
    rows: Sequence[Mapping[str, Any]],
    plan: SweepPlan,
    choice: SweepChoice | None = None,
    width: int | None = None,
) -> str:
    """Format the rows as a table. A setting is broken only if it takes more than a third of 80 columns.

    Args:
        choice: adds the row of the start model, if that was measured.
    """
    rows = _list_shown_rows(rows, choice)
    words = [word for row in rows for word in row["label"].split()]
    min_widths = {"settings": min(27, max((len(word) for word in words), default=0))}
    grid = Table(title=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("settings", "left"),
        ("seeds", "right"),
        (f"{plan.metric} (95% over seeds)", "right"),
        ("on fresh episodes", "right"),
        ("seconds", "right"),
        ("trials", "left"),
    ):
        min_width = min_widths.get(name)
        grid.add_column(name, justify=justify, overflow="fold", min_width=min_width)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(
            "*" if row["is_winner"] else "",
            row["label"],
            str(row["seeds"]),
            _format_interval(row, "mean", "low", "high"),
            _format_interval(row, "fresh", "fresh_low", "fresh_high"),
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            row["status"],
        )
    width = width or detect_terminal_columns() or UNLIMITED_COLUMNS
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(grid)
    for row in rows:
        if row["why"]:
            console.print(
                f"{row['label']}: {row['why']}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _format_interval(row: Mapping[str, Any], *names: str) -> str:
    value, low, high = (row[name] for name in names)
    if value is None:
        return ""
    return f"{value:.4g}" if low is None else f"{value:.4g} [{low:.4g}, {high:.4g}]"


def render_markdown(
    rows: Sequence[Mapping[str, Any]],
    plan: SweepPlan,
    verdict: str,
    choice: SweepChoice | None = None,
) -> str:
    """Render the description of the sweep's run in the tracking store."""
    lines = [verdict, "", f"Winner: {CHOICE_METHOD} (alpha {ALPHA}).", ""]
    lines += [
        f"| settings | seeds | {plan.metric} (95% over seeds) | on fresh episodes | trials |",
        "|---|---|---|---|---|",
    ]
    for row in _list_shown_rows(rows, choice):
        emphasis = "**" if row["is_winner"] else ""
        cells = (
            f"{emphasis}{row['label']}{emphasis}",
            str(row["seeds"]),
            _format_interval(row, "mean", "low", "high"),
            _format_interval(row, "fresh", "fresh_low", "fresh_high"),
            row["status"],
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def write_report_files(
    record: SweepRecord,
    plan: SweepPlan,
    rows: Sequence[Mapping[str, Any]],
    choice: SweepChoice | None,
) -> None:
    """Write CSV, JSON and figure into the sweep's folder."""
    write_text_atomic(record.home / REPORT_FILES[0], _render_csv(rows))
    results = {
        "metric": plan.metric,
        "configurations": list(rows),
        "choice": choice.to_json() if choice else None,
    }
    write_json_atomic(record.home / REPORT_FILES[1], results)
    row_curves = [_read_row_curves(row, record, plan) for row in rows]
    logged = {name for trials in row_curves for curves in trials for name in curves}
    metric = next((name for name in _CURVE_METRICS if name in logged), "")
    configurations = [
        SweptConfiguration(
            format_configuration(row["settings"]),
            row["settings"],
            row["mean"],
            [curves[metric] for curves in trials if metric in curves],
        )
        for row, trials in zip(rows, row_curves, strict=True)
    ]
    draw_sweep_figure(record.home / REPORT_FILES[2], configurations, plan.metric, metric)
    inject_fault("sweep.reported")


def _read_row_curves(
    row: Mapping[str, Any], record: SweepRecord, plan: SweepPlan
) -> list[dict[str, TrainingCurve]]:
    """Read the curves of the last training stage of each of a row's trials."""
    curves = []
    for seed in range(plan.seeds):
        trial = record.outcomes.get((row["number"], seed))
        if trial is not None and trial.policy in trial.stages:
            curves.append(_read_stage_curves(Path(trial.stages[trial.policy]["folder"])))
    return curves


def _read_stage_curves(folder: Path) -> dict[str, TrainingCurve]:
    try:
        return read_training_curves(folder / "metrics.jsonl", frozenset(_CURVE_METRICS)).curves
    except DataError:
        return {}


def _render_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render one line per configuration."""
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["number", *keys, *_CSV_NUMBERS, "status", "winner"])
    for row in rows:
        numbers = ["" if row[name] is None else row[name] for name in _CSV_NUMBERS]
        settings = [row["settings"].get(key, "") for key in keys]
        writer.writerow([row["number"], *settings, *numbers, row["status"], int(row["is_winner"])])
    return text.getvalue()


def format_outcome(outcome: TrialOutcome, plan: SweepPlan) -> str:
    """Format the end of one trial as a line for the terminal."""
    seed = f", seed {outcome.seed}" if plan.seeds > 1 else ""
    result = {
        "finished": f"{plan.metric} {outcome.value:.4g}" if outcome.value is not None else "",
        "pruned": "stopped by successive halving",
        "failed": f"failed: {outcome.why}",
    }[outcome.status]
    configuration = format_configuration(outcome.params)
    return f"trial {outcome.number}: {configuration}{seed}: {result} ({outcome.seconds:.0f} s)"
