"""Settings of the processes that play a policy's rollouts, and of the replay of past ones."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["ReplaySettings", "RolloutSettings", "check_ray", "decisive_rollouts"]

RAY_VERSION = "2.60"  # that was tested; see the extra `ray`
_ADDRESS = re.compile(r"auto|[A-Za-z0-9.\-_\[\]:]+:\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """Place of the rollouts: the trainer's process, or workers beside it (docs/scale-out.md)."""

    workers: Literal["in_process", "ray"] = setting(
        "in_process",
        doc="ray: actors, each with its own engine and environments (extra `ray`); with max_staleness 0 the numbers "
        "are those of in_process with `independent`",
    )
    count: int = setting(1, ge=1, le=1024, doc="actors")
    independent: bool = setting(
        False,
        doc="prompts of different lengths are read in separate passes, so that a rollout's numbers depend on no other "
        "one; workers always do",
    )
    max_staleness: int = setting(
        0,
        ge=0,
        le=64,
        doc="weight updates by which the oldest token of a rollout may lag behind the weights that learn from it; 0 = "
        "rollouts and updates take turns; above 0 rollouts go on during updates, which needs `importance`",
    )
    partial: Literal["keep", "drop"] = setting(
        "keep",
        doc="rollouts that are being played when new weights arrive (max_staleness above 0): go on under them, each "
        "token with its own policy version, or begin anew",
    )
    address: str | None = setting(
        None,
        doc="host:port of a running Ray cluster, or auto; left out: a Ray of the run's own, on this machine alone",
    )

    replay_schedule: str | None = setting(
        None,
        doc="schedule.jsonl of a run with max_staleness above 0 (`posttrain run --replay-schedule`): learn from the "
        "same tokens again, bit for bit, in this process, whatever `workers` says",
    )

    def check(self) -> None:
        """Settings of the workers need workers."""
        if self.address is not None and not _ADDRESS.fullmatch(self.address):
            raise SettingsError(f"address: {self.address!r} must be host:port of a Ray cluster's head, or auto")
        if self.replay_schedule is not None and not self.max_staleness:
            raise SettingsError("replay_schedule: is of a run with max_staleness above 0; set that run's max_staleness")
        if self.workers != "in_process":
            return
        for name, value in (("count", self.count != 1), ("address", self.address is not None)):
            if value:
                raise SettingsError(
                    f"{name}: {getattr(self, name)!r} is of workers, and there are none in_process; set workers: ray"
                )
        if self.max_staleness:
            raise SettingsError(
                f"max_staleness: {self.max_staleness} needs rollouts beside the updates; set workers: ray, or 0"
            )


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Replay of past rollouts with importance weights."""

    iterations: int = setting(4, ge=1, doc="past iterations kept")
    share: float = setting(0.5, gt=0, le=4, doc="replayed groups per fresh group")


def check_ray() -> None:
    """Raises: SettingsError where Ray is not installed; nothing is imported."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            f"rollouts.workers: ray needs the package ray ({RAY_VERSION} was tested): pip install 'posttrain[ray]' -c "
            "constraints.txt, or set workers: in_process"
        )


def decisive_rollouts(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of these settings, as plain values, that decides numbers: where rollouts are played does not."""
    kept: dict[str, Any] = {}
    if settings["independent"] or settings["workers"] != "in_process":
        kept["independent"] = True
    if settings["max_staleness"]:
        kept |= {name: settings[name] for name in ("max_staleness", "partial", "replay_schedule")}
    return kept
