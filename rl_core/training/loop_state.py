"""State of the training loop: its progress, its memory between two calls, its outcome, and its metrics.

Metrics go to the tracker, into the history, and to a file for dashboards. That file is appended to during training and
written as a whole at the end:

    metrics_history.jsonl   one line per export: {"iteration": 7, "time": 1760000000.0, "window": 10, "metrics": {name:
                            [[step, value], ...]} (points since the previous line), "summary": {name: as in
                            MetricHistory}}
    metrics_history.json    at the end of training: see `MetricHistory.to_json`

Lines have checksums (`rl_core.storage.append_log`) and survive a kill; they are not synced, as the journal has the same
values. A resumed run cuts off lines of iterations after its checkpoint, and a torn last line.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rl_core.errors import CheckpointError
from rl_core.metric_history import MetricHistory
from rl_core.storage.append_log import AppendLog, extract_number
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.faults import inject_fault
from rl_core.tracking import Tracker

logger = logging.getLogger(__name__)

HISTORY_LENGTH = 500  # stored newest values of each metric
_STOP_REASON_TEXTS = {
    "iterations": "as many as were set",
    "patience": "then patience ran out: evaluations got no better",
    "callback": "stopped by a callback",
}


@dataclass(frozen=True)
class LoopOutcome:
    """Outcome of the loop. The trainer's model holds the weights that `metrics` were measured on."""

    iterations: int  # total, including those before a resume
    steps: int  # optimizer steps, total
    stop_reason: str  # "iterations", "patience", or that of the trainer's `finished` or a callback
    best_metric: float | None  # best value of the chosen metric; None = no metric was chosen
    metrics: dict[str, float]  # evaluation of the weights left in the model
    best_iteration: int | None = None  # the iteration whose weights were restored or kept
    resumed_iteration: int = 0  # 0 = from the start
    seconds: float = 0.0  # of this process
    # The newest values of every metric.
    history: MetricHistory = field(
        default_factory=lambda: MetricHistory(HISTORY_LENGTH), repr=False
    )
    unmoved_iterations: int = 0  # in which no step moved a weight

    @property
    def ended(self) -> str:
        """Length and stop reason for the user: `142 iterations (success 98% over ten)`."""
        text = f"{self.iterations} iterations ({_STOP_REASON_TEXTS.get(self.stop_reason, self.stop_reason)})"
        if self.unmoved_iterations:
            text += f", of which {self.unmoved_iterations} changed no weight"
        return text


@dataclass
class LoopProgress:
    """Progress of the loop, part of a checkpoint."""

    iteration: int = 0
    evaluated_iteration: int = 0  # the last one that was evaluated
    metrics: dict[str, float] = field(default_factory=dict)  # last evaluation
    best_value: float | None = None
    best_iteration: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    reference: float | None = None  # value at the last improvement large enough for patience
    bad_evaluations: int = 0  # evaluations since then
    # Evaluations since then, or since the learning rate was last reduced (`plateau_patience`).
    plateau_evaluations: int = 0
    nonfinite_metrics: int = 0
    unmoved_iterations: int = 0  # whose steps were all skipped, refused, or without a gradient
    # Of the trainable weights before the first iteration; None = unknown (a checkpoint of an earlier release).
    initial_digest: str | None = None


@dataclass
class LoopMemory:
    """State of the loop between two calls of `run_loop` on one trainer in one process; the second call continues from
    it.
    """

    state: LoopProgress = field(default_factory=LoopProgress)
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY_LENGTH))
    best_weights: dict[str, torch.Tensor] | None = None
    is_consistent: bool = True  # False = the last iteration was aborted: resume from a checkpoint


def build_lines_path(path: Path | str) -> Path:
    """Return the path of the lines that belong to an export."""
    return Path(path).with_suffix(".jsonl")


