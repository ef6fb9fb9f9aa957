"""Blocks about the present: every metric's value, mean and slope; shares of tools and of reward components as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flows.monitor.charts import COLOURS, NONE, measured, metric_cell, number, percent, table, unit_of
from flows.monitor.choice import Choice
from flows.monitor.runs import StageView
from flows.monitor.series import Series

__all__ = ["metric_table", "reward_shares", "slope", "tool_bars"]

_SHARE, _WEIGHTED = "tool/share/", "reward/weighted/"


def metric_table(stage: StageView, choice: Choice) -> dict[str, Any]:
    """One row per metric of a stage: present value, mean and slope over the window, observations."""
    window = max(2, choice.window)
    rows = []
    for name, series in sorted(stage.table.series.items()):
        if name.startswith("system/"):
            continue
        lean = slope(series, window)
        steep = NONE if lean is None else f"{100 * lean:+.3g}%" if unit_of(name) == "share" else f"{lean:+.3g}"
        now, mean = measured(name, series.last, 4), measured(name, series.mean(window), 4)
        rows.append([metric_cell(name), now, mean, steep, f"{series.count:,}"])
    note = (
        f"Mean and slope are over the newest {window} observations of each metric; the slope is least squares, per "
        "step of the optimizer. Metrics with fewer than two steps have none."
    )
    heads = ("metric", "#present", f"#mean of {window}", "#slope", "#observations")
    return table("present", "Every metric now", heads, rows, note)


def slope(series: Series, window: int) -> float | None:
    """Least-squares slope per step over the newest `window` observations, at the stored resolution; None = no slope."""
    steps, _, values = series.arrays()
    count = max(2, math.ceil(window / series.stride))
    steps, values = steps[-count:], values[-count:]
    centred = steps - steps.mean() if len(steps) else steps
    spread = float(centred @ centred)
    return float(centred @ (values - values.mean())) / spread if spread > 0 else None


def tool_bars(stage: StageView, choice: Choice, episodes: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """Share of each tool among the calls, now: of training's metrics, else of recorded trajectories; None = no call.

    episodes: rows of `tool_table`.
    """
    window = max(1, choice.window)
    shares = {
        name.removeprefix(_SHARE): _share(series, stage, window)
        for name, series in stage.table.series.items()
        if name.startswith(_SHARE)
    }
    told = f"Mean over the newest {window} iterations with calls."
    if not shares and (total := sum(row["calls"] for row in episodes)):
        shares, told = {row["tool"]: row["calls"] / total for row in episodes}, "Of the newest trajectories."
    return _bars("tool shares", "Tools by share of the calls", shares, told)


def _share(series: Series, stage: StageView, window: int) -> float:
    """Mean over the newest iterations with calls; one in which the tool was not called recorded no share, so 0."""
    calls = stage.table.series.get("tool/calls")
    if calls is None or calls.stride > 1 or series.stride > 1:
        return series.mean(window)
    at, _, number_of = calls.arrays()
    recent = at[number_of > 0][-window:]
    steps, _, values = series.arrays()
    return float(values[steps >= recent[0]].sum() / len(recent)) if len(recent) else math.nan


def reward_shares(stage: StageView, choice: Choice) -> dict[str, Any] | None:
    """Share of each component in the total reward, by the size of what it adds, now; None = one component or none."""
    window = max(1, choice.window)
    sizes = {
        name.removeprefix(_WEIGHTED): series.mean(window)
        for name, series in stage.table.series.items()
        if name.startswith(_WEIGHTED)
    }
    total = sum(map(abs, sizes.values()))
    if len(sizes) < 2 or not total:
        return None
    told = f"|mean| of each weighted part over their sum, over the newest {window} iterations; a cost has a minus."
    found = _bars("reward shares", "Parts of the reward by size", {n: abs(v) / total for n, v in sizes.items()}, told)
    assert found is not None
    for item in found["items"]:
        item["text"] += f" ({number(sizes[item['id']])})"
    return found


def _bars(identity: str, title: str, shares: Mapping[str, float], note: str) -> dict[str, Any] | None:
    known = {name: share for name, share in shares.items() if math.isfinite(share)}
    if not known:
        return None
    colours = {name: index % COLOURS for index, name in enumerate(sorted(known))}  # a tool keeps its colour
    items = [
        {"id": name, "label": name, "share": min(1.0, max(0.0, share)), "text": percent(share), "colour": colours[name]}
        for name, share in sorted(known.items(), key=lambda item: (-item[1], item[0]))
    ]
    return {"kind": "bars", "id": identity, "title": title, "note": note, "items": items}
