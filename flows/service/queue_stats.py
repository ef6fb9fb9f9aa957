"""Statistics of the queue: open requests and quantiles of waiting and service times, by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_core.service.status_answers import KindStats

__all__ = ["kind_stats", "quantile"]

QUANTILES = (0.5, 0.9, 0.99)


def kind_stats(depths: dict[str, dict[str, int]], timings: list[tuple[str, float, float]]) -> dict[str, KindStats]:
    """Statistics by kind of open and finished requests."""
    found = {}
    for kind in sorted({*depths, *(kind for kind, _, _ in timings)}):
        waits = [waited for one, waited, _ in timings if one == kind]
        serves = [served for one, _, served in timings if one == kind]
        found[kind] = KindStats(
            waiting=depths.get(kind, {}).get("waiting", 0),
            running=depths.get(kind, {}).get("running", 0),
            finished=len(waits),
            waited_seconds={f"{q}": quantile(waits, q) for q in QUANTILES} if waits else {},
            served_seconds={f"{q}": quantile(serves, q) for q in QUANTILES} if serves else {},
        )
    return found


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share `q` of all is not above. values: not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
