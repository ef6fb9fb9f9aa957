"""Export of the metric history for dashboards: appended to while training, written whole at the end.

    metrics_history.jsonl   a line an export: {"iteration": 7, "time": 1760000000.0, "window": 10, "metrics": {name:
                            [[step, value], ...]} (what came since the line before), "summary": {name: as that of
                            MetricHistory}}
    metrics_history.json    at the end of training: as `MetricHistory.to_json`

Lines have checksums (`rl_core.storage.checked_lines`) and outlive a kill; they are not synced, as the journal has the
same values. A resumed run cuts off lines of iterations behind its checkpoint, and a torn last line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.metrics import MetricHistory
from rl_core.storage.checked_lines import read_checked, report_damage, sealed
from rl_core.storage.faults import fault
from rl_core.storage.single_files import append_bytes, truncate_file, write_text_atomic

__all__ = ["HistoryLog", "lines_beside"]


def lines_beside(path: Path | str) -> Path:
    """File of the lines that belong to an export."""
    return Path(path).with_suffix(".jsonl")


class HistoryLog:
    """Writer of one training's export."""

    def __init__(self, path: Path | str, window: int) -> None:
        """path: of the whole export; its lines lie beside. window: observations behind means and slopes."""
        self.path, self.window = Path(path), window
        self.lines = lines_beside(path)
        self._told: dict[str, float] | None = None  # newest step of each metric in the lines; None = not looked yet

    def append(self, history: MetricHistory, iteration: int) -> None:
        """Append what came since the last line. Raises: CheckpointError where the disk refuses."""
        told = self._told if self._told is not None else self._open(iteration)
        fresh = {name: _after(history, name, told.get(name)) for name in history.names}
        fresh = {name: points for name, points in fresh.items() if points}
        if not fresh:
            return
        row = {
            "iteration": iteration, "time": round(time.time(), 3), "window": self.window,
            "metrics": fresh, "summary": history.summary(min(self.window, history.limit)),
        }  # fmt: skip
        append_bytes(self.lines, sealed(row))
        fault("history.appended")
        told |= {name: points[-1][0] for name, points in fresh.items()}

    def finish(self, history: MetricHistory, iteration: int) -> None:
        """Append the rest, and write the whole export. Raises: as `append`."""
        self.append(history, iteration)
        write_text_atomic(self.path, history.to_json(window=self.window))

    def _open(self, iteration: int) -> dict[str, float]:
        """Cut off what a killed process wrote behind the checkpoint; returns what the lines that stay tell."""
        self._told, place = {}, 0
        for line in read_checked(self.lines):
            if line.record is None:
                report_damage(self.lines, line, "the values of one export are lost here; the journal has them")
            elif line.record.get("iteration", 0) >= iteration:
                break
            else:
                self._told |= {name: points[-1][0] for name, points in _metrics(line.record).items() if points}
            place = line.end
        if self.lines.is_file():
            truncate_file(self.lines, place)
        return self._told


def _after(history: MetricHistory, name: str, step: float | None) -> list[list[float]]:
    return [list(point) for point in history.points(name) if step is None or point[0] > step]


def _metrics(record: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    found = record.get("metrics")
    return found if isinstance(found, dict) else {}
