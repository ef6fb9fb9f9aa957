"""Simulated against measured runs: the length of an iteration predicted from the durations of its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asynchrony.parts import fit_parts
from posttrain.planning.policy_stage_simulation import simulate_run
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.settings.planning import ClusterRates, LogNormalSpread

CORES = 2  # of the machine that was measured
SIGMA = 1.0  # of the tools, see slow_tools
ITERATIONS = 100
TRANSPORT = ("publish_seconds", "verify_seconds", "load_seconds", "call_seconds", "group_seconds")


@dataclass
class Measured:
    """Draws from measured values, each with the same chance."""

    values: list[float]

    def draw_values(self, generator, shape):
        return generator.choice(self.values, shape)


def read_rates(points: Path) -> tuple[ClusterRates, Measured, tuple[float, ...]]:
    """Return the durations of the parts, each measured apart from the predicted runs, and the crowding factors."""
    parts, costs = (
        [json.loads(path.read_text()) for path in sorted(points.glob(f"{kind}-0.9M-*.json"))]
        for kind in ("parts", "costs")
    )
    medians = {name: float(np.median([point[name] for point in costs])) for name in TRANSPORT}
    crowding = np.median([point["crowding"] for point in costs], axis=0).tolist()
    tokens = [size for point in parts for size in point["turn_tokens"]]
    return ClusterRates(**fit_parts(parts), **medians, turns=3), Measured(tokens), tuple(crowding)


def simulate_iteration(
    name: str, mean: float, rates: ClusterRates, tokens: Measured, crowding: tuple[float, ...]
) -> float:
    """Return the seconds of an iteration of one of the runs of `scale.py --parts steps`."""
    kind, *rest = name.split("-")
    workers = int(rest[0]) if kind != "alone" else 1
    layout = ClusterLayout(
        prompts=8,
        group_size=4,
        workers=workers,
        max_staleness=int(kind == "async"),
        cores=CORES,
        crowding=crowding,
        rejoin="ready" if kind == "ready" else "together",
    )
    if kind == "alone":
        rates = ClusterRates(**{**vars(rates), **dict.fromkeys(TRANSPORT, 0.0)})
    sizes = RolloutSizeDistributions(
        turns=3, tokens=tokens, tools=LogNormalSpread(mean=mean, sigma=SIGMA)
    )
    seeds = range(3)
    return float(
        np.mean(
            [
                simulate_run(layout, rates, sizes, iterations=ITERATIONS, seed=s).iteration_s
                for s in seeds
            ]
        )
    )


def predict_runs(points: Path) -> list[dict]:
    """Return rows (name, measured, simulated, error) of every run, saved in simulation.json."""
    rates, tokens, crowding = read_rates(points)
    rows = []
    for path in sorted(points.glob("*-*ms.json")):
        run = json.loads(path.read_text())
        seconds = simulate_iteration(path.stem, run["mean"], rates, tokens, crowding)
        error = seconds / run["iteration_s"] - 1
        rows.append(
            {
                "name": path.stem,
                "measured": run["iteration_s"],
                "simulated": seconds,
                "error": error,
            }
        )
        print(
            f"{path.stem:18s} measured {run['iteration_s']:7.3f}  simulated {seconds:7.3f}  {error:+.1%}"
        )
    (points / "simulation.json").write_text(
        json.dumps({"rates": {**vars(rates), "tokens": None, "tools": None}, "rows": rows})
    )
    return rows
