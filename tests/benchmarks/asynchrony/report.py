"""Tables (Markdown) and pictures of tests/benchmarks/scale.py, from its points."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from asynchrony.paper_report import paper, table

MS = (0, 50, 500)
WORKERS = (1, 2, 4)
COLOURS = {"alone": "#555555", "sync": "#1f77b4", "ready": "#17becf", "async": "#d62728"}
LABELS = {
    "alone": "in process",
    "sync": "synchronous",
    "ready": "synchronous, rejoin: ready",
    "async": "max_staleness 1",
}


def load(points: Path, name: str):
    path = points / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write(points: Path, output: Path) -> None:
    """scale.md, and a picture of each part that was run."""
    parts = [
        steps(points, output),
        overhead(points),
        learning(points, output),
        kills(points),
        simulation(points, output),
        paper(points, output),
    ]
    (output / "scale.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    print((output / "scale.md").read_text())


def steps(points, output):
    """Iterations a second."""
    rows, drawn = [], {}
    for ms in MS:
        alone = load(points, f"alone-{ms}ms")
        if alone is None:
            continue
        cells = [f"{ms} ms", f"{1 / alone['iteration_s']:.2f}"]
        drawn[ms, "alone"] = [1 / alone["iteration_s"]]
        for kind in ("sync", "ready", "async"):
            runs = [load(points, f"{kind}-{workers}-{ms}ms") for workers in WORKERS]
            if all(runs):
                drawn[ms, kind] = [1 / run["iteration_s"] for run in runs]
            cells.append(
                " / ".join(f"{1 / run['iteration_s']:.2f}" if run else "-" for run in runs)
            )
        rows.append(cells)
    if not rows:
        return ""
    figure, axes = plt.subplots(1, len(rows), figsize=(10, 3.7))
    for axis, ms in zip(
        np.atleast_1d(axes), [ms for ms in MS if (ms, "alone") in drawn], strict=True
    ):
        axis.axhline(
            drawn[ms, "alone"][0], color=COLOURS["alone"], linestyle=":", label=LABELS["alone"]
        )
        for kind in ("sync", "ready", "async"):
            if (ms, kind) in drawn:
                axis.plot(WORKERS, drawn[ms, kind], "o-", color=COLOURS[kind], label=LABELS[kind])
        axis.set(title=f"tools {ms} ms", xlabel="workers", xticks=WORKERS, ylim=(0, None))
    np.atleast_1d(axes)[0].set_ylabel("iterations a second")
    handles, labels = np.atleast_1d(axes)[-1].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="lower center")
    figure.savefig(output / "scale_steps.png", dpi=110)
    header = [
        "tools, mean",
        "in process",
        *(f"{LABELS[kind]}, 1 / 2 / 4 workers" for kind in ("sync", "ready", "async")),
    ]
    return "Iterations a second:\n\n" + table(header, rows)


def overhead(points):
    """One worker on Ray beside the trainer's own process, 27M parameters."""
    runs = {
        workers: [load(points, f"overhead-{workers}-{turn}") for turn in range(9)]
        for workers in (0, 1)
    }
    runs = {workers: [run for run in found if run] for workers, found in runs.items()}
    if not all(runs.values()):
        return ""
    rows = []
    for workers, name in ((0, "in process"), (1, "one worker on Ray")):
        each = [run["median_s"] for run in runs[workers]]
        metrics = {
            part: statistics.fmean(
                run["metrics"].get(f"perf/{part}_seconds", 0.0) for run in runs[workers]
            )
            for part in ("rollout", "weight_sync", "update")
        }
        rows.append(
            [
                name,
                f"{statistics.fmean(each):.3f}",
                " / ".join(f"{value:.3f}" for value in each),
                *(f"{metrics[part]:.3f}" for part in metrics),
            ]
        )
    alone, ray = (statistics.fmean(run["median_s"] for run in runs[workers]) for workers in (0, 1))
    header = [
        "27M parameters",
        "s an iteration",
        "each run's median",
        "rollouts, weights included",
        "of them weights",
        "update",
    ]
    return table(header, rows) + f"\n\nOverhead: {ray / alone - 1:+.1%}."


