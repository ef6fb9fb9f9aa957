"""Tables and picture of the clusters on paper, from the points of `paper.py`."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from asynchrony.paper import BASE, FEW, list_variants

PUBLISHED = (1.3, 2.8)  # speed-ups over synchronous training, see tests/benchmarks/results/scale.md
COLOURS = {0: "#7f7f7f", 1: "#1f77b4", 2: "#2ca02c", 4: "#ff7f0e", 8: "#d62728"}
TASKS = ("reasoning", "agent")


def format_table(header, rows):
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            "|" + "---|" * len(header),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def split_of(row):
    return f"{row['workers']} + {row['trainers']}"


def find_fastest(rows):
    """Return the row with the largest speed-up; None if there is no row."""
    return max(rows, key=lambda row: row["speed_up"], default=None)


def format_shares(rows):
    """Tabulate the speed-up of every share of the GPUs (rows) at every bound (columns)."""
    bounds = sorted({row["bound"] for row in rows})
    lines = []
    for task in TASKS:
        of_task = [row for row in rows if row["task"] == task and not row["shared"]]
        for gpus in sorted({row["gpus"] for row in of_task}):
            for split in dict.fromkeys(split_of(row) for row in of_task if row["gpus"] == gpus):
                by_bound = {
                    row["bound"]: row
                    for row in of_task
                    if row["gpus"] == gpus and split_of(row) == split
                }
                cells = (
                    f"{by_bound[bound]['speed_up']:.2f}" if bound in by_bound else "-"
                    for bound in bounds
                )
                lines.append([task, str(gpus), split, *cells])
    return format_table(
        ["task", "GPUs", "rollouts + training", *(f"bound {bound}" for bound in bounds)], lines
    )


def format_bounds(rows):
    """Tabulate the fastest share of each bound and how busy both sides are, after GPUs that alternate between both."""
    lines = []
    for task in TASKS:
        of_task = [row for row in rows if row["task"] == task]
        for gpus in sorted({row["gpus"] for row in of_task}):
            chosen = [row for row in of_task if row["gpus"] == gpus and row["shared"]]
            for bound in sorted({row["bound"] for row in of_task if row["gpus"] == gpus}):
                wanted = (gpus, bound, False)
                chosen.append(
                    find_fastest(
                        row
                        for row in of_task
                        if (row["gpus"], row["bound"], row["shared"]) == wanted
                    )
                )
            for row in chosen:
                names = ["in turns", "-"] if row["shared"] else [split_of(row), str(row["bound"])]
                lines.append(
                    [
                        task,
                        str(gpus),
                        *names,
                        f"{row['iteration_s']:.0f}",
                        f"{row['speed_up']:.2f}",
                        f"{row['staleness']:.1f}",
                        f"{row['worker_busy']:.0%}",
                        f"{row['trainer_busy']:.0%}",
                        str(row["stale_groups"]),
                    ]
                )
    header = [
        "task",
        "GPUs",
        "rollouts + training",
        "bound",
        "s an iteration",
        "speed-up",
        "staleness of a token",
        "workers busy",
        "trainers busy",
        "groups played again",
    ]
    return format_table(header, lines)


def format_variants(rows):
    """Tabulate the speed-up of the base on 96 + 32 GPUs, and with one thing changed."""
    split, changes = "96 + 32", [(study, task) for study, task, _, _ in list_variants()]
    lines = []
    for task in TASKS:
        for study in [BASE, *(study for study, of in changes if of == task)]:
            mine = [
                row
                for row in rows
                if (row["study"], row["task"], row["gpus"]) == (study, task, 128)
            ]
            if not mine:
                continue
            (turns,) = (row for row in mine if row["shared"])
            cells = []
            for bound in FEW:
                (row,) = (row for row in mine if row["bound"] == bound and split_of(row) == split)
                cells.append(
                    f"{row['speed_up']:.2f} ({row['worker_busy']:.0%} / {row['trainer_busy']:.0%})"
                )
            lines.append(
                [task, study, f"{turns['iteration_s']:.0f}", f"{turns['worker_busy']:.0%}", *cells]
            )
    header = [
        "task",
        "changed",
        "in turns: s an iteration",
        "workers busy",
        *(f"bound {bound} (workers / trainers busy)" for bound in FEW),
    ]
    return format_table(header, lines)


def draw_speed_ups(rows, path):
    """Draw the speed-up against the number of GPUs (fastest share), and against the share of 128 GPUs."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.9), sharey=True)
    for axis, task in zip(axes, TASKS, strict=False):
        of_task = [row for row in rows if row["task"] == task and not row["shared"]]
        gpus = sorted({row["gpus"] for row in of_task})
        for bound, colour in COLOURS.items():
            chosen = [
                find_fastest(r for r in of_task if (r["gpus"], r["bound"]) == (count, bound))
                for count in gpus
            ]
            chosen = [row for row in chosen if row is not None]
            axis.semilogx(
                [row["gpus"] for row in chosen],
                [row["speed_up"] for row in chosen],
                "o-",
                color=colour,
            )
        axis.set(title=f"{task}, fastest share", xlabel="GPUs", xticks=gpus, xticklabels=gpus)
        axis.minorticks_off()
    for bound, colour in COLOURS.items():
        chosen = [
            row
            for row in rows
            if (row["task"], row["gpus"], row["bound"]) == ("reasoning", 128, bound)
        ]
        chosen = sorted(
            (row for row in chosen if not row["shared"]), key=lambda row: row["workers"]
        )
        axes[2].plot(
            [100 * row["workers"] / 128 for row in chosen],
            [row["speed_up"] for row in chosen],
            "o-",
            color=colour,
            label=f"max_staleness {bound}",
        )
    axes[2].set(title="reasoning, 128 GPUs", xlabel="GPUs that play rollouts, %")
    for axis in axes:
        axis.axhspan(*PUBLISHED, color="black", alpha=0.08, label="published")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylim(0, None)
    axes[0].set_ylabel("speed-up over all GPUs in turns")
    handles, labels = axes[2].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(handles, labels, fontsize=9, ncols=6, loc="lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report_paper(points: Path, output: Path) -> str:
    """Return tables of the simulated clusters and draw scale_paper.png; empty if nothing was simulated."""
    every = [
        row for path in sorted(points.glob("paper-*.json")) for row in json.loads(path.read_text())
    ]
    rows = [row for row in every if row["study"] == BASE]
    if not rows:
        return ""
    draw_speed_ups(rows, output / "scale_paper.png")
    return "\n\n".join([format_shares(rows), format_bounds(rows), format_variants(every)])
