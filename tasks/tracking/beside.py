"""Trackers beside MLflow that `tracking.sinks` names: TensorBoard, Weights & Biases."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.trackers import BackgroundTracker, TensorBoardTracker, WandbTracker
from rl_core.tracking import Tracker

__all__ = ["check_installed", "sinks_of"]


def check_installed(sinks: Sequence[str]) -> None:
    """Refuse sinks whose package is missing, before anything runs. Raises: SettingsError."""
    for kind in {sink.partition(":")[0] for sink in sinks}:
        if importlib.util.find_spec(kind) is None:
            raise SettingsError(f"tracking.sinks: {kind} needs the package {kind}; install it, or posttrain[{kind}]")


def sinks_of(
    sinks: Sequence[str], home: Path, *, pipeline: str, group: str, folder: str, run_id: str
) -> list[BackgroundTracker]:
    """Trackers of one run, each on a thread of its own.

    Args:
        home: the pipeline's folder, in which they write unless they name another.
        group: name of the run that this one belongs to. folder: of this run within a TensorBoard folder.
        run_id: lasting name of the run, the same when it is resumed.
    """
    return [BackgroundTracker(sink, _maker(sink, home, pipeline, group, folder, run_id)) for sink in sinks]


def _maker(sink: str, home: Path, pipeline: str, group: str, folder: str, run_id: str) -> Callable[[], Tracker]:
    kind, _, address = sink.partition(":")
    if kind == "tensorboard":
        return functools.partial(TensorBoardTracker, (Path(address) if address else home / kind) / folder, cut=True)
    return functools.partial(WandbTracker, address or pipeline, home, group=group, run_id=run_id)
