"""Seeds of one configuration: runs that differ in their seed alone are drawn as one line with a band.

The line is the mean over the seeds, the band reaches from the least to the largest seed at each step, like the learning
curves in the report of a sweep.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from posttrain.monitor.runs import RunView, StageView
from posttrain.monitor.series import MAX_CHART_POINTS, compute_moving_average

# Settings that may differ between seeds: names, places and what is recorded.
_FREE_KEYS = frozenset({"name", "output", "seed", "seeds", "tracking", "run"})
MAX_SEEDS = 32  # other seeds in one chart
SEEDS = "seeds"  # of the list of compared runs: all other seeds of the selected run

RunStage = tuple[RunView, StageView]


def digest_configuration(config: Mapping[str, Any]) -> bytes:
    """Return the settings of a run without its seeds, for comparison; b"" = unknown."""
    decisive = {name: value for name, value in config.items() if name not in _FREE_KEYS}
    if not decisive:
        return b""
    return orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def list_other_seeds(run: RunView, runs: Sequence[RunView]) -> list[str]:
    """Return the ids of the runs that have the configuration of `run` and another seed."""
    configuration = digest_configuration(run.config)
    if not configuration:
        return []
    return [
        other.id
        for other in runs
        if other.id != run.id
        and _read_seeds(other.config) != _read_seeds(run.config)
        and digest_configuration(other.config) == configuration
    ]


def group_seed_runs(runs: Sequence[RunStage]) -> list[list[RunStage]]:
    """Group runs by configuration, in order of first appearance; runs with equal seeds are never joined."""
    groups: list[list[RunStage]] = []
    positions: dict[bytes, int] = {}
    for run, stage in runs:
        configuration = digest_configuration(run.config)
        position = positions.get(configuration) if configuration else None
        if position is not None:
            seeds = [_read_seeds(other.config) for other, _ in groups[position]]
            if _read_seeds(run.config) not in seeds:
                groups[position].append((run, stage))
                continue
        positions.setdefault(configuration, len(groups))
        groups.append([(run, stage)])
    return groups


def build_band_line(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], name: str, colour: int, window: int
) -> dict[str, Any] | None:
    """Build one line of several seeds: mean, least and largest moving average at the steps that all of them reached.

    Args:
        curves: (x, value) of each seed, float64 [n] each, x ascending.
        window: observations of the moving average; 1 = none.
    Returns: None if the seeds have no step in common.
    """
    curves = [(x, compute_moving_average(y, window)) for x, y in curves if len(x)]
    if not curves:
        return None
    low_x, high_x = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = functools.reduce(np.union1d, [x for x, _ in curves])
    grid = grid[(grid >= low_x) & (grid <= high_x)]
    if not len(grid):
        return None
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    stride = -(-len(grid) // MAX_CHART_POINTS)
    starts = np.arange(0, len(grid), stride)
    counts = np.diff([*starts, len(grid)])
    mean = np.add.reduceat(values.mean(axis=0), starts) / counts
    return {
        "name": name,
        "colour": colour,
        "dash": False,
        "x": grid[starts + counts - 1].tolist(),
        "y": mean.tolist(),
        "low": np.minimum.reduceat(values.min(axis=0), starts).tolist(),
        "high": np.maximum.reduceat(values.max(axis=0), starts).tolist(),
        "last": float(mean[-1]),
    }


def _read_seeds(config: Mapping[str, Any]) -> bytes:
    seeds = {name: config.get(name) for name in ("seed", "seeds")}
    return orjson.dumps(seeds, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
