"""Every part of every training rollout's reward, on disk: one line of JSON per rollout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rl_core.types import Rollout

__all__ = ["RewardRecord"]


class RewardRecord:
    """Appends to one file: iteration, episode, success, total, raw parts, and weighted ones as 'weighted/<part>'.

    A resumed run plays the iterations since its checkpoint again, so lines from the first one that it plays on go.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = False

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Write the rollouts of one iteration."""
        if not self._opened:
            self._drop_from(iteration)
            self._opened = True
        lines = [json.dumps(_row(iteration, rollout)) + "\n" for rollout in rollouts]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _drop_from(self, iteration: int) -> None:
        """Cut the file before the first line of that iteration, or of no iteration at all: a crash tears lines."""
        if not self.path.is_file():
            return
        place = 0
        with self.path.open("r+b") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n") or json.loads(line)["iteration"] >= iteration:
                        break
                except (ValueError, KeyError, TypeError):
                    break
                place += len(line)
            file.truncate(place)


def _row(iteration: int, rollout: Rollout) -> dict[str, object]:
    trajectory = rollout.trajectory
    return {
        "iteration": iteration,
        "level": trajectory.level,
        "seed": trajectory.seed,
        "sample": trajectory.sample,
        "success": trajectory.success,
        "reward": rollout.reward,
        "masked": rollout.is_masked,
        "rewards": trajectory.rewards,
    }
