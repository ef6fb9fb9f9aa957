"""State of the training loop: its progress, what it keeps between two calls, its outcome.

Export of the metric history for dashboards: appended to while training, written whole at the end.

    metrics_history.jsonl   a line an export: {"iteration": 7, "time": 1760000000.0, "window": 10, "metrics": {name:
                            [[step, value], ...]} (what came since the line before), "summary": {name: as that of
                            MetricHistory}}
    metrics_history.json    at the end of training: as `MetricHistory.to_json`

Lines have checksums (`rl_core.storage.line_logs`) and outlive a kill; they are not synced, as the journal has the
same values. A resumed run cuts off lines of iterations behind its checkpoint, and a torn last line.

Metrics of the training loop on their way out: to the tracker, into the history, to a dashboard's file.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_core.errors import CheckpointError
from rl_core.metric_history import MetricHistory
from rl_core.storage.atomic_files import append_bytes, truncate_file, write_text_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.line_logs import encode_checked_line, read_checked_lines, report_damaged_line
from rl_core.tracking import Tracker

HISTORY_LENGTH = 500  # newest values of each metric that are kept
_STOP_REASON_TEXTS = {
    "iterations": "as many as were set",
    "patience": "then patience ran out: evaluations got no better",
    "callback": "stopped by a callback",
}


@dataclass(frozen=True)
class LoopOutcome:
    """Outcome of a run of the loop; the trainer's model holds the weights that `metrics` were measured on."""

    iterations: int  # done in all, those before a resume included
    steps: int  # optimizer steps in all
    stop_reason: (
        str  # "iterations", "patience", or what the trainer's `finished` or a callback said
    )
    best_metric: float | None  # best value of the chosen metric; None = no metric was chosen
    metrics: dict[str, float]  # last evaluation of the model as it is left
    best_iteration: int | None = None  # the iteration whose weights were restored or kept
    resumed_iteration: int = 0  # 0 = from the start
    seconds: float = 0.0  # of this process
    # the newest values of every metric
    history: MetricHistory = field(
        default_factory=lambda: MetricHistory(HISTORY_LENGTH), repr=False
    )

    @property
    def ended(self) -> str:
        """Length and reason for people: `142 iterations (success 98% over ten)`."""
        return f"{self.iterations} iterations ({_STOP_REASON_TEXTS.get(self.stop_reason, self.stop_reason)})"


@dataclass
class LoopProgress:
    """The loop's own part of a checkpoint."""

    iteration: int = 0
    evaluated_iteration: int = 0  # the last one that was evaluated
    metrics: dict[str, float] = field(default_factory=dict)  # last evaluation
    best_value: float | None = None
    best_iteration: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    reference: float | None = (
        None  # value at the last improvement that was large enough for patience
    )
    bad_evaluations: int = 0  # evaluations since then
    nonfinite_metrics: int = 0


@dataclass
class LoopMemory:
    """The loop's state between two calls of `run_loop` on one trainer in one process: the second goes on from it."""

    state: LoopProgress = field(default_factory=LoopProgress)
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY_LENGTH))
    best_weights: dict[str, torch.Tensor] | None = None
    is_consistent: bool = True  # False = the last iteration was left in its middle, so a checkpoint is the better start


def build_lines_path(path: Path | str) -> Path:
    """File of the lines that belong to an export."""
    return Path(path).with_suffix(".jsonl")


