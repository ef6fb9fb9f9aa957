"""Rates of a simulation from the metrics of a finished policy stage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from rl_core.errors import DataError
from rl_core.settings.cluster_rates import ClusterRates, LogNormalSpread

__all__ = ["rates_from_records"]

ROW_SHARE = 0.5  # of decoding time that grows with the rows; a run of one batch size cannot tell
_P90 = 1.2816  # of the standard normal distribution


def rates_from_records(
    records: Sequence[tuple[int, Mapping[str, float]]], rollouts: int, most_tokens: int, *, row_share: float = ROW_SHARE
) -> ClusterRates:
    """Rates of one worker and one trainer that did what these iterations did; medians, the first iteration left out.

    An episode counts as one action. Time in which the environment was waited for is left out: its distribution is not
    in the metrics, so `tools` has to be set by hand.
    Args:
        rollouts: of an iteration.
        most_tokens: limit of a rollout.
        row_share: of the decoding time that grows with the number of rows; the rest is of steps.
    Raises: DataError where the records are of no policy stage, or of fewer than three iterations.
    """
    rows = [metrics for _, metrics in records if "perf/rollout_seconds" in metrics][1:]
    if len(rows) < 2:
        raise DataError("fewer than three iterations with rollouts were recorded: run the policy stage first")

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    waits = [row.get("perf/environment_seconds", 0.0) + row.get("perf/weight_sync_seconds", 0.0) for row in rows]
    decoding = statistics.median(
        max(0.0, row["perf/rollout_seconds"] - wait) for row, wait in zip(rows, waits, strict=True)
    )
    tokens = median("train/action_tokens")
    low, high = max(1.0, median("train/action_tokens_p10")), median("train/action_tokens_p90")
    sigma = max(0.0, math.log(max(low, high) / low) / (2 * _P90))
    spread = LogNormalSpread(mean=tokens, sigma=min(4.0, round(sigma, 3)), most=float(most_tokens))
    longest = float(np.mean(spread.draw(np.random.default_rng(0), (200, rollouts)).max(axis=1)))
    update = median("perf/update_seconds") + median("perf/reward_seconds")
    return ClusterRates(
        step_seconds=(1 - row_share) * decoding / max(1.0, longest),
        row_seconds=row_share * decoding / max(1.0, tokens * rollouts),
        token_seconds=update / max(1.0, tokens * rollouts), load_seconds=median("perf/weight_sync_seconds"),
        tokens=spread,
    )  # fmt: skip
