"""Reward-hacking monitor: correlation of the reward and its components with true success, and an alarm."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl_core.rewards.running_stats import RunningNorm
from rl_core.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _IterationStats:
    """Statistics of one iteration."""

    reward: float  # mean of the total
    success: float  # rate
    total: RunningNorm  # of the total, for its deviation
    # component -> statistics over failures and over successes
    split: dict[str, tuple[RunningNorm, RunningNorm]] = field(default_factory=dict)


class HackingMonitor:
    """Correlations and alarm over the last `window` iterations of the current phase.

    reward/correlation/<component>: point-biserial correlation of a raw component (and of the `total`) with success, in
    all rollouts of the window; absent while all succeeded, all failed, or the component never differed.
    reward/alarm: 1 when over a full window the fitted line of the mean total rises by more than margin times the
    total's standard deviation, while that of the success rate falls by more than margin; else 0. A warning is logged
    when it changes to 1.
    Another phase (a curriculum stage with other levels and weights) starts with an empty window.
    """

    def __init__(self, window: int, margin: float) -> None:
        self.margin = margin
        self.phase = ""
        self.alarmed = False
        self._past: deque[_IterationStats] = deque(maxlen=window)

    def record_iteration(
        self, rollouts: Sequence[Rollout], parts: Sequence[str], phase: str = ""
    ) -> dict[str, float]:
        """Add the scored rollouts of one iteration, without masked ones, and return the metrics."""
        if phase != self.phase:
            self.phase, self.alarmed = phase, False
            self._past.clear()
        scored = [rollout for rollout in rollouts if not rollout.is_masked]
        if scored:
            self._past.append(_summarize_iteration(scored, parts))
        metrics = {"reward/alarm": float(self._update_alarm())}
        for name in ("total", *parts):
            correlation = self._compute_correlation(name)
            if correlation is not None:
                metrics[f"reward/correlation/{name.replace(':', '.')}"] = correlation
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return phase, alarm and window."""
        return {
            "phase": self.phase,
            "alarmed": self.alarmed,
            "past": [
                {
                    "reward": past.reward,
                    "success": past.success,
                    "total": past.total.state_dict(),
                    "split": {
                        name: [norm.state_dict() for norm in pair]
                        for name, pair in past.split.items()
                    },
                }
                for past in self._past
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.phase, self.alarmed = str(state["phase"]), bool(state["alarmed"])
        self._past.clear()
        for row in state["past"]:
            split = {
                name: (_load_norm(failed), _load_norm(won))
                for name, (failed, won) in row["split"].items()
            }
            self._past.append(
                _IterationStats(
                    float(row["reward"]), float(row["success"]), _load_norm(row["total"]), split
                )
            )

    def _compute_correlation(self, name: str) -> float | None:
        failed, won = RunningNorm(), RunningNorm()
        for past in self._past:
            if name in past.split:
                failed.merge_stats(past.split[name][0])
                won.merge_stats(past.split[name][1])
        return compute_point_biserial(failed, won)

    def _update_alarm(self) -> bool:
        before = self.alarmed
        self.alarmed = False
        if len(self._past) == self._past.maxlen:
            total = RunningNorm()
            for past in self._past:
                total.merge_stats(past.total)
            reward, success = (
                compute_rise([p.reward for p in self._past]),
                compute_rise([p.success for p in self._past]),
            )
            self.alarmed = reward > self.margin * total.std and success < -self.margin
            if self.alarmed and not before:
                logger.warning(
                    "the reward rose by %.3g while success fell by %.3g over %d iterations: it may be hacked; "
                    "reward/correlation/ shows which part goes against success",
                    reward,
                    -success,
                    len(self._past),
                )
        return self.alarmed


def compute_point_biserial(failed: RunningNorm, won: RunningNorm) -> float | None:
    """Compute the correlation of a number with success: (mean won - mean failed) / s sqrt(n_w n_f / n^2), s over all,
    biased.

    Return None where it is undefined: nothing won, nothing failed, or nothing differs.
    """
    if not failed.count or not won.count:
        return None
    both = RunningNorm()
    both.merge_stats(failed)
    both.merge_stats(won)
    deviation = math.sqrt(both.squares / both.count)
    if deviation < 1e-12 * max(1.0, abs(both.mean)):
        return None
    share = math.sqrt(failed.count * won.count) / both.count
    return max(-1.0, min(1.0, (won.mean - failed.mean) / deviation * share))


def compute_rise(values: Sequence[float]) -> float:
    """Compute the rise of the least-squares line from the first to the last value; 0 for fewer than two."""
    last = len(values) - 1
    if last < 1:
        return 0.0
    centre = last / 2
    slope = math.fsum((x - centre) * y for x, y in enumerate(values)) / math.fsum(
        (x - centre) ** 2 for x in range(last + 1)
    )
    return slope * last


def _summarize_iteration(rollouts: Sequence[Rollout], parts: Sequence[str]) -> _IterationStats:
    totals = [rollout.reward for rollout in rollouts]
    past = _IterationStats(
        fmean(totals), fmean(bool(rollout.success) for rollout in rollouts), RunningNorm(totals)
    )
    for name in ("total", *parts):
        sides: tuple[list[float], list[float]] = ([], [])
        for rollout in rollouts:
            if rollout.success is None:
                continue  # nothing to correlate with
            sides[rollout.success].append(
                rollout.reward if name == "total" else rollout.trajectory.rewards[name]
            )
        past.split[name] = (RunningNorm(sides[False]), RunningNorm(sides[True]))
    return past


def _load_norm(state: Mapping[str, Any]) -> RunningNorm:
    norm = RunningNorm()
    norm.load_state_dict(state)
    return norm
