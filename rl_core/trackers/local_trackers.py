"""Trackers that print lines to the terminal, or append a row per call to a JSON Lines or CSV file."""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rl_core.errors import DataError
from rl_core.storage.append_log import AppendLog, extract_number
from rl_core.storage.atomic_files import (
    fsync_path,
    make_folder,
    write_text_atomic,
)
from rl_core.tracking import SilentTracker

SHOWN_METRICS = (
    "reward/mean",
    "train/success_rate",
    "train/loss",
    "train/accuracy",
    "policy/entropy",
    "policy/ref_kl",
    "train/action_tokens",
    "perf/step_seconds",
)


class TerminalTracker(SilentTracker):
    """Tracker that prints the main metrics of every iteration, and all metrics of every evaluation."""

    def __init__(self, every: int = 1, stream: TextIO | None = None) -> None:
        """Configure the tracker.

        Args:
            every: iterations between two lines; evaluations and the last iteration are always printed.
        """
        self.every, self._stream = max(1, every), stream
        self._latest: dict[str, float] = {}
        self._started = time.perf_counter()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Print an evaluation; keep an iteration's metrics until `progress` is called."""
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._print_line(f"  step {step}: " + _format_metrics(evaluated))
        else:
            self._latest = dict(metrics)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Print the iteration's line."""
        if done % self.every and done != total:
            return
        shown = {name: self._latest[name] for name in SHOWN_METRICS if name in self._latest}
        self._print_line(f"{done}/{total}  " + (_format_metrics(shown) or message))

    def _print_line(self, text: str) -> None:
        print(text, file=self._stream or sys.stdout, flush=True)


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class JsonlTracker(SilentTracker):
    """Tracker that appends lines {"step": 3, "time": <ms>, "metrics": {"train/loss": 0.5}}.

    `rl_core.read_metrics` reads them.
    """

    def __init__(self, path: str | Path, *, cut: bool = False) -> None:
        """Configure the tracker.

        Args:
            cut: before the first write, drop lines of later steps, which a resumed run measures again.
        """
        self.path = Path(path)
        self._should_truncate = cut
        self._is_truncated = not cut

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line. Non-finite values are left out, because JSON has none."""
        log = AppendLog(self.path, consequence="the metrics of one step are lost")
        if not self._is_truncated:
            log.truncate_tail(lambda row: extract_number(row, "step") > step)
            self._is_truncated = True
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        row = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": finite}
        make_folder(self.path.parent)
        log.append_record(row)

    def sync(self) -> None:
        """Flush the lines to the disk."""
        if self.path.is_file():
            fsync_path(self.path)
            fsync_path(self.path.parent)

    def begin(self, name: str, params: Mapping[str, object]) -> None:
        """Truncate again before the next write: a resumed run may start from an earlier step."""
        self._is_truncated = not self._should_truncate


class CsvTracker(SilentTracker):
    """Tracker that writes a row per call: step, seconds since the epoch, a column per metric (blank if not measured).

    A metric that appears later adds a column: the file is then rewritten atomically.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one row. Raises: DataError if the file holds something else."""
        if not self._columns:
            self._columns = self._read_header()
        new = [name for name in metrics if name not in self._columns]
        if new or not self._columns:
            self._columns = [*(self._columns or ["step", "time"]), *new]
            self._write_all_rows()
        row = {
            "step": step,
            "time": f"{time.time():.3f}",
            **{name: repr(float(v)) for name, v in metrics.items()},
        }
        line = io.StringIO()
        csv.DictWriter(line, self._columns, restval="").writerow(row)
        AppendLog(self.path).append_lines(line.getvalue().encode())

    def sync(self) -> None:
        """Flush the rows to the disk."""
        if self.path.is_file():
            fsync_path(self.path)
            fsync_path(self.path.parent)

    def _read_header(self) -> list[str]:
        if not self.path.is_file():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        if header and header[:2] != ["step", "time"]:
            raise DataError(
                f"{self.path}: not a metrics file (its columns are {', '.join(header[:5])}); use another file"
            )
        return header

    def _write_all_rows(self) -> None:
        """Rewrite the rows with more columns."""
        rows = []
        if self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        make_folder(self.path.parent)
        write_text_atomic(self.path, text.getvalue())
