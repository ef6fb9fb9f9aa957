"""Trackers beside MLflow that `tracking.sinks` names, and the alerts; each on a thread of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_core.trackers import (
    BackgroundTracker,
    DogStatsdTracker,
    PrometheusTracker,
    TensorBoardTracker,
    WandbTracker,
)
from rl_core.trackers.prometheus import target_of
from rl_core.tracking import Tracker
from tasks.tracking.alerts import AlertTracker

__all__ = ["alerts_of", "sinks_of"]


def sinks_of(
    sinks: Sequence[str], home: Path, *, pipeline: str, group: str, folder: str, run_id: str, stage: str = ""
) -> list[BackgroundTracker]:
    """Trackers of one run, each on a thread of its own.

    Args:
        home: the pipeline's folder, in which they write unless they name another.
        pipeline: its name, or that of the service; with `stage` the labels of Prometheus and Datadog.
        group: name of the run that this one belongs to. folder: of this run within a TensorBoard folder.
        run_id: lasting name of the run, the same when it is resumed.
        stage: the stage, or the service's training run.
    """
    labels = {"pipeline": pipeline} | ({"stage": stage} if stage else {})
    return [BackgroundTracker(sink, _maker(sink, home, pipeline, group, folder, run_id, labels)) for sink in sinks]


def alerts_of(conditions: Mapping[str, str], subject: str, stage: str = "") -> BackgroundTracker:
    """The alerts of one run."""
    return BackgroundTracker("alerts", functools.partial(AlertTracker, conditions, subject, stage))


def _maker(
    sink: str, home: Path, pipeline: str, group: str, folder: str, run_id: str, labels: Mapping[str, str]
) -> Callable[[], Tracker]:
    kind, _, address = sink.partition(":")
    if kind == "tensorboard":
        return functools.partial(TensorBoardTracker, (Path(address) if address else home / kind) / folder, cut=True)
    if kind == "prometheus":
        target = target_of(address, home, "-".join(labels.values()))
        return functools.partial(PrometheusTracker, target, labels)
    if kind == "dogstatsd":
        return functools.partial(DogStatsdTracker, address, home / "dogstatsd.txt", labels)
    return functools.partial(WandbTracker, address or pipeline, home, group=group, run_id=run_id)
