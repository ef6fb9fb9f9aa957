"""Alerts: conditions on metrics that come true, as events of the Prefect server, whose automation calls the webhook."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_core.settings.sinks import condition_of
from rl_core.trackers.base import SilentTracker

__all__ = ["EVENT", "Alert", "AlertTracker", "announce"]

logger = logging.getLogger(__name__)

EVENT = "posttrain.alert"
ALWAYS = {"reward/alarm": "> 0", "online/paused": "> 0"}  # of the reward-hacking monitor, of online learning
_MEANINGS = {
    "reward/alarm": "the reward rises while success falls: it may be hacked",
    "online/paused": "learning has stopped and the last good snapshot answers; the run's tag online.alarm says why",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that has come true."""

    subject: str  # pipeline, or training run of the service
    stage: str  # "" where there is none
    metric: str
    value: float
    condition: str
    step: int

    @property
    def text(self) -> str:
        """One sentence for people."""
        place = f"{self.subject} / {self.stage}" if self.stage else self.subject
        meaning = f" ({_MEANINGS[self.metric]})" if self.metric in _MEANINGS else ""
        return f"{place}: {self.metric} is {self.value:.4g}, {self.condition}, at step {self.step}{meaning}"


class AlertTracker(SilentTracker):
    """Sends an alert when a condition comes true, and again only after it was false."""

    def __init__(
        self, conditions: Mapping[str, str], subject: str, stage: str = "", send: Callable[[Alert], None] | None = None
    ) -> None:
        """`conditions`: metric -> '> 0.5' or '< 0.1', beside the one that is always there. `send`: `announce`."""
        self._conditions = {metric: condition_of(text) for metric, text in {**ALWAYS, **conditions}.items()}
        self._subject, self._stage, self._send = subject, stage, send or announce
        self._true: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Look at the metrics that have a condition; one that is no number is no news."""
        for metric in self._conditions.keys() & metrics.keys():
            value, (sign, bound) = float(metrics[metric]), self._conditions[metric]
            if math.isnan(value):
                continue
            if not (value > bound if sign == ">" else value < bound):
                self._true.discard(metric)
            elif metric not in self._true:
                self._true.add(metric)
                self._send(Alert(self._subject, self._stage, metric, value, f"{sign} {bound:g}", step))


def announce(alert: Alert) -> None:
    """Log an alert, and emit it as an event where a Prefect server is named (PREFECT_API_URL)."""
    logger.warning("alert: %s", alert.text)
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():  # an embedded server has no automations
        return
    from prefect.events import emit_event

    emit_event(
        event=EVENT,
        resource={"prefect.resource.id": f"posttrain.alert.{alert.subject}", "prefect.resource.name": alert.subject},
        payload={
            "text": alert.text, "metric": alert.metric, "value": alert.value, "condition": alert.condition,
            "stage": alert.stage, "step": alert.step,
        },
    )  # fmt: skip
