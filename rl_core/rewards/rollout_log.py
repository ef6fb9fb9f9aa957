"""What training played, on disk: every part of every rollout's reward, and the newest trajectories whole."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from rl_core.storage.folders import write_text_unsynced
from rl_core.types import Rollout

__all__ = ["RecentRollouts", "RewardRecord", "record_all"]


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


class RecentRollouts:
    """Keeps one file with the trajectories of the newest iterations, each line with its 'iteration', oldest first.

    The file is replaced every iteration, unsynced: it is there to be looked at while training, and lost without harm.
    """

    def __init__(self, path: Path, iterations: int = 4, per_iteration: int = 16) -> None:
        """`per_iteration` rollouts of each iteration are kept, spread evenly, so that several prompts are seen."""
        self.path, self.per_iteration = path, per_iteration
        self._blocks: deque[str] = deque(maxlen=iterations)

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Take in the rollouts of one iteration."""
        played = list(rollouts)
        count = min(self.per_iteration, len(played))
        kept = [played[index * len(played) // count] for index in range(count)]
        rows = [{"iteration": iteration, **rollout.trajectory.to_json()} for rollout in kept]
        self._blocks.append("".join(json.dumps(row) + "\n" for row in rows))
        write_text_unsynced(self.path, "".join(self._blocks))


def record_all(*records: Callable[[int, list[Rollout]], None]) -> Callable[[int, Iterable[Rollout]], None]:
    """One record that hands every iteration to each of `records`."""

    def record(iteration: int, rollouts: Iterable[Rollout]) -> None:
        played = list(rollouts)
        for each in records:
            each(iteration, played)

    return record
