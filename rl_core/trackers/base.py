"""A tracker that does nothing, for trackers that take only part of what a run reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SilentTracker"]


class SilentTracker:
    """A `Tracker` whose methods do nothing; subclasses override what they take."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Ignore."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Ignore."""

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Ignore."""

    def set_tag(self, name: str, value: str) -> None:
        """Ignore."""

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Ignore."""
