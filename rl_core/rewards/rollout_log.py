"""Rollout logs on disk: reward components of every rollout, and full trajectories of the newest iterations."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from rl_core.storage.append_log import AppendLog, extract_number
from rl_core.storage.atomic_files import write_text_unsynced
from rl_core.storage.faults import inject_fault
from rl_core.types import Rollout, Trajectory


class RewardRecord:
    """Appends to one file: iteration, episode, success, total, components (raw and 'weighted/<name>'), turn digests.

    A resumed run repeats the iterations since its checkpoint, so the lines of those iterations are cut first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = AppendLog(
            path,
            synced=True,  # the next checkpoint relies on these lines
            allow_nan=True,
            consequence="the reward of one rollout is lost",
        )
        self._opened = False

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Write the rollouts of one iteration."""
        if not self._opened:
            if self.path.is_file():
                self._log.truncate_tail(lambda row: extract_number(row, "iteration") >= iteration)
                inject_fault("rewards.cut")
            self._opened = True
        self._log.append_records(_build_row(iteration, rollout) for rollout in rollouts)
        inject_fault("rewards.recorded")


def _build_row(iteration: int, rollout: Rollout) -> dict[str, object]:
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
        "turns": _digest_turns(rollout),
    }


def _digest_turns(rollout: Rollout) -> list[str]:
    """Return short digests of opening, action, observation, action, ...: they show where two plays of an episode
    diverge.
    """
    texts = [repr(rollout.prompt_ids)]
    for turn in rollout.trajectory.turns:
        texts += [turn.action, repr((turn.observation, turn.tool_call, turn.is_error))]
    return [
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
        for text in texts
    ]


class RecentRollouts:
    """The trajectories of the newest iterations, in memory and in one file, each line with its 'iteration', oldest
    first.

    The file is replaced every iteration without fsync: it serves inspection during training, and its loss does no harm.
    """

    def __init__(self, path: Path | None, iterations: int = 4, per_iteration: int = 16) -> None:
        """Record `per_iteration` rollouts of each iteration, spread evenly over its prompts.

        Args:
            path: None = in memory alone.
        """
        self.path, self.per_iteration = path, per_iteration
        self._blocks: deque[str] = deque(maxlen=iterations)
        self._trajectories: deque[list[tuple[int, Trajectory]]] = deque(maxlen=iterations)

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Add the rollouts of one iteration."""
        played = list(rollouts)
        count = min(self.per_iteration, len(played))
        selected = [played[index * len(played) // count] for index in range(count)]
        self._trajectories.append([(iteration, rollout.trajectory) for rollout in selected])
        if self.path is None:
            return
        rows = [{"iteration": iteration, **rollout.trajectory.to_json()} for rollout in selected]
        self._blocks.append("".join(json.dumps(row, default=str) + "\n" for row in rows))
        write_text_unsynced(self.path, "".join(self._blocks))

    @property
    def trajectories(self) -> list[tuple[int, Trajectory]]:
        """Recorded (iteration, trajectory), oldest first."""
        return [row for block in list(self._trajectories) for row in block]


def build_combined_record(
    *records: Callable[[int, list[Rollout]], None],
) -> Callable[[int, Iterable[Rollout]], None]:
    """Build a record that passes every iteration on to each of `records`."""

    def record(iteration: int, rollouts: Iterable[Rollout]) -> None:
        played = list(rollouts)
        for each in records:
            each(iteration, played)

    return record
