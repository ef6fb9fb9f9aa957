"""TensorBoard event files; the package tensorboard is imported at the first use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.trackers.base import SilentTracker

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(SilentTracker):
    """Scalars, and structures and tags as text, in a folder for `tensorboard --logdir`."""

    def __init__(self, folder: str | Path, *, cut: bool = False) -> None:
        """Raises: SettingsError where the package is missing.

        Args:
            cut: hide the points of later steps in the folder, which a resumed run measures again.
        """
        self.folder, self._cut = Path(folder), cut
        self._writer: Any = None
        self._system: TensorBoardTracker | None = None
        self._texts: list[tuple[str, str]] = []  # that wait for the first step
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                "tracker: TensorBoard needs the package tensorboard; install it, or posttrain[tensorboard]"
            ) from error
        self._make = SummaryWriter

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars and flush them."""
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Write a reading of the machine, numbered on its own, into the folder `system` beside."""
        if self._system is None:
            self._system = TensorBoardTracker(self.folder / "system", cut=self._cut)
        self._system.log_metrics(metrics, number)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Write a structure as text."""
        self._text(name, f"```json\n{json.dumps(values, indent=2, default=str)}\n```")

    def set_tag(self, name: str, value: str) -> None:
        """Write a tag as text."""
        self._text(name, value)

    def _text(self, name: str, text: str) -> None:
        if self._cut and self._writer is None:
            self._texts.append((name, text))  # the file begins with the step from which others are hidden
        else:
            self._open().add_text(name, text)

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Write the run's settings as text."""
        self.log_dict(params, f"{name}/settings")

    def close(self, status: str) -> None:
        """End the file; the next call opens another in the same folder."""
        if self._system is not None:
            self._system.close(status)
            self._system = None
        if self._texts:
            self._open()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int | None = None) -> Any:
        if self._writer is None:
            self._writer = self._make(str(self.folder), purge_step=step if self._cut else None)
            for name, text in self._texts:
                self._writer.add_text(name, text)
            self._texts.clear()
        return self._writer
