"""Terminal progress of a pipeline: one bar per stage, or plain lines without a terminal; estimates of the time left."""

from __future__ import annotations

import json
import logging
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from flows.runtime.terminal import escape_control_characters

LOGGERS = ("rl_core", "tasks", "flows", "posttrain")
PLAIN_LINE_SECONDS = 10.0  # between plain lines of a stage
NARROW_COLUMNS = 100  # narrower terminals get short bars
_MIN_COLUMNS = 36  # even if the terminal is narrower
_MIN_SHARE = 0.02  # of a stage, before its speed is estimated
_MIN_SECONDS = 2.0


def wrap_to_terminal(text: str, console: Console | None = None) -> str:
    """Wrap long lines between words, indented two columns deeper; return the text unchanged in a file or a pipe.

    Args:
        console: the one that prints the text; None = standard output.
    """
    terminal = console or Console()
    if not terminal.is_terminal:
        return text
    width = max(_MIN_COLUMNS, terminal.width)
    return "\n".join(
        line if len(line) <= width else _wrap_line(line, width) for line in text.split("\n")
    )


def _wrap_line(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


class RemainingTimeEstimator:
    """Estimator of the time left, from the speed of the running stage and earlier durations of later stages.

    The speed of a resumed stage is that since its resumption.
    """

    def __init__(
        self,
        stages: Sequence[str] = (),
        earlier: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Configure the estimator.

        Args:
            stages: of the run, in order.
            earlier: seconds that they took in an earlier run, if known.
        """
        self.stages, self._earlier, self._clock = list(stages), dict(earlier or {}), clock
        # By stage: start time of counting to a total, first count, total.
        self._count_starts: dict[str, tuple[float, int, int]] = {}

    def observe_progress(self, stage: str, done: int, total: int) -> None:
        """Record the progress of a stage. A new total starts a new count with its own speed (pairs, then steps)."""
        if stage not in self._count_starts or self._count_starts[stage][2] != total:
            self._count_starts[stage] = (self._clock(), done, total)

    def estimate_stage_seconds(self, stage: str, done: int, total: int) -> float | None:
        """Estimate the seconds left of a stage; None if that is unknown."""
        if stage not in self._count_starts or total <= 0 or done >= total:
            return 0.0 if total > 0 and done >= total else None
        start, first, _ = self._count_starts[stage]
        elapsed, share = self._clock() - start, (done - first) / total
        if elapsed < _MIN_SECONDS or share < _MIN_SHARE:
            return None
        return elapsed * (total - done) / (done - first)

    def estimate_run_seconds(self, stage: str, done: int, total: int) -> float | None:
        """Estimate the seconds left of the run; None if a later stage never ran before."""
        stage_seconds = self.estimate_stage_seconds(stage, done, total)
        if stage_seconds is None or stage not in self.stages:
            return None
        later = self.stages[self.stages.index(stage) + 1 :]
        if any(name not in self._earlier for name in later):
            return None
        return stage_seconds + sum(self._earlier[name] for name in later)

    def format_stage_position(self, stage: str) -> str:
        """Return a position such as `3/7`; "" for a stage that the settings do not name."""
        return f"{self.stages.index(stage) + 1}/{len(self.stages)}" if stage in self.stages else ""


def read_earlier_seconds(stages_folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Read the seconds that the newest finished folder of each stage took, without stages that have none."""
    seconds = {}
    for name in names:
        summaries = sorted(
            (stages_folder / name).glob("*/summary.json"), key=_read_modification_time
        )
        try:
            seconds[name] = float(json.loads(summaries[-1].read_text())["seconds"])
        except (IndexError, OSError, ValueError, KeyError, TypeError):
            continue
    return seconds


def _read_modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class _WarningHandler(logging.Handler):
    """Log handler that prints warnings of this project above the bars, in quiet runs too.

    It also prints records with `extra={"for_people": True}`, without their level.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        if record.levelno >= logging.WARNING:
            text = escape_control_characters(f"{record.levelname.lower()}: {record.getMessage()}")
            self.console.print(
                wrap_to_terminal(text, self.console), highlight=False, markup=False, soft_wrap=True
            )
        elif getattr(record, "for_people", False):
            self.console.print(
                escape_control_characters(record.getMessage()),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


class _CountColumn(MofNCompleteColumn):
    """Column with done and total; empty for a task without a total."""

    def render(self, task: Task) -> Text:
        """Render `3/7`, or nothing."""
        return Text() if task.total is None else super().render(task)


class ProgressDisplay:
    """Live progress of the stages; a context manager and a `StageProgressCallback`."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        time_left: RemainingTimeEstimator | None = None,
    ) -> None:
        """Configure the display.

        Args:
            quiet: no progress; warnings go to standard error, because a program may read standard output (`--json`).
            time_left: of the run, with its stages; None = stages are neither numbered nor timed.
        """
        self.console = console or Console(stderr=quiet)
        self.is_quiet = quiet
        self.is_live = self.console.is_terminal and not quiet
        self._time_left = time_left or RemainingTimeEstimator()
        self._tasks: dict[str, TaskID] = {}
        self._last_line_at: dict[str, float] = {}
        self._warnings = _WarningHandler(self.console)
        self._progress = Progress(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, min_width=18)),
            BarColumn(bar_width=10 if self.console.width < NARROW_COLUMNS else 24),
            _CountColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            # Each stage keeps one line at any width; its end is cut.
            TextColumn(
                "{task.fields[message]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )

    def __enter__(self) -> ProgressDisplay:
        if self.is_live:
            self._progress.start()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._warnings)
            # Prefect's page shows INFO; the terminal shows only warnings.
            logging.getLogger(name).setLevel(logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_live:
            self._progress.stop()
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._warnings)

    def __call__(self, stage: str, done: int, total: int, message: str = "") -> None:
        """Update the progress of a stage."""
        if self.is_quiet:
            return
        self._time_left.observe_progress(stage, done, total)
        if not self.is_live:
            self._print_plain_line(stage, done, total, message)
            return
        if stage not in self._tasks:
            self._stop_other_clocks(stage)
            self._tasks[stage] = self._progress.add_task(
                self._format_stage_name(stage), total=total, message=""
            )
        text = " · ".join(filter(None, (self._format_time_left(stage, done, total), message)))
        self._progress.update(self._tasks[stage], completed=done, total=total, message=text)

    @contextmanager
    def show_wait(self, description: str) -> Iterator[None]:
        """Show elapsed seconds within the block, while waiting outside a stage."""
        task = (
            self._progress.add_task(description, total=None, message="") if self.is_live else None
        )
        try:
            yield
        finally:
            if task is not None:
                self._progress.remove_task(task)

    def _format_stage_name(self, stage: str) -> str:
        """Return a name such as `stage 3/7 sft`."""
        position = self._time_left.format_stage_position(stage)
        name = stage.replace("_", " ")
        return f"stage {position} {name}" if position else name

    def _format_time_left(self, stage: str, done: int, total: int) -> str:
        """Format the time left of the stage and of the run; "" if neither is known."""
        stage_seconds = self._time_left.estimate_stage_seconds(stage, done, total)
        if not stage_seconds:
            return ""
        text = f"{_format_duration(stage_seconds)} left"
        run_seconds = self._time_left.estimate_run_seconds(stage, done, total)
        if run_seconds is not None and run_seconds - stage_seconds >= 1:
            text += f", run {_format_duration(run_seconds)}"
        return text

    def _stop_other_clocks(self, stage: str) -> None:
        """Stop the clocks of other stages, as stages run one after the other."""
        for name, task in self._tasks.items():
            if name != stage:
                self._progress.stop_task(task)

    def _print_plain_line(self, stage: str, done: int, total: int, message: str) -> None:
        now = time.monotonic()
        last = self._last_line_at.get(stage, -PLAIN_LINE_SECONDS)
        if done < total and now - last < PLAIN_LINE_SECONDS:
            return
        self._last_line_at[stage] = now
        text = " · ".join(
            filter(None, (f"{done}/{total}", self._format_time_left(stage, done, total), message))
        )
        self.console.print(
            f"{self._format_stage_name(stage)}: {text}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def print_announcement(self, text: str) -> None:
        """Print important text, in quiet runs too, as unwrapped lines."""
        self.console.print(
            escape_control_characters(text), highlight=False, markup=False, soft_wrap=True
        )


def _format_duration(seconds: float) -> str:
    """Format a duration in at most two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
