"""Terminal progress of a pipeline: one bar per stage, or plain lines without a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from flows.runtime.terminal_text import fitted
from flows.runtime.time_left import TimeLeft
from flows.runtime.visible import visible

__all__ = ["Display"]

LOGGERS = ("rl_core", "tasks", "flows")
LINE_SECONDS = 10.0  # between plain lines of a stage
NARROW = 100  # columns of a terminal below which the bars are short


class _Warnings(logging.Handler):
    """Log handler that prints warnings of this project above the bars, in quiet runs too.

    And what is logged with `extra={"for_people": True}`, without its level.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        if record.levelno >= logging.WARNING:
            text = visible(f"{record.levelname.lower()}: {record.getMessage()}")
            self.console.print(fitted(text, self.console), highlight=False, markup=False, soft_wrap=True)
        elif getattr(record, "for_people", False):
            self.console.print(visible(record.getMessage()), highlight=False, markup=False, soft_wrap=True)


class _Count(MofNCompleteColumn):
    """Done and total; nothing for what only takes its time."""

    def render(self, task: Task) -> Text:
        """`3/7`, or ""."""
        return Text() if task.total is None else super().render(task)


class Display:
    """Live progress of the stages; a context manager and a `ProgressCallback`."""

    def __init__(
        self, *, quiet: bool = False, console: Console | None = None, time_left: TimeLeft | None = None
    ) -> None:
        """time_left: of the run, with its stages; None = stages are neither numbered nor timed.

        quiet: no progress; warnings go to standard error, as standard output may be read by a program (`--json`).
        """
        self.console = console or Console(stderr=quiet)
        self.quiet = quiet
        self.live = self.console.is_terminal and not quiet
        self._time_left = time_left or TimeLeft()
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, float] = {}
        self._warnings = _Warnings(self.console)
        self._progress = Progress(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, min_width=18)),
            BarColumn(bar_width=10 if self.console.width < NARROW else 24),
            _Count(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            # One line for each stage, whatever the width: what does not fit is cut at the end of the line.
            TextColumn("{task.fields[message]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )

    def __enter__(self) -> Display:
        if self.live:
            self._progress.start()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._warnings)
            logging.getLogger(name).setLevel(logging.INFO)  # shown on Prefect's page; the terminal shows only warnings
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self._progress.stop()
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._warnings)

    def __call__(self, stage: str, done: int, total: int, message: str = "") -> None:
        """Update the progress of a stage."""
        if self.quiet:
            return
        self._time_left.observe(stage, done, total)
        if not self.live:
            self._line(stage, done, total, message)
            return
        if stage not in self._tasks:
            self._finish_others(stage)
            self._tasks[stage] = self._progress.add_task(self._name(stage), total=total, message="")
        told = " · ".join(filter(None, (self._left(stage, done, total), message)))
        self._progress.update(self._tasks[stage], completed=done, total=total, message=told)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context that shows elapsed seconds while waiting outside a stage."""
        task = self._progress.add_task(what, total=None, message="") if self.live else None
        try:
            yield
        finally:
            if task is not None:
                self._progress.remove_task(task)

    def _name(self, stage: str) -> str:
        """`stage 3/7 sft`."""
        place = self._time_left.place(stage)
        return f"stage {place} {stage.replace('_', ' ')}" if place else stage.replace("_", " ")

    def _left(self, stage: str, done: int, total: int) -> str:
        """Time left of the stage and of the run; "" where neither is known."""
        own, whole = self._time_left.of_stage(stage, done, total), self._time_left.of_run(stage, done, total)
        if not own:
            return ""
        more = f", run {_span(whole)}" if whole is not None and whole - own >= 1 else ""
        return f"{_span(own)} left{more}"

    def _finish_others(self, stage: str) -> None:
        """Stop the clocks of other stages, as stages run one after the other."""
        for name, task in self._tasks.items():
            if name != stage:
                self._progress.stop_task(task)

    def _line(self, stage: str, done: int, total: int, message: str) -> None:
        now = time.monotonic()
        if done < total and now - self._last.get(stage, -LINE_SECONDS) < LINE_SECONDS:
            return
        self._last[stage] = now
        told = " · ".join(filter(None, (f"{done}/{total}", self._left(stage, done, total), message)))
        self.console.print(f"{self._name(stage)}: {told}", highlight=False, markup=False, soft_wrap=True)

    def announce(self, text: str) -> None:
        """Print important text, in quiet runs too, as unwrapped lines."""
        self.console.print(visible(text), highlight=False, markup=False, soft_wrap=True)


def _span(seconds: float) -> str:
    """Duration in at most two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
