"""Failed episodes: what is kept of them, and the share beyond which a stage stops.

An episode has failed if its environment raised, hung or broke its protocol, or if a reward function did so on it. It is
left out of the update and of every rate; a stage stops where too many fail.
"""

from __future__ import annotations

import re
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_core.errors import EnvironmentFault, PosttrainError
from rl_core.types import Message, Trajectory

MIN_EPISODES = 50  # a share of fewer says little: it is taken of as many
WINDOW_COLLECTIONS = 10  # collections (iterations) whose episodes are counted together
TRACE_CHARACTERS = 4000


@dataclass(slots=True)
class FailedEpisode:
    """A failed episode, with all that is needed to play it again."""

    trajectory: Trajectory  # as far as it came; without success
    messages: list[Message]  # opening messages; [] = it failed before
    failed_in: str  # "the environment's reset", "step 2 of the environment", "reward 'package.module:function'"
    error: str  # type and text of the exception
    trace: str = ""  # traceback, addresses left out
    iteration: int | None = None  # of the training; None = an evaluation

    @property
    def episode_label(self) -> str:
        """Environment, level, seed and sample, for messages."""
        played = self.trajectory
        return f"environment '{played.environment}', level '{played.level}', seed {played.seed}, sample {played.sample}"

    @property
    def failure_label(self) -> str:
        """The place of the failure and its error, for messages."""
        return (
            f"{self.failed_in}{' ' if self.failed_in.startswith('reward ') else ': '}{self.error}"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {**asdict(self), "trajectory": self.trajectory.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FailedEpisode:
        """Inverse of `to_json`."""
        names = cls.__dataclass_fields__
        known = {name: value for name, value in row.items() if name in names}
        return cls(**{**known, "trajectory": Trajectory.from_json(row["trajectory"])})


StoreFailedEpisode = Callable[
    [FailedEpisode], str
]  # stores it, and says how to look at it; "" = it was not stored


def format_error_trace(error: BaseException) -> str:
    """Traceback of an exception and of its causes: its end, and no addresses, which differ from process to process."""
    text = "".join(traceback.format_exception(error))
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)[-TRACE_CHARACTERS:]


@dataclass
class EpisodeFailureMonitor:
    """Counts failed episodes, has them kept, and ends a stage of which too many failed.

    The share is that of the newest WINDOW collections, taken of LEAST_EPISODES where they are fewer. A `max_share` of 0
    stops at the first failure; 1 never stops, unless every episode of a collection failed, which leaves nothing to use.
    """

    max_share: float
    setting: str = "sampling.max_failed_share"  # its name, for messages
    error: type[PosttrainError] = EnvironmentFault  # raised beyond it
    store_episode: StoreFailedEpisode | None = None
    iteration: int | None = None  # of the training, given to the episodes
    is_refill: bool = (
        False  # True = others of this iteration have been played: all of this collection may fail
    )
    total: int = 0  # failed since the beginning
    played: int = 0  # of the open account, see `settle`
    failed: int = 0
    _recent_counts: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_COLLECTIONS - 1)
    )  # (failed, played)

    def has_too_many(self, failed: int, played: int) -> bool:
        """True = with these failures of the present collection the stage stops."""
        if not failed or ((failed < played or self.is_refill) and self.max_share == 1):
            return False
        if failed == played and not self.is_refill:
            return True
        of_all, of_played = self._sum_recent_counts(failed, played)
        return of_all > self.max_share * max(of_played, MIN_EPISODES) or self.max_share == 0

    def check_failures(self, failed: Sequence[FailedEpisode], played: int) -> None:
        """Raise `error`, which names the first one, if the present collection's failures are too many; keeps them."""
        if self.has_too_many(len(failed), played):
            raise self._build_error(
                failed, played, [self._store_episode_with_iteration(episode) for episode in failed]
            )

    def close_collection(self, failed: Sequence[FailedEpisode], played: int) -> list[str]:
        """Take a collection into account, and have its failures kept; what `keep` said of each.

        Raises: `error` if they are too many.
        """
        said = [self._store_episode_with_iteration(episode) for episode in failed]
        if self.has_too_many(len(failed), played):
            raise self._build_error(failed, played, said)
        self._recent_counts.append((len(failed), played))
        self.total += len(failed)
        self.failed += len(failed)
        self.played += played
        return said

    def reset(self) -> None:
        """Forget everything."""
        self._recent_counts.clear()
        self.total = self.failed = self.played = 0

    def take_counts(self) -> tuple[int, int]:
        """Failed and played episodes since the last call."""
        counts = self.failed, self.played
        self.failed = self.played = 0
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Counts of the window and in all."""
        return {"past": [list(counts) for counts in self._recent_counts], "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._recent_counts.clear()
        self._recent_counts.extend((int(failed), int(played)) for failed, played in state["past"])
        self.total = int(state["total"])

    def _sum_recent_counts(self, failed: int, played: int) -> tuple[int, int]:
        return failed + sum(f for f, _ in self._recent_counts), played + sum(
            p for _, p in self._recent_counts
        )

    def _store_episode_with_iteration(self, episode: FailedEpisode) -> str:
        episode.iteration = self.iteration
        return self.store_episode(episode) if self.store_episode is not None else ""

    def _build_error(
        self, failed: Sequence[FailedEpisode], played: int, hints: Sequence[str]
    ) -> PosttrainError:
        first = failed[0]
        count, of = self._sum_recent_counts(len(failed), played)
        limit = (
            "nothing is left to use"
            if len(failed) == played
            else f"{self.setting} allows {self.max_share:g}"
        )
        hint = next((f"; {text}" for text in hints if text), "")
        error = self.error(
            f"{count} of the newest {of} episodes failed ({limit}). The first of this round: {first.episode_label}: "
            f"{first.failure_label}{hint}"
        )
        if first.trace:
            error.add_note(first.trace)
        return error