class MetricHistoryExport:
    """Writer of one training's export."""

    def __init__(self, path: Path | str, window: int) -> None:
        """Store the path of the whole export, next to which its lines lie, and the window of means and slopes in
        observations.
        """
        self.path, self.window = Path(path), window
        self.lines_path = build_lines_path(path)
        self._log = AppendLog(
            self.lines_path,
            consequence="the values of one export are lost here; the journal has them",
        )
        # Newest step of each metric in the lines; None = the lines were not read yet.
        self._last_exported_steps: dict[str, float] | None = None

    def append_history(self, history: MetricHistory, iteration: int) -> None:
        """Append the points since the last line. Raises: CheckpointError if writing fails."""
        last_steps = self._last_exported_steps
        if last_steps is None:
            last_steps = self._last_exported_steps = self._truncate_to_checkpoint(iteration)
        new_points: dict[str, list[list[float]]] = {}
        for name in history.names:
            last_step = last_steps.get(name, -math.inf)
            points = [list(point) for point in history.list_points(name) if point[0] > last_step]
            if points:
                new_points[name] = points
        if not new_points:
            return
        row = {
            "iteration": iteration,
            "time": round(time.time(), 3),
            "window": self.window,
            "metrics": new_points,
            "summary": history.summarize_window(min(self.window, history.limit)),
        }
        self._log.append_record(row)
        inject_fault("history.appended")
        last_steps |= {name: points[-1][0] for name, points in new_points.items()}

    def finish_export(self, history: MetricHistory, iteration: int) -> None:
        """Append the remaining points, and write the whole export. Raises: as `append_history`."""
        self.append_history(history, iteration)
        write_text_atomic(self.path, history.to_json(window=self.window))

    def _truncate_to_checkpoint(self, iteration: int) -> dict[str, float]:
        """Cut off lines written after the checkpoint; return the newest step of each metric in the other lines."""
        last_steps: dict[str, float] = {}
        for line in self._log.recover_lines(
            lambda row: extract_number(row, "iteration") >= iteration
        ):
            metrics = (line.record or {}).get("metrics")
            if isinstance(metrics, dict):
                last_steps |= {name: points[-1][0] for name, points in metrics.items() if points}
        return last_steps


@dataclass
class LoopMetrics:
    """Log of a loop's metrics; measures the seconds of logging and checkpoints, which the next iteration reports."""

    tracker: Tracker
    memory: LoopMemory
    clock: Callable[[], float]
    is_rank_zero: bool  # True = this process logs and writes
    export_to: Path | str | None = None
    export_seconds: float = 5.0  # between two exports of the history during training
    export_window: int = 10  # observations of the export's means and slopes
    _exported_at: float | None = None  # by `clock`
    _history_export: MetricHistoryExport | None = None
    _overheads: dict[str, float] = field(default_factory=dict)  # seconds, not yet reported

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Log finite metrics at optimizer step `step` and return them; count the others."""
        state = self.memory.state
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            state.nonfinite_metrics += len(values) - len(finite)
            nonfinite_names = sorted(values.keys() - finite.keys())
            logger.warning("metrics that are not finite: %s", ", ".join(nonfinite_names))
        if state.unmoved_iterations:
            finite["train/unmoved_iterations"] = float(state.unmoved_iterations)
        if state.nonfinite_metrics:
            finite["train/nonfinite_metrics"] = float(state.nonfinite_metrics)
        start_time = self.clock()
        if self.is_rank_zero:
            self.tracker.log_metrics(finite, step)
        self.memory.history.record_values(finite, step)
        self.export_history(self.export_seconds)
        self.add_overhead("tracking", start_time)
        return finite

    def add_overhead(self, name: str, started: float) -> float:
        """Add the seconds since `started` to the overheads of the next iteration; return the current time."""
        now = self.clock()
        self._overheads[name] = self._overheads.get(name, 0.0) + now - started
        return now

    def take_overheads(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        overheads, self._overheads = self._overheads, {}
        return overheads

    def export_history(self, after: float = 0.0, *, is_last: bool = False) -> None:
        """Export the history for dashboards, at most once in `after` seconds; `is_last`: training has ended."""
        if self.export_to is None or not self.is_rank_zero:
            return
        if self._exported_at is not None and self.clock() - self._exported_at < after:
            return
        try:
            if self._history_export is None:
                self._history_export = MetricHistoryExport(self.export_to, self.export_window)
            export = self._history_export
            write = export.finish_export if is_last else export.append_history
            write(self.memory.history, self.memory.state.iteration)
        except (
            CheckpointError,
            OSError,
        ) as error:  # training does not depend on a dashboard's file
            logger.warning("the history of metrics is not shown: %s", error)
        self._exported_at = self.clock()
