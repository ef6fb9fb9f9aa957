"""Estimates of the time that a stage and the whole run still take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["TimeLeft", "earlier_seconds"]

_LEAST_SHARE = 0.02  # of a stage, from which on its speed is told
_LEAST_SECONDS = 2.0


class TimeLeft:
    """Speed of the stage that runs, and what the later stages took the last time.

    A resumed stage begins in the middle: its speed is that since it went on.
    """

    def __init__(
        self,
        stages: Sequence[str] = (),
        earlier: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stages: of the run, in order. earlier: seconds that they took in an earlier run, where that is known."""
        self.stages, self._earlier, self._clock = list(stages), dict(earlier or {}), clock
        self._begun: dict[str, tuple[float, int, int]] = {}  # when counting to a total began, from where, and the total

    def observe(self, stage: str, done: int, total: int) -> None:
        """Take in the progress of a stage. Another total is another count (pairs, then steps): its speed is its own."""
        if stage not in self._begun or self._begun[stage][2] != total:
            self._begun[stage] = (self._clock(), done, total)

    def of_stage(self, stage: str, done: int, total: int) -> float | None:
        """Seconds; None where it cannot be told yet."""
        if stage not in self._begun or total <= 0 or done >= total:
            return 0.0 if total > 0 and done >= total else None
        began, first, _ = self._begun[stage]
        passed, share = self._clock() - began, (done - first) / total
        if passed < _LEAST_SECONDS or share < _LEAST_SHARE:
            return None
        return passed * (total - done) / (done - first)

    def of_run(self, stage: str, done: int, total: int) -> float | None:
        """Seconds; None where a later stage never ran before."""
        own = self.of_stage(stage, done, total)
        if own is None or stage not in self.stages:
            return None
        later = self.stages[self.stages.index(stage) + 1 :]
        if any(name not in self._earlier for name in later):
            return None
        return own + sum(self._earlier[name] for name in later)

    def place(self, stage: str) -> str:
        """`3/7`; "" for a stage that the settings do not name."""
        return f"{self.stages.index(stage) + 1}/{len(self.stages)}" if stage in self.stages else ""


def earlier_seconds(stages_folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Seconds that the newest finished folder of each stage took; stages without one are left out."""
    found = {}
    for name in names:
        summaries = sorted((stages_folder / name).glob("*/summary.json"), key=_modified)
        try:
            found[name] = float(json.loads(summaries[-1].read_text())["seconds"])
        except (IndexError, OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
