"""Weights & Biases runs; the package wandb is imported when a tracker is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.trackers.base import SilentTracker

__all__ = ["WandbTracker"]


class WandbTracker(SilentTracker):
    """Scalars, settings and tags in a run of a project; artifacts are left to other trackers.

    Offline (files in `folder`, for `wandb sync`) where WANDB_MODE says so, or no API key is known: it asks for none.
    """

    def __init__(self, project: str, folder: str | Path | None = None, *, group: str = "", run_id: str = "") -> None:
        """`run_id`: of the run to go on with, if there is one. Raises: SettingsError where the package is missing."""
        try:
            import wandb
        except ImportError as error:
            raise SettingsError(
                "tracker: Weights & Biases needs the package wandb; install it, or posttrain[wandb]"
            ) from error
        self._wandb: Any = wandb
        self.project, self.folder, self.group, self.run_id = project, folder, group, run_id
        self._name, self._params = "", {}  # type: tuple[str, Mapping[str, Any]]
        self._run: Any = None

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Name the run and its settings, before it is opened by the first record."""
        self._name, self._params = name, params

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars. Steps before the last one, which a resumed run measures again, are dropped by wandb."""
        self._open().log(dict(metrics), step=step)

    def set_tag(self, name: str, value: str) -> None:
        """Keep a tag among the run's settings."""
        self._open().config.update({f"tag.{name}": value}, allow_val_change=True)

    def close(self, status: str) -> None:
        """Finish the run; the next call opens another one."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "FINISHED" else 1)
            self._run = None

    def _open(self) -> Any:
        if self._run is None:
            self._run = self._wandb.init(
                project=self.project, name=self._name or None, group=self.group or None, id=self.run_id or None,
                dir=str(self.folder) if self.folder is not None else None, config=dict(self._params),
                mode=self._mode(), resume="allow" if self.run_id else None, reinit="create_new",
                settings=self._wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        return self._run

    def _mode(self) -> str:
        asked = os.environ.get("WANDB_MODE", "")
        return asked or ("online" if self._wandb.api.api_key else "offline")
