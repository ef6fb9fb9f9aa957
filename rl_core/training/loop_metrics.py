"""Metrics of the training loop on their way out: to the tracker, into the history, to a dashboard's file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import CheckpointError
from rl_core.tracking import Tracker
from rl_core.training.history_log import HistoryLog
from rl_core.training.loop_state import LoopMemory

__all__ = ["LoopMetrics"]

logger = logging.getLogger(__name__)


@dataclass
class LoopMetrics:
    """Log of a loop's metrics, and the seconds that logging and checkpoints take, for the next iteration's report."""

    tracker: Tracker
    memory: LoopMemory
    clock: Callable[[], float]
    is_rank_zero: bool  # True = this process is the one that logs and writes
    export_to: Path | str | None = None
    export_seconds: float = 5.0  # between two exports of the history while training
    export_window: int = 10  # of the export's means and slopes
    _exported: float | None = None  # when, by `clock`
    _log: HistoryLog | None = None
    _overheads: dict[str, float] = field(default_factory=dict)  # seconds, not yet reported

    def log(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Log finite metrics at optimizer step `step`; count the others. Returns: the finite ones."""
        state = self.memory.state
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            state.nonfinite_metrics += len(values) - len(finite)
            logger.warning("metrics that are not finite: %s", ", ".join(sorted(values.keys() - finite.keys())))
        if state.nonfinite_metrics:
            finite["train/nonfinite_metrics"] = float(state.nonfinite_metrics)
        started = self.clock()
        if self.is_rank_zero:
            self.tracker.log_metrics(finite, step)
        self.memory.history.observe(finite, step)
        self.export(self.export_seconds)
        self.spent("tracking", started)
        return finite

    def spent(self, name: str, started: float) -> float:
        """Add to the overheads, which the next iteration reports (this one has reported already); returns the time."""
        now = self.clock()
        self._overheads[name] = self._overheads.get(name, 0.0) + now - started
        return now

    def take_overheads(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self._overheads = self._overheads, {}
        return taken

    def export(self, after: float = 0.0, *, is_last: bool = False) -> None:
        """Export the history for dashboards, at most once in `after` seconds; `is_last`: training has ended."""
        if self.export_to is None or not self.is_rank_zero:
            return
        if self._exported is not None and self.clock() - self._exported < after:
            return
        try:
            if self._log is None:
                self._log = HistoryLog(self.export_to, self.export_window)
            (self._log.finish if is_last else self._log.append)(self.memory.history, self.memory.state.iteration)
        except (CheckpointError, OSError) as error:  # a dashboard's file is an extra; what is kept still raises
            logger.warning("the history of metrics is not shown: %s", error)
        self._exported = self.clock()
