"""Live display of a training in a notebook: progress, time left, the main metrics as a table and as curves.

It is shown in an IPython kernel only (Jupyter, VS Code, Colab) and needs nothing but IPython's own display; a script, a
terminal and IPython without a kernel print what they printed before. `tracker="none"` and `tracker="terminal"` turn
it off.
"""

from __future__ import annotations

import html
import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl_core.analysis.curve_figure import TWO_COLUMNS_WIDTH, build_curve_figure, format_value
from rl_core.analysis.metric_reference import MAIN_METRICS
from rl_core.metric_history import MetricHistory
from rl_core.trackers import TerminalTracker
from rl_core.tracking import SilentTracker

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 1.0  # between two updates of the page
RATE_WINDOW = 20  # iterations that the time left is estimated from
MEAN_WINDOW = 10  # observations of the column "mean"
# Metrics that are bad news above 0, and the words for them.
ALARMS = {
    "train/nonfinite_metrics": "values were NaN or infinite and left out",
    "train/skipped_steps": "optimizer steps skipped: loss or gradient not finite",
    "train/unmoved_iterations": "iterations moved no weight",
    "train/failed_episodes": "episodes failed",
    "reward/alarm": "alarm: reward hacking",
}
_STYLE = (
    "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif;font-size:13px;"
    "font-variant-numeric:tabular-nums;max-width:1080px"
)
_COLORS = {"running": "#2B8CD6", "finished": "#0B9E74", "stopped": "#C77C00", "failed": "#D0453B"}


