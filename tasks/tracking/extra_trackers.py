"""Trackers in addition to MLflow: those named by `tracking.sinks`, and alerts, each on a separate thread.

An alert is a condition on a metric that becomes true. It is emitted as an event to the Prefect server, whose automation
calls the webhook.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.settings.services import parse_condition
from rl_core.trackers import (
    BackgroundTracker,
    DogStatsdTracker,
    PrometheusTracker,
    TensorBoardTracker,
    WandbTracker,
)
from rl_core.trackers.prometheus import parse_target
from rl_core.tracking import SilentTracker, Tracker

logger = logging.getLogger(__name__)

ALERT_EVENT = "posttrain.alert"
BUILT_IN_ALERTS = {
    "reward/alarm": "> 0",  # reward-hacking monitor
    "online/paused": "> 0",  # online learning
}
_MEANINGS = {
    "reward/alarm": "the reward rises while success falls: it may be hacked",
    "online/paused": "learning has stopped and the last good snapshot is served; see the run's tag online.alarm",
}


@dataclass(frozen=True, slots=True)
class MetricAlert:
    """Condition on a metric that has become true."""

    subject: str  # pipeline, or training run of the service
    stage: str  # "" = none
    metric: str
    value: float
    condition: str
    step: int

    @property
    def text(self) -> str:
        """One sentence for the user."""
        source = f"{self.subject} / {self.stage}" if self.stage else self.subject
        meaning = f" ({_MEANINGS[self.metric]})" if self.metric in _MEANINGS else ""
        return f"{source}: {self.metric} is {self.value:.4g}, {self.condition}, at step {self.step}{meaning}"


class AlertTracker(SilentTracker):
    """Tracker that sends an alert when a condition becomes true, and again only after it was false."""

    def __init__(
        self,
        conditions: Mapping[str, str],
        subject: str,
        stage: str = "",
        send: Callable[[MetricAlert], None] | None = None,
    ) -> None:
        """Set the conditions.

        Args:
            conditions: metric -> '> 0.5' or '< 0.1', in addition to `BUILT_IN_ALERTS`.
            send: None = `send_alert`.
        """
        self._conditions = {
            metric: parse_condition(text)
            for metric, text in {**BUILT_IN_ALERTS, **conditions}.items()
        }
        self._subject, self._stage, self._send = subject, stage, send or send_alert
        self._active_metrics: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Check the metrics that have a condition. NaN changes nothing."""
        for metric in self._conditions.keys() & metrics.keys():
            value, (sign, bound) = float(metrics[metric]), self._conditions[metric]
            if math.isnan(value):
                continue
            is_true = value > bound if sign == ">" else value < bound
            if not is_true:
                self._active_metrics.discard(metric)
            elif metric not in self._active_metrics:
                self._active_metrics.add(metric)
                condition = f"{sign} {bound:g}"
                alert = MetricAlert(self._subject, self._stage, metric, value, condition, step)
                self._send(alert)


def send_alert(alert: MetricAlert) -> None:
    """Log an alert, and emit it as an event if a Prefect server is configured (PREFECT_API_URL)."""
    logger.warning("alert: %s", alert.text)
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():  # an embedded server has no automations
        return
    from prefect.events import emit_event

    emit_event(
        event=ALERT_EVENT,
        resource={
            "prefect.resource.id": f"posttrain.alert.{alert.subject}",
            "prefect.resource.name": alert.subject,
        },
        payload={
            "text": alert.text,
            "metric": alert.metric,
            "value": alert.value,
            "condition": alert.condition,
            "stage": alert.stage,
            "step": alert.step,
        },
    )


def build_extra_trackers(
    sinks: Sequence[str],
    home: Path,
    *,
    pipeline: str,
    group: str,
    folder: str,
    run_id: str,
    stage: str = "",
) -> list[BackgroundTracker]:
    """Build the trackers of one run, each on a separate thread.

    Args:
        home: the pipeline's folder, in which trackers write unless they name another one.
        pipeline: name of the pipeline or of the service; with `stage`, the labels of Prometheus and Datadog.
        group: name of the run to which this run belongs.
        folder: folder of this run within a TensorBoard folder.
        run_id: permanent name of the run, unchanged on resume.
        stage: the stage, or the service's training run.
    """
    labels = {"pipeline": pipeline} | ({"stage": stage} if stage else {})
    return [
        BackgroundTracker(
            sink, _build_tracker_factory(sink, home, pipeline, group, folder, run_id, labels)
        )
        for sink in sinks
    ]


def build_alert_tracker(
    conditions: Mapping[str, str], subject: str, stage: str = ""
) -> BackgroundTracker:
    """Build the alert tracker of one run."""
    return BackgroundTracker("alerts", functools.partial(AlertTracker, conditions, subject, stage))


def _build_tracker_factory(
    sink: str,
    home: Path,
    pipeline: str,
    group: str,
    folder: str,
    run_id: str,
    labels: Mapping[str, str],
) -> Callable[[], Tracker]:
    kind, _, address = sink.partition(":")
    if kind == "tensorboard":
        root = Path(address) if address else home / kind
        return functools.partial(TensorBoardTracker, root / folder, cut=True)
    if kind == "prometheus":
        target = parse_target(address, home, "-".join(labels.values()))
        return functools.partial(PrometheusTracker, target, labels)
    if kind == "dogstatsd":
        return functools.partial(DogStatsdTracker, address, home / "dogstatsd.txt", labels)
    return functools.partial(WandbTracker, address or pipeline, home, group=group, run_id=run_id)
