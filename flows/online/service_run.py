"""The MLflow run of a learning service: one for its whole life, restarts included."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from flows.online.learning_folder import LearningFolder
from rl_core.settings import OnlineSettings
from tasks.tracking import Tracking
from tasks.tracking.beside import alerts_of

__all__ = ["ServiceRun"]


class ServiceRun:
    """The run; its step is the second of the service's life."""

    def __init__(
        self, tracking: Tracking, folder: LearningFolder, settings: OnlineSettings, name: str,
        alerts: Mapping[str, str],
    ) -> None:  # fmt: skip
        """alerts: conditions on metrics beside that of a pause, which is always there."""
        facts = folder.facts
        tags = {"online.service": str(folder.path), "online.base_sha256": facts["model_sha256"],
                "online.base_version": str(facts.get("version") or "")}  # fmt: skip
        self._run = tracking.start_run(
            f"online {name}", folder.path / "run", tags=tags, params={"online": dataclasses.asdict(settings)},
            description=f"Online learning of {name}, from {facts.get('reference', '')}; {folder.path}", wait_s=2.0,
        )  # fmt: skip
        self._run.beside.append(alerts_of(alerts, name, "online"))
        self._began = float(facts["began"])
        self._last, self._alarm = -1, ""

    def log(self, metrics: Mapping[str, float], alarm: str) -> None:
        """Record all numbers, and the alarm that stands; "" = none."""
        self._last = max(self._last + 1, int(time.time() - self._began))
        self._run.log_metrics(metrics, self._last)
        if alarm != self._alarm:
            self._alarm = alarm
            self._run.set_tag("online.alarm", alarm or "none")

    def close(self) -> None:
        """End the run; the next start of the service goes on with it."""
        self._run.close(timeout_s=5.0)
