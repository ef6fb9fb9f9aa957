"""Selection of an open page: run, stage, smoothing, metrics, trajectory file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.monitor.charts import Drawn
from flows.monitor.runs import RunView, StageView

__all__ = ["WINDOW", "Choice", "Runs"]

WINDOW = 10  # observations of the moving average, unless another number is chosen

Runs = Sequence[tuple[RunView, StageView]]  # the chosen run first, then those it is compared with


@dataclass(frozen=True)
class Choice:
    """Selection made on one open page."""

    run: str = ""  # "" = the newest run
    compare: tuple[str, ...] = ()
    stage: str = ""  # "" = the stage that trains, or trained last
    window: int = WINDOW
    by_time: bool = False
    groups: tuple[str, ...] = ()  # metric prefixes on the tab of curves; () = train, reward, policy
    metrics: tuple[str, ...] = ()  # individually chosen metrics; they override groups
    source: str = ""  # trajectory file; "" = the first
    outcome: str = "all"  # all, right, wrong, with misuse

    @property
    def drawn(self) -> Drawn:
        """Smoothing and x axis of the curves."""
        return Drawn(self.window, self.by_time)
