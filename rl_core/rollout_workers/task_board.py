"""Tasks of one collection on their way: which is played next, and what is played a second time because it is late.

Groups follow from their numbers alone, so whichever worker plays a task gives the same groups, and the first counts. A
clock decides who plays, never what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rl_core.rollout_workers.worker import PlayedTask, PlayTask

__all__ = ["LATE", "TaskBoard"]

LATE = 3.0  # times as long as the longest finished task takes one that others play, too


@dataclass
class _Progress:
    """One task."""

    task: PlayTask
    players: int = 0  # workers that play it
    began: float = 0.0  # when the first of them did
    played: PlayedTask | None = None


@dataclass
class TaskBoard:
    """The tasks of one collection."""

    tasks: Sequence[PlayTask]
    clock: Callable[[], float] = time.monotonic
    _rows: list[_Progress] = field(init=False)
    _waiting: deque[int] = field(init=False)
    _longest: float | None = None  # seconds of the longest finished task; None = none has finished

    def __post_init__(self) -> None:
        self._rows = [_Progress(task) for task in self.tasks]
        self._waiting = deque(range(len(self.tasks)))

    @property
    def is_over(self) -> bool:
        """True = every task has been played."""
        return all(row.played is not None for row in self._rows)

    @property
    def results(self) -> list[PlayedTask]:
        """Played tasks, in the order of the tasks."""
        return [row.played for row in self._rows if row.played is not None]

    def next(self) -> int | None:
        """Number of the task that a free worker plays, which begins with this; None = nothing is to be played now."""
        if self._waiting:
            number = self._waiting.popleft()
            self._rows[number].began = self.clock()
        elif (late := self._late()) is not None:
            number = late
        else:
            return None
        self._rows[number].players += 1
        return number

    def _late(self) -> int | None:
        """The oldest task that one worker alone plays, if it takes much longer than the others did."""
        alone = [number for number, row in enumerate(self._rows) if row.played is None and row.players == 1]
        if not alone or self._longest is None:
            return None
        oldest = min(alone, key=lambda number: self._rows[number].began)
        return oldest if self.clock() - self._rows[oldest].began > LATE * self._longest else None

    def is_played(self, number: int) -> bool:
        """True = a worker has played it."""
        return self._rows[number].played is not None

    def ended(self, number: int, played: PlayedTask) -> None:
        """Note a result; the second of a task is the first one's equal, and left out."""
        row = self._rows[number]
        row.players -= 1
        if row.played is None:
            row.played = played
            self._longest = max(self._longest or 0.0, self.clock() - row.began)

    def lost(self, number: int) -> bool:
        """Note that a player is gone; True = the task is played again from its beginning."""
        row = self._rows[number]
        row.players -= 1
        if row.players or row.played is not None:
            return False
        self._waiting.appendleft(number)
        return True