def learning(points, output):
    """Success at several bounds."""
    curves = {}
    for staleness in (0, 1, 4):
        found = [load(points, f"learning-{staleness}-{seed}") for seed in range(9)]
        if found := [run["rows"] for run in found if run]:
            curves[staleness] = np.array(found)
    if not curves:
        return ""
    figure, axis = plt.subplots(figsize=(6, 3.6))
    rows = []
    for (staleness, runs), colour in zip(
        curves.items(), ("#1f77b4", "#ff7f0e", "#d62728"), strict=False
    ):
        smooth = np.array([np.convolve(run, np.ones(5) / 5, "valid") for run in runs[:, :, 0]])
        x = np.arange(smooth.shape[1]) + 5
        axis.plot(x, smooth.mean(0), color=colour, label=f"max_staleness {staleness}")
        axis.fill_between(x, smooth.min(0), smooth.max(0), color=colour, alpha=0.15)
        last, middle = (
            runs[:, -10:, 0].mean(1),
            runs[:, runs.shape[1] // 4 : runs.shape[1] // 4 + 10, 0].mean(1),
        )
        rows.append(
            [
                str(staleness),
                str(len(runs)),
                f"{middle.mean():.3f}",
                f"{last.mean():.3f}",
                " / ".join(f"{value:.3f}" for value in last),
                f"{runs[:, 10:, 1].mean():.2f}",
                f"{runs[:, :, 2].max():.0f}",
            ]
        )
    axis.set(xlabel="iteration", ylabel="reward (mean of 5 iterations)", ylim=(0, 1))
    axis.legend()
    figure.tight_layout()
    figure.savefig(output / "scale_learning.png", dpi=110)
    first = next(iter(curves.values())).shape[1] // 4
    header = [
        "bound",
        "seeds",
        f"reward, iterations {first} to {first + 10}",
        "last 10",
        "each seed",
        "staleness of a token, mean",
        "largest",
    ]
    return table(header, rows)


def kills(points):
    """Kills of workers and drivers."""
    rows = []
    for kind in ("workers", "driver"):
        for staleness in (0, 1):
            if (found := load(points, f"kills-{kind}-{staleness}")) is None:
                continue
            mode = f"max_staleness {staleness}" if staleness else "synchronous"
            if kind == "workers":
                same = (
                    f"{found['equal_iterations']} of {found['iterations']} iterations, "
                    f"weights {found['equal_weights']}"
                )
                once = str(found.get("each_group_once", "-"))
            else:
                same, once = (
                    f"{found['equal']} of {found['runs']} runs",
                    str(found["each_group_once"] or "-"),
                )
            rows.append(
                [
                    kind,
                    mode,
                    str(found["kills"]),
                    same,
                    once,
                    str(found.get("replayed_groups", "-")),
                    str(len(found["left_over"]) + found.get("lingering", 0)),
                ]
            )
    header = [
        "killed",
        "mode",
        "kills",
        "equal bits",
        "each group once",
        "groups played again",
        "left behind",
    ]
    return table(header, rows) if rows else ""


def simulation(points, output):
    """Simulated beside measured iterations."""
    found = load(points, "simulation")
    if found is None:
        return ""
    figure, axis = plt.subplots(figsize=(4.6, 4.2))
    for kind, colour in COLOURS.items():
        chosen = [row for row in found["rows"] if row["name"].startswith(f"{kind}-")]
        if chosen:
            axis.plot(
                [row["measured"] for row in chosen],
                [row["simulated"] for row in chosen],
                "o",
                color=colour,
                label=LABELS[kind],
            )
    ends = np.array(
        [
            min(row["measured"] for row in found["rows"]) * 0.8,
            max(row["measured"] for row in found["rows"]) * 1.25,
        ]
    )
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(ends, ends * 0.85, ends * 1.15, color="black", alpha=0.1, label="within 15%")
    axis.set(
        xlabel="measured, s an iteration",
        ylabel="simulated, s an iteration",
        xscale="log",
        yscale="log",
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(output / "scale_simulation.png", dpi=110)
    rows = [
        [row["name"], f"{row['measured']:.3f}", f"{row['simulated']:.3f}", f"{row['error']:+.1%}"]
        for row in found["rows"]
    ]
    return table(["run", "measured, s an iteration", "simulated", "error"], rows)