class MetricHistoryExport:
    """Writer of one training's export."""

    def __init__(self, path: Path | str, window: int) -> None:
        """path: of the whole export; its lines lie beside. window: observations behind means and slopes."""
        self.path, self.window = Path(path), window
        self.lines_path = build_lines_path(path)
        self._last_exported_steps: dict[str, float] | None = (
            None  # newest step of each metric in the lines; None = not looked yet
        )

    def append_history(self, history: MetricHistory, iteration: int) -> None:
        """Append what came since the last line. Raises: CheckpointError where the disk refuses."""
        told = (
            self._last_exported_steps
            if self._last_exported_steps is not None
            else self._truncate_to_checkpoint(iteration)
        )
        fresh = {
            name: _select_points_after(history, name, told.get(name)) for name in history.names
        }
        fresh = {name: points for name, points in fresh.items() if points}
        if not fresh:
            return
        row = {
            "iteration": iteration,
            "time": round(time.time(), 3),
            "window": self.window,
            "metrics": fresh,
            "summary": history.summarize_window(min(self.window, history.limit)),
        }
        append_bytes(self.lines_path, encode_checked_line(row))
        inject_fault("history.appended")
        told |= {name: points[-1][0] for name, points in fresh.items()}

    def finish_export(self, history: MetricHistory, iteration: int) -> None:
        """Append the rest, and write the whole export. Raises: as `append`."""
        self.append_history(history, iteration)
        write_text_atomic(self.path, history.to_json(window=self.window))

    def _truncate_to_checkpoint(self, iteration: int) -> dict[str, float]:
        """Cut off what a killed process wrote behind the checkpoint; returns what the lines that stay tell."""
        self._last_exported_steps, place = {}, 0
        for line in read_checked_lines(self.lines_path):
            if line.record is None:
                report_damaged_line(
                    self.lines_path,
                    line,
                    "the values of one export are lost here; the journal has them",
                )
            elif line.record.get("iteration", 0) >= iteration:
                break
            else:
                self._last_exported_steps |= {
                    name: points[-1][0]
                    for name, points in _read_record_metrics(line.record).items()
                    if points
                }
            place = line.end
        if self.lines_path.is_file():
            truncate_file(self.lines_path, place)
        return self._last_exported_steps


def _select_points_after(
    history: MetricHistory, name: str, step: float | None
) -> list[list[float]]:
    return [list(point) for point in history.list_points(name) if step is None or point[0] > step]


def _read_record_metrics(record: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    found = record.get("metrics")
    return found if isinstance(found, dict) else {}


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
    _exported_at: float | None = None  # when, by `clock`
    _history_export: MetricHistoryExport | None = None
    _overheads: dict[str, float] = field(default_factory=dict)  # seconds, not yet reported

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Log finite metrics at optimizer step `step`; count the others. Returns: the finite ones."""
        state = self.memory.state
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            state.nonfinite_metrics += len(values) - len(finite)
            logger.warning(
                "metrics that are not finite: %s", ", ".join(sorted(values.keys() - finite.keys()))
            )
        if state.nonfinite_metrics:
            finite["train/nonfinite_metrics"] = float(state.nonfinite_metrics)
        started = self.clock()
        if self.is_rank_zero:
            self.tracker.log_metrics(finite, step)
        self.memory.history.record_values(finite, step)
        self.export_history(self.export_seconds)
        self.add_overhead("tracking", started)
        return finite

    def add_overhead(self, name: str, started: float) -> float:
        """Add to the overheads, which the next iteration reports (this one has reported already); returns the time."""
        now = self.clock()
        self._overheads[name] = self._overheads.get(name, 0.0) + now - started
        return now

    def take_overheads(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self._overheads = self._overheads, {}
        return taken

    def export_history(self, after: float = 0.0, *, is_last: bool = False) -> None:
        """Export the history for dashboards, at most once in `after` seconds; `is_last`: training has ended."""
        if self.export_to is None or not self.is_rank_zero:
            return
        if self._exported_at is not None and self.clock() - self._exported_at < after:
            return
        try:
            if self._history_export is None:
                self._history_export = MetricHistoryExport(self.export_to, self.export_window)
            (
                self._history_export.finish_export
                if is_last
                else self._history_export.append_history
            )(self.memory.history, self.memory.state.iteration)
        except (
            CheckpointError,
            OSError,
        ) as error:  # a dashboard's file is an extra; what is kept still raises
            logger.warning("the history of metrics is not shown: %s", error)
        self._exported_at = self.clock()
