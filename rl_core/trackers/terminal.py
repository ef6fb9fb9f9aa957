"""A line an iteration, on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rl_core.trackers.base import SilentTracker

__all__ = ["TerminalTracker"]

SHOWN = (
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
    """Prints the main metrics of every iteration, and every evaluation in full."""

    def __init__(self, every: int = 1, stream: TextIO | None = None) -> None:
        """`every`: iterations between two lines; evaluations and the last iteration are always printed."""
        self.every, self._stream = max(1, every), stream
        self._latest: dict[str, float] = {}
        self._started = time.perf_counter()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Print an evaluation; remember an iteration until `progress` says how far it is."""
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._print(f"  step {step}: " + _text(evaluated))
        else:
            self._latest = dict(metrics)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Print the iteration's line."""
        if done % self.every and done != total:
            return
        shown = {name: self._latest[name] for name in SHOWN if name in self._latest}
        self._print(f"{done}/{total}  " + (_text(shown) or message))

    def _print(self, text: str) -> None:
        print(text, file=self._stream or sys.stdout, flush=True)


def _text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
