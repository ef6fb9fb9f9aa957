"""Training curves of selected metrics from a run's metrics.jsonl, in constant memory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import DataError
from rl_core.storage.checked_lines import intact

__all__ = ["Curve", "TrainingCurves", "read_training"]

MAX_POINTS = 2000  # points per curve; beyond, neighbours are averaged


@dataclass
class Curve:
    """One metric over steps, downsampled by averaging neighbours when it exceeds MAX_POINTS."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    stride: int = 1  # rows averaged per point
    _pending: list[tuple[float, float]] = field(default_factory=list)

    def add(self, step: float, value: float) -> None:
        """Append one row."""
        self._pending.append((step, value))
        if len(self._pending) < self.stride:
            return
        self.flush()
        if len(self.values) >= MAX_POINTS:
            self.steps = self.steps[1::2]
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=False)]
            self.stride *= 2

    def flush(self) -> None:
        """Convert pending rows to a point."""
        if self._pending:
            self.steps.append(self._pending[-1][0])
            self.values.append(sum(value for _, value in self._pending) / len(self._pending))
            self._pending.clear()


@dataclass
class TrainingCurves:
    """Curves of one run, with the starts and rollbacks of its curriculum stages."""

    curves: dict[str, Curve]
    stages: list[tuple[float, int]]  # (first step, stage number)
    skipped: int  # truncated or invalid rows
    rollbacks: list[float] = field(default_factory=list)  # steps of curriculum rollbacks

    def named(self, *names: str) -> Curve | None:
        """Curve of the first of `names` that the run logged."""
        return next((self.curves[name] for name in names if name in self.curves), None)


def read_training(path: Path | str, wanted: frozenset[str], prefixes: tuple[str, ...] = ()) -> TrainingCurves:
    """Curves of the metrics `names`, and of those that start with one of `prefixes`, from a metrics.jsonl.

    A row is {"step": 3, "metrics": {"train/loss": 0.5}}. Truncated rows of a live or killed run are skipped and
    counted; steps logged again by a resumed run are dropped.
    Raises: DataError if the file cannot be read.
    """
    path = Path(path)
    curves: dict[str, Curve] = {}
    latest: dict[str, float] = {}
    stages: list[tuple[float, int]] = []
    rollbacks: list[float] = []
    rolled_back = 0.0  # rollbacks so far
    skipped = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                row = _row(line)
                if row is None:
                    skipped += 1
                    continue
                step, metrics = row
                for name, value in metrics.items():
                    if not (name in wanted or name.startswith(prefixes)) or step <= latest.get(name, -math.inf):
                        continue
                    latest[name] = step
                    if name == "curriculum/rollbacks" and value > rolled_back:
                        rolled_back = value
                        rollbacks.append(step)
                    if name == "curriculum/stage" and (not stages or stages[-1][1] != int(value)):
                        stages.append((step, int(value)))
                    curves.setdefault(name, Curve()).add(step, value)
    except OSError as error:
        raise DataError(f"{path}: training metrics cannot be read ({error.strerror})") from error
    for curve in curves.values():
        curve.flush()
    return TrainingCurves(curves, stages, skipped, rollbacks)


def _row(line: bytes) -> tuple[float, dict[str, float]] | None:
    if not intact(line):
        return None
    try:
        row = json.loads(line)
        step, metrics = row["step"], row["metrics"]
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            return None
        # NaN of a diverging run leaves a gap.
        kept = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return float(step), kept
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
