"""The Tracker protocol: all that rl_core knows of experiment tracking.

A tracker must never stall a step: implementations append to a local journal and ship in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["MemoryTracker", "Tracker"]


class Tracker(Protocol):
    """Where a trainer leaves its metrics, tags, artifacts and progress."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record scalars of one step; names as in ARCHITECTURE (`train/...`, `policy/...`)."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Keep a copy of a finished file or folder."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Keep a structure as a JSON artifact of that name; a later one takes its place."""

    def set_tag(self, name: str, value: str) -> None:
        """Attach a short text to the run."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Say how far the work is; cheap enough to call at every iteration."""


@dataclass
class MemoryTracker:
    """A tracker that keeps everything in lists; the default of rl_core and of its tests."""

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
        """Remember the path."""
        self.artifacts.append((Path(path), folder))

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Remember the structure."""
        self.dicts[name] = dict(values)

    def set_tag(self, name: str, value: str) -> None:
        """Remember the tag."""
        self.tags[name] = value

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Remember the newest progress."""
        self.done, self.total, self.message = done, total, message

    def series(self, name: str) -> list[tuple[int, float]]:
        """All (step, value) of one metric."""
        return [(step, row[name]) for step, row in self.metrics if name in row]
