"""The gate as a process beside the server: canary episodes of every new snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flows.online.heartbeat import LifeSign
from rl_core.api.policy import load_policy
from rl_core.errors import SettingsError
from rl_core.online.assembly import SNAPSHOTS, online_environment
from rl_core.online.canary_gate import CanaryGate
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import OnlineSettings
from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder
from rl_core.training.signals import StopRequests

__all__ = ["run_gate"]

POLL_SECONDS = 0.5


def run_gate(settings: OnlineSettings, say: Callable[[str], None] = print, heart: LifeSign | None = None) -> int:
    """Test snapshots until SIGTERM or Ctrl-C; returns the signal.

    Raises: SettingsError where there is no environment, whose episodes a gate needs; FolderBusy beside another gate.
    """
    folder = make_folder(Path(settings.folder))
    environment = online_environment(settings.environment)
    if environment is None:
        raise SettingsError(
            "environment: a gate needs canary episodes, so name an environment, or set service.run_gate=false"
        )
    heart = heart or LifeSign(None, settings.service.update_seconds)
    heart.working()
    with StopRequests() as stops, FolderLock(make_folder(folder / "gate")):
        policy = load_policy(settings.model, seed=settings.seed)
        gate = CanaryGate(folder, settings, policy, environment, WeightSnapshots(folder / SNAPSHOTS, cached=3))
        say(f"gate of {folder}: {gate.gate.candidates} snapshots were tested; Ctrl-C stops it")
        while stops.signum is None:
            heart.working()
            if not gate.step():
                heart.waiting()
                time.sleep(POLL_SECONDS)
        return stops.signum
