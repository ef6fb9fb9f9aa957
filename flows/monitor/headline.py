"""Top of the overview: the numbers that matter now, or the results of a finished run; alarms; settings that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flows.monitor.charts import duration, measured, number, percent, table
from flows.monitor.choice import Runs
from flows.monitor.metric_names import hint_of, label_of
from flows.monitor.runs import RunView, StageView
from flows.monitor.series import Series
from rl_core.settings.sinks import condition_of

__all__ = ["alarms", "held_out", "settings_that_differ", "tiles"]

_WINDOW = 10  # observations of a mean
_SHOWN = 40  # settings
_PLACES = ("output", "name", "tracking", "run")  # settings that decide nothing of what is computed


def held_out(run: RunView, label: str) -> float | None:
    """Success of a trained stage on held-out episodes, as the evaluation recorded it."""
    series = next((s for stage in run.stages if (s := stage.table.series.get(f"eval/{label}/success_rate"))), None)
    return series.last if series is not None else None


def tiles(run: RunView, stage: StageView | None) -> dict[str, Any] | None:
    """Results of a run that is over and was evaluated, else the numbers of its stage; None = there are none yet."""
    items = _results(run) if run.is_over or run.status == "waiting" else []
    items = items or (_now(stage) if stage is not None else [])
    return {"kind": "tiles", "id": "headline", "items": items} if items else None


def _results(run: RunView) -> list[dict[str, str]]:
    rates = [(stage.label, rate) for stage in run.stages if (rate := held_out(run, stage.label)) is not None]
    items = []
    for index, (label, rate) in enumerate(rates):
        change = f"{100 * (rate - rates[0][1]):+.1f} points over {rates[0][0]}" if index else "success, held out"
        items.append({"label": label.replace("_", " "), "value": percent(rate), "sub": change.replace("_", " ")})
    promote = next((stage for stage in run.stages if stage.label == "promote" and stage.note), None)
    if items and promote is not None:
        decision = "promoted" if re.search(r"(?<!not) promoted\b", promote.note) else "not promoted"
        decision = "champion already" if "is the champion already" in promote.note else decision
        decision = "waits for approval" if run.status == "waiting" else decision
        why = _first_clause(promote.note)
        items.append({"label": "champion", "value": decision, "sub": why, "title": promote.note})
    return items


def _first_clause(note: str) -> str:
    """Decision with its first reason; a tile has no room for all of them."""
    return note.partition("; ")[0]


def _now(stage: StageView) -> list[dict[str, str]]:
    items: list[dict[str, str]] = []
    for label, name in (("success", "train/success_rate"), ("reward", "reward/mean"), ("KL", "policy/ref_kl"),
                        ("KL", "policy/update_kl"), ("entropy", "policy/entropy"), ("loss", "train/loss"),
                        ("held-out loss", "eval/loss")):  # fmt: skip
        series = stage.table.series.get(name)
        if series is None or (name == "train/loss" and "reward/mean" in stage.table.series):
            continue
        if label in ("KL", "entropy") and any(item["label"] == "KL" for item in items):
            continue  # one of them: entropy where no KL is measured
        values = series.arrays()[2]
        if label == "KL" and not values.any():
            continue  # of one step per rollout it is 0 by definition
        now, first = float(values[-_WINDOW:].mean()), float(values[:_WINDOW].mean())
        is_rate = name.endswith("_rate")
        change = f"{100 * (now - first):+.1f} points" if is_rate else f"{now - first:+.3g}"
        told = f"{change} since the start" if len(values) > _WINDOW else ""
        items.append(
            {"label": label, "value": percent(now) if is_rate else number(now), "sub": told, "title": hint_of(name)}
        )
    if stage.seconds_left is not None:
        items.append({"label": "left in this stage", "value": duration(stage.seconds_left), "sub": ""})
    return items


def alarms(run: RunView) -> list[dict[str, Any]]:
    """Notes about alarms that are on: of the reward, and conditions of `tracking.alerts` that are true now."""
    tracking = run.config.get("tracking")
    conditions = (tracking.get("alerts") if isinstance(tracking, Mapping) else None) or {}
    found = []
    for stage in run.stages:
        label = stage.label.replace("_", " ")
        series = stage.table.series.get("reward/alarm")
        if series is not None and series.last > 0:
            lines = [
                f"Stage {label}: the reward may be hacked.",
                f"Since step {_since(series, '>', 0.0):.0f} the total reward rises while success falls (reward/alarm).",
            ]
            found.append({"kind": "note", "id": f"alarm-{stage.label}", "tone": "bad", "lines": lines})
        for name, text in conditions.items():
            series = stage.table.series.get(name)
            if series is None or name == "reward/alarm" or not isinstance(text, str):
                continue
            sign, bound = condition_of(text)
            if series.last > bound if sign == ">" else series.last < bound:
                lines = [
                    f"Stage {label}: {label_of(name)} is {measured(name, series.last)}.",
                    f"Since step {_since(series, sign, bound):.0f} {name} is {sign} {bound:g} (tracking.alerts).",
                ]
                found.append({"kind": "note", "id": f"alarm-{stage.label}-{name}", "tone": "bad", "lines": lines})
    return found


def _since(series: Series, sign: str, bound: float) -> float:
    """First step of those up to the newest at which a condition holds without a break."""
    steps, _, values = series.arrays()
    held = values > bound if sign == ">" else values < bound
    broken = np.flatnonzero(~held)
    first = broken[-1] + 1 if len(broken) else 0
    return float(steps[first]) if first < len(steps) else series.last_step


def settings_that_differ(runs: Runs) -> dict[str, Any] | None:
    """Table of the settings in which the compared runs differ; None where nothing is compared or nothing differs."""
    if len(runs) < 2:
        return None
    flat = [_flat(run.config) for run, _ in runs]
    keys = dict.fromkeys(key for one in flat for key in one if key.split(".")[0] not in _PLACES)
    differ = [key for key in keys if len({one.get(key, "-") for one in flat}) > 1]
    if not differ:
        return None
    rows = [[key, *(one.get(key, "-") for one in flat)] for key in differ[:_SHOWN]]
    heads = ["setting", *(f"{run.pipeline} {run.started_text}" for run, _ in runs)]
    note = f"The first {_SHOWN} of {len(differ)}." if len(differ) > _SHOWN else ""
    return table("settings", "Settings that differ", heads, rows, note)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)[:60]
    return found
