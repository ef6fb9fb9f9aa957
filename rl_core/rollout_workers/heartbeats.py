"""Questions to workers that play, answered beside the playing: a process that hangs answers none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rl_core.rollout_workers.cluster import WorkerCluster

__all__ = ["HUNG_S", "SILENT", "Heartbeats"]

EVERY_S = 15.0  # between two questions to one worker
HUNG_S = 120.0  # without an answer, until a worker counts as lost
SILENT = f"no sign of life for {HUNG_S:g} s"  # how it was lost, for people


@dataclass
class _Heartbeat:
    call: Any
    asked: float


@dataclass
class Heartbeats:
    """Watches workers by their seats' numbers."""

    cluster: WorkerCluster
    clock: Callable[[], float] = time.monotonic
    _open: dict[int, _Heartbeat] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)  # when each was asked, or began

    def silent(self, workers: Iterable[tuple[int, Any]]) -> list[int]:
        """Numbers of those (number, worker) that have not answered for HUNG_S; the others are asked when it is time."""
        now, found = self.clock(), []
        for number, worker in workers:
            question = self._open.get(number)
            if question is None:
                if now - self._last.setdefault(number, now) >= EVERY_S:
                    self._open[number] = _Heartbeat(self.cluster.ping(worker), now)
            elif self.cluster.wait([question.call], 0.0):
                del self._open[number]
                self._last[number] = now
            elif now - question.asked >= HUNG_S:
                found.append(number)
        return found

    def forget(self, number: int) -> None:
        """Note that another worker has this number, or that it plays nothing."""
        self._open.pop(number, None)
        self._last.pop(number, None)
