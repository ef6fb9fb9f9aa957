"""Trackers for TensorBoard and Weights & Biases; their packages are imported when a tracker is created."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.tracking import SilentTracker


class TensorBoardTracker(SilentTracker):
    """Tracker that writes scalars, and structures and tags as text, into a folder for `tensorboard --logdir`."""

    def __init__(self, folder: str | Path, *, cut: bool = False) -> None:
        """Prepare the tracker. Raises: SettingsError if the package is missing.

        Args:
            cut: hide the points of later steps in the folder, which a resumed run measures again.
        """
        self.folder, self._should_hide_later_steps = Path(folder), cut
        self._writer: Any = None
        self._system: TensorBoardTracker | None = None
        self._texts: list[tuple[str, str]] = []  # written at the first step
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                "tracker: TensorBoard needs the package tensorboard; install it, or posttrain[tensorboard]"
            ) from error
        self._create_writer = SummaryWriter

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars and flush them."""
        writer = self._open_writer(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Write a reading of the machine, numbered separately, into the subfolder `system`."""
        if self._system is None:
            self._system = TensorBoardTracker(
                self.folder / "system", cut=self._should_hide_later_steps
            )
        self._system.log_metrics(metrics, number)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Write a structure as text."""
        self._write_text(name, f"```json\n{json.dumps(values, indent=2, default=str)}\n```")

    def set_tag(self, name: str, value: str) -> None:
        """Write a tag as text."""
        self._write_text(name, value)

    def _write_text(self, name: str, text: str) -> None:
        if self._should_hide_later_steps and self._writer is None:
            # The first step of the file determines which older points are hidden.
            self._texts.append((name, text))
        else:
            self._open_writer().add_text(name, text)

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Write the run's settings as text."""
        self.log_dict(params, f"{name}/settings")

    def close(self, status: str) -> None:
        """Close the file; the next call opens another one in the same folder."""
        if self._system is not None:
            self._system.close(status)
            self._system = None
        if self._texts:
            self._open_writer()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open_writer(self, step: int | None = None) -> Any:
        if self._writer is None:
            purge_step = step if self._should_hide_later_steps else None
            self._writer = self._create_writer(str(self.folder), purge_step=purge_step)
            for name, text in self._texts:
                self._writer.add_text(name, text)
            self._texts.clear()
        return self._writer


class WandbTracker(SilentTracker):
    """Tracker that logs scalars, settings and tags to a run of a project; artifacts are left to other trackers.

    Offline (files in `folder`, for `wandb sync`) if WANDB_MODE says so or no API key is set: it never prompts for one.
    """

    def __init__(
        self, project: str, folder: str | Path | None = None, *, group: str = "", run_id: str = ""
    ) -> None:
        """Prepare the tracker. Raises: SettingsError if the package is missing.

        Args:
            run_id: of the run to continue, if any.
        """
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
        """Set name and settings of the run, which is opened by the first record."""
        self._name, self._params = name, params

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars. wandb drops steps before the last one, which a resumed run measures again."""
        self._open_run().log(dict(metrics), step=step)

    def set_tag(self, name: str, value: str) -> None:
        """Store a tag in the run's config."""
        self._open_run().config.update({f"tag.{name}": value}, allow_val_change=True)

    def close(self, status: str) -> None:
        """Finish the run; the next call opens another one."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "FINISHED" else 1)
            self._run = None

    def _open_run(self) -> Any:
        if self._run is None:
            self._run = self._wandb.init(
                project=self.project,
                name=self._name or None,
                group=self.group or None,
                id=self.run_id or None,
                dir=str(self.folder) if self.folder is not None else None,
                config=dict(self._params),
                mode=self._select_mode(),
                resume="allow" if self.run_id else None,
                reinit="create_new",
                settings=self._wandb.Settings(silent=True, console="off"),
            )
        return self._run

    def _select_mode(self) -> str:
        mode = os.environ.get("WANDB_MODE", "")
        return mode or ("online" if self._wandb.api.api_key else "offline")
