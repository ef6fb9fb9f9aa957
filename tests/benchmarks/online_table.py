"""Table and picture of the runs of online.py: means over seeds with 95% intervals."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from claimed.intervals import estimate_interval

OLD, ALL = ("easy", "medium"), ("easy", "medium", "hard")
HEADS = (
    "run",
    "seeds",
    "hard: change",
    "easy, medium: change",
    "lowest live level, against the start",
    "newest snapshot, all levels: change",
    "snapshots that went live",
    "updates taken",
    "mean KL, updates 51 on",
    "pseudo-labels right",
    "processor s",
)
COEFFICIENT_FLOOR = 1e-4  # kl_band.minimum, the same in all arms
COEFFICIENT_HEADS = (
    "run",
    "updates taken",
    "refused by the KL limit",
    "mean KL, second half",
    "largest KL",
    "updates with the coefficient at its floor, second half",
    "coefficient at the end",
    "hard: change",
    "easy, medium: change",
)


def format_table(output: Path) -> str:
    """Format all runs of a folder as Markdown: means over seeds with 95% Student's t intervals; draw a picture, too."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(output.glob("*.seed*.json")):
        arms.setdefault(path.name.partition(".seed")[0], []).append(json.loads(path.read_text()))
    if all("curve" not in run for runs in arms.values() for run in runs):
        return format_coefficients(arms)
    rows = [
        HEADS,
        ["---"] * len(HEADS),
        *(_format_row(name.replace("_", " "), runs) for name, runs in arms.items()),
    ]
    draw_success(output, arms)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _format_row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    online = [run for run in runs if "metrics" in run]  # the others are offline
    late = [[u["mean_kl"] for u in run["updates"][50:] if "mean_kl" in u] for run in online]
    right = [run["metrics"].get("online/pseudo_label_precision") for run in online]
    taken = [run["metrics"].get("online/update_success_rate", 1.0) for run in online]
    live = [
        sum(d["verdict"] == "promoted" for d in run["decisions"])
        for run in online
        if run["arm"].get("gate", True)
    ]
    return [
        name,
        str(len(runs)),
        _read_points([_compute_change(run, ("hard",)) for run in runs]),
        _read_points([_compute_change(run, OLD) for run in runs]),
        _read_points([_find_lowest(run) for run in runs]),
        _read_points(
            [
                statistics.mean(run["newest"][level] - run["curve"][0][level] for level in ALL)
                for run in runs
            ]
        ),
        ", ".join(map(str, live)) or ("all" if online else "-"),
        f"{statistics.mean(taken):.1%}" if taken else "-",
        ", ".join(f"{statistics.mean(k):.3f}" for k in late if k) or "-",
        ", ".join(f"{share:.0%}" for share in right if share is not None) or "-",
        f"{statistics.mean(run['processor_seconds'] for run in runs):.0f}",
    ]


def format_coefficients(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Format the runs of part coefficient, one value for each seed."""
    rows = [COEFFICIENT_HEADS, ["---"] * len(COEFFICIENT_HEADS)]
    for name, runs in arms.items():
        kls = [[u["mean_kl"] for u in run["updates"] if "mean_kl" in u] for run in runs]
        late = [_take_second_half(run["updates"]) for run in runs]
        at_floor = [
            statistics.mean(u["next_coefficient"] <= COEFFICIENT_FLOOR * 1.001 for u in updates)
            for updates in late
        ]
        changes = [{k: run["newest"][k] - run["start"][k] for k in ALL} for run in runs]
        rows.append(
            [
                name.replace("_", " "),
                ", ".join(
                    f"{run['metrics']['online/updates_taken']:.0f} of {len(run['updates'])}"
                    for run in runs
                ),
                ", ".join(f"{run['metrics']['online/refused/kl']:.0f}" for run in runs),
                ", ".join(f"{statistics.mean(_take_second_half(k)):.4f}" for k in kls),
                ", ".join(f"{max(k):.4f}" for k in kls),
                ", ".join(f"{share:.0%}" for share in at_floor),
                ", ".join(f"{run['updates'][-1]['next_coefficient']:.2g}" for run in runs),
                _read_points([change["hard"] for change in changes]),
                _read_points([statistics.mean(change[k] for k in OLD) for change in changes]),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _take_second_half(values: list[Any]) -> list[Any]:
    return values[len(values) // 2 :]


def _compute_change(run: dict[str, Any], levels: tuple[str, ...]) -> float:
    """Return the success at the end minus that at the start, mean over levels."""
    first, last = run["curve"][0], run["curve"][-1]
    return statistics.mean(last[level] - first[level] for level in levels)


def _find_lowest(run: dict[str, Any]) -> float:
    """Return the largest fall of the live snapshot's success over all levels together, at any time."""
    return min(
        statistics.mean(point[level] - run["curve"][0][level] for level in ALL)
        for point in run["curve"]
    )


def _read_points(values: list[float]) -> str:
    """Mean in points with the half-width of its 95% interval, in points."""
    if len(values) < 2:
        return f"{100 * values[0]:+.1f}"
    mean, low, high = estimate_interval(values)
    return f"{100 * mean:+.1f} ± {50 * (high - low):.1f}"


def draw_success(output: Path, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Draw success on held-out hard episodes over the requests, by arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    drawn = {name: runs for name, runs in arms.items() if name.startswith(("shift", "offline"))}
    for number, (name, runs) in enumerate(drawn.items()):
        for run in runs:
            x, y = [p["requests"] for p in run["curve"]], [100 * p["hard"] for p in run["curve"]]
            axes.plot(
                x,
                y,
                marker="o",
                color=f"C{number}",
                label=name.replace("_", " ") if run is runs[0] else None,
            )
    axes.set_xlabel("requests of hard level")
    axes.set_ylabel("success on held-out hard episodes, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(output / "online.png", dpi=110)
