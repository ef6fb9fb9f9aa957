"""System tab: throughput of a stage; CPU, memory and GPU over the whole run."""

from __future__ import annotations

from typing import Any

from flows.monitor.charts import Drawn, chart, family, line, number
from flows.monitor.choice import Choice, Runs
from flows.monitor.runs import RunView

__all__ = ["load_charts", "speed_charts", "system"]


def system(run: RunView, pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    """Throughput of the stage, and machine load over the whole run."""
    blocks: list[dict[str, Any]] = []
    newest = run.system.series
    tiles = [
        {"label": label, "value": f"{number(newest[name].last, 1)} {unit}", "sub": sub}
        for name, label, unit, sub in (
            ("system/process_cpu_percentage", "CPU of the run", "%", "100 % is one core"),
            ("system/cpu_utilization_percentage", "CPU of the machine", "%", "of all cores"),
            ("system/process_memory_megabytes", "memory of the run", "MiB", "resident"),
            ("system/system_memory_usage_percentage", "memory of the machine", "%", "in use"),
            ("system/disk_available_megabytes", "disk", "MiB", "free"),
        )
        if name in newest
    ]
    if tiles:
        blocks.append({"kind": "tiles", "id": "machine", "items": tiles})
    speed = speed_charts(pairs, choice) if pairs else []
    if speed:
        label = pairs[0][1].label.replace("_", " ")
        blocks.append({"kind": "charts", "id": "speed", "title": f"Speed of {label}", "note": "", "charts": speed})
    load = load_charts(run)
    if load:
        blocks.append({"kind": "charts", "id": "load", "title": "Machine", "note": "", "charts": load})
    return blocks or [
        {
            "kind": "note",
            "id": "nothing",
            "tone": "small",
            "lines": ["No readings: tracking.system_metrics_seconds is 0 in this run, or it has just begun."],
        }
    ]


def speed_charts(pairs: Runs, choice: Choice) -> list[dict[str, Any]]:
    """Throughput, iteration time and memory of a stage, as far as measured."""
    parts = ("step", "rollout", "reward", "update")
    charts = [
        family("speed", "Throughput", [("perf/tokens_per_second", "all tokens"),
               ("perf/rollout_tokens_per_second", "rollouts")], pairs, choice.drawn, unit="tokens/s"),
        family("seconds", "Time of one iteration", [(f"perf/{part}_seconds", part) for part in parts], pairs,
               choice.drawn, unit="s"),
        family("memory", "Peak memory", [("perf/memory_gb", "peak")], pairs, choice.drawn, unit="GB"),
    ]  # fmt: skip
    return [found for found in charts if found is not None]


def load_charts(run: RunView) -> list[dict[str, Any]]:
    """CPU, memory and GPU over the whole run, with stage starts marked."""
    drawn = Drawn(window=1, by_time=True)
    begun = [
        {"x": (stage.started - run.started) / 60, "label": stage.label.replace("_", " "), "kind": ""}
        for stage in run.stages
        if stage.started >= run.started > 0 and stage.status != "cached"
    ]
    gpus = sorted({name.split("/")[1].split("_")[1] for name in run.system.series if name.startswith("system/gpu_")})
    wanted: list[tuple[str, str, list[tuple[str, str]], tuple[float, float] | None]] = [
        ("CPU of the run", "% of one core", [("process_cpu_percentage", "run")], (0.0, 100.0)),
        ("CPU of the machine", "% of all cores", [("cpu_utilization_percentage", "machine")], (0.0, 100.0)),
        ("Memory", "MiB", [("process_memory_megabytes", "run"), ("system_memory_usage_megabytes", "machine")], None),
        ("GPU", "%", [(f"gpu_{gpu}_utilization_percentage", f"GPU {gpu}") for gpu in gpus], (0.0, 100.0)),
        ("GPU memory", "MiB", [(f"gpu_{gpu}_memory_usage_megabytes", f"GPU {gpu}") for gpu in gpus], None),
        ("Free disk", "MiB", [("disk_available_megabytes", "free")], None),
    ]  # fmt: skip
    charts = []
    for title, unit, names, span in wanted:
        lines = [
            line(run.system.series[f"system/{name}"], label, colour, drawn, run.started)
            for colour, (name, label) in enumerate(names)
            if f"system/{name}" in run.system.series
        ]
        if lines:
            charts.append(chart(f"load:{title}", title, lines, drawn, unit=unit, span=span, moves=begun))
    return charts
