"""Tracker protocol, the interface of rl_core to experiment tracking.

A tracker must never block a training step: implementations append to a local journal and upload in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["MemoryTracker", "Tracker", "sync_tracker"]


class Tracker(Protocol):
    """Sink of a trainer's metrics, tags, artifacts and progress."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record scalars of one step, with names such as `train/...`, `policy/...`."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store a copy of a finished file or folder."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Store a structure as a JSON artifact, replacing any of the same name."""

    def set_tag(self, name: str, value: str) -> None:
        """Set a short text tag on the run."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Report progress; cheap enough to call at every iteration."""


def sync_tracker(tracker: Tracker) -> None:
    """Force what was recorded to the disk, if the tracker has a `sync()`; called before a checkpoint is published.

    Else a power cut could leave a checkpoint whose steps nobody recorded.
    """
    if (sync := getattr(tracker, "sync", None)) is not None:
        sync()


@dataclass
class MemoryTracker:
    """In-memory tracker; the default of rl_core."""

    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    artifacts: list[tuple[Path, str]] = field(default_factory=list)
    dicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    done: int = 0
    total: int = 0
    message: str = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one step's scalars."""
        self.metrics.append((step, dict(metrics)))

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store the path."""
        self.artifacts.append((Path(path), folder))

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Store the structure."""
        self.dicts[name] = dict(values)

    def set_tag(self, name: str, value: str) -> None:
        """Store the tag."""
        self.tags[name] = value

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Store the latest progress."""
        self.done, self.total, self.message = done, total, message

    def series(self, name: str) -> list[tuple[int, float]]:
        """All (step, value) pairs of one metric."""
        return [(step, row[name]) for step, row in self.metrics if name in row]