def runs_in_notebook() -> bool:
    """Return whether this code runs in an IPython kernel. Imports nothing."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def wants_live_display(source: object, trackers: Iterable[object]) -> bool:
    """Return whether a training shows the live display: in a notebook, unless its trackers print or are "none"."""
    names = (
        [source] if isinstance(source, str) else source if isinstance(source, list | tuple) else []
    )
    is_off = "none" in names or any(isinstance(tracker, TerminalTracker) for tracker in trackers)
    return not is_off and runs_in_notebook()


class LiveDisplay(SilentTracker):
    """Tracker that draws a training into the output of the notebook cell that started it. It never fails a run."""

    def __init__(
        self,
        history: Callable[[], MetricHistory],
        *,
        show: Callable[[str, str, str, bool], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Configure the display.

        Args:
            history: returns the metrics so far; a resumed run's include those before the resume.
            show: (HTML, plain text, display id, is an update) -> None; default: IPython's display.
            clock: seconds.
        """
        self._history, self._show, self._clock = history, show or _show_in_notebook, clock
        self._id = f"rl_core-{uuid.uuid4().hex}"
        self._name, self._state = "", "running"
        self._done = self._total = 0
        self._started_at = clock()
        self._shown_at: float | None = None
        self._times: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW + 1)
        self._is_broken = False

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Show that training starts."""
        self._name = name
        self._times.append(
            (self._clock(), -1)
        )  # the first iteration replaces -1 by what a resume skipped
        self._update_page()

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Note an iteration, and update the page at most every UPDATE_SECONDS."""
        if self._times and self._times[-1][1] < 0:
            self._times[-1] = (self._times[-1][0], done - 1)
        self._done, self._total = done, total
        self._times.append((self._clock(), done))
        if self._shown_at is None or self._clock() - self._shown_at >= UPDATE_SECONDS:
            self._update_page()

    def close(self, status: str) -> None:
        """Show the end: FINISHED, KILLED or FAILED."""
        self._state = {"FINISHED": "finished", "KILLED": "stopped"}.get(status, "failed")
        self._update_page()

    def estimate_seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the newest iterations; None = unknown."""
        if len(self._times) < 2 or not self._total:
            return None
        (start, first), (end, last) = self._times[0], self._times[-1]
        return (end - start) / (last - first) * (self._total - last) if last > first else None

    def _update_page(self) -> None:
        if self._is_broken:
            return
        is_update, self._shown_at = self._shown_at is not None, self._clock()
        try:
            self._show(self._draw_page(), self._describe_progress(), self._id, is_update)
        except Exception as error:
            self._is_broken = True
            logger.warning(
                "the notebook shows no more progress (%s: %s); training continues",
                type(error).__name__,
                error,
            )

    def _describe_progress(self) -> str:
        """Describe progress in one line of text: `grpo 12/30, 0:04, about 0:06 left`."""
        elapsed = format_duration(self._clock() - self._started_at)
        if not self._total:
            return f"{self._name}: {'preparing' if self._state == 'running' else self._state}, {elapsed}"
        text = f"{self._name} {self._done}/{self._total} iterations, {elapsed}"
        if self._state != "running":
            return f"{text}, {self._state}"
        left = self.estimate_seconds_left()
        return text if left is None else f"{text}, about {format_duration(left)} left"

    def _draw_page(self) -> str:
        history = self._history()
        series = {name: history.list_points(name) for name in history.names}
        figure = build_curve_figure({"": series})
        curves = figure._repr_html_() if any(len(points) > 1 for points in series.values()) else ""
        return (
            f'<div style="{_STYLE}">{self._draw_bar()}{_draw_alarms(history)}'
            '<div style="display:flex;flex-wrap:wrap;gap:8px 24px;align-items:flex-start">'
            f'<div style="flex:0 1 auto">{_draw_metrics_table(history)}</div>'
            # Next to the table only where two columns of panels fit; else below it.
            f'<div style="flex:1 1 {TWO_COLUMNS_WIDTH}px;min-width:0">{curves}</div></div></div>'
        )

    def _draw_bar(self) -> str:
        share = self._done / self._total if self._total else 0.0
        return (
            f'<div style="margin:2px 0 4px">{html.escape(self._describe_progress())}</div>'
            f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{self._total}" '
            f'aria-valuenow="{self._done}" style="height:6px;border-radius:3px;margin-bottom:8px;'
            'background:rgba(128,128,128,.3)">'
            f'<div style="width:{share:.1%};height:6px;border-radius:3px;'
            f'background:{_COLORS[self._state]}"></div></div>'
        )


def format_duration(seconds: float) -> str:
    """Format a duration: 0:04, 12:30, 2:05:00, `3 d 4 h`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _draw_alarms(history: MetricHistory) -> str:
    alarms = []
    for name, words in ALARMS.items():
        values = history.list_values(name)
        if values and values[-1] > 0:
            count = "" if words.startswith("alarm") else f"{values[-1]:g} "
            alarms.append(f"{count}{words} ({name})")
    if not alarms:
        return ""
    return (
        f'<div role="alert" style="border-left:3px solid {_COLORS["failed"]};padding:2px 8px;margin:4px 0">'
        f"{'<br>'.join(map(html.escape, alarms))}</div>"
    )


def _draw_metrics_table(history: MetricHistory) -> str:
    """Draw the main metrics: newest value, mean of the newest values, first value."""
    cell = "padding:1px 8px;text-align:right"
    rows = []
    for name in MAIN_METRICS:
        values = history.list_values(name)
        if not values or (
            name == "policy/update_kl" and not any(values)
        ):  # 0 with one step per rollout
            continue
        is_share = name.endswith(("success_rate", "accuracy"))
        recent = values[-MEAN_WINDOW:]
        numbers = (values[-1], sum(recent) / len(recent), values[0])
        cells = "".join(f'<td style="{cell}">{format_value(v, is_share)}</td>' for v in numbers)
        rows.append(
            f'<tr><th style="padding:1px 8px 1px 0;text-align:left;font-weight:400">{name}</th>{cells}</tr>'
        )
    if not rows:
        return ""
    titles = "".join(
        f'<th style="{cell};font-weight:600">{title}</th>'
        for title in ("last", f"mean of {MEAN_WINDOW}", "first")
    )
    name = '<th style="text-align:left;font-weight:600">metric</th>'
    return f'<table style="border-collapse:collapse"><tr>{name}{titles}</tr>{"".join(rows)}</table>'


def _show_in_notebook(page: str, text: str, display_id: str, is_update: bool) -> None:
    from IPython.display import display

    display(
        {"text/html": page, "text/plain": text}, raw=True, display_id=display_id, update=is_update
    )
