"""Failed episodes: what is stored about them, and the failure share that stops a stage.

An episode fails if its environment raises, hangs or breaks the protocol, or if a reward function does so on it. Failed
episodes are excluded from the update and from every rate; a stage stops if too many fail.
"""

from __future__ import annotations

import re
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_core.environments.environment import Environment
from rl_core.errors import EnvironmentFault, PosttrainError
from rl_core.types import Message, Trajectory

MIN_EPISODES = 50  # smallest denominator of the share: fewer episodes say little
WINDOW_COLLECTIONS = 10  # collections (iterations) whose episodes are counted together
TRACE_CHARACTERS = 4000


@dataclass(slots=True)
class FailedEpisode:
    """A failed episode, with everything needed to replay it."""

    trajectory: Trajectory  # up to the failure; without success
    messages: list[Message]  # opening messages; [] = failed before them
    failed_in: str  # "the environment's reset", "step 2 of the environment", "reward 'package.module:function'"
    error: str  # type and text of the exception
    trace: str = ""  # traceback without addresses
    iteration: int | None = None  # of the training; None = an evaluation
    agent_seed: int | None = None  # of the random numbers of an agent, if one played the episode
    game_moves: list[str] | None = None  # of both players of a game between policies, in order

    @property
    def episode_label(self) -> str:
        """Environment, level, seed and sample, for messages."""
        played = self.trajectory
        return f"environment '{played.environment}', level '{played.level}', seed {played.seed}, sample {played.sample}"

    @property
    def failure_label(self) -> str:
        """Episode and error, for messages."""
        separator = " " if self.failed_in.startswith("reward ") else ": "
        return f"{self.failed_in}{separator}{self.error}"

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict."""
        return {**asdict(self), "trajectory": self.trajectory.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FailedEpisode:
        """Read the result of `to_json`."""
        names = cls.__dataclass_fields__
        known = {name: value for name, value in row.items() if name in names}
        return cls(**{**known, "trajectory": Trajectory.from_json(row["trajectory"])})


# Stores an episode and returns how to view it; "" = not stored.
StoreFailedEpisode = Callable[[FailedEpisode], str]


def format_error_trace(error: BaseException) -> str:
    """Format the end of a traceback, causes included, without addresses, which differ between processes."""
    text = "".join(traceback.format_exception(error))
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)[-TRACE_CHARACTERS:]


@dataclass
class EpisodeFailureMonitor:
    """Counter of failed episodes that has them stored and ends a stage if too many failed.

    The share is taken over the newest WINDOW_COLLECTIONS collections, and over MIN_EPISODES if they have fewer. A
    `max_share` of 0 stops at the first failure; 1 never stops, unless every episode of a collection failed, which
    leaves
    nothing to use. In a mixture the same share also applies to each environment, over the same collections.
    """

    max_share: float
    setting: str = "sampling.max_failed_share"  # its name, for messages
    error: type[PosttrainError] = EnvironmentFault  # raised beyond it
    store_episode: StoreFailedEpisode | None = None
    iteration: int | None = None  # of the training, recorded with the episodes
    # True = other episodes of this iteration were played, so all of this collection may fail.
    is_refill: bool = False
    total: int = 0  # failed since the start
    played: int = 0  # since the last `take_counts`
    failed: int = 0
    _recent_counts: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_COLLECTIONS - 1)
    )  # (failed, played)
    # By environment of a mixture: its (failed, played) in the newest collections. {} = there is one environment.
    _environment_counts: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def watch_environments(self, environment: Environment) -> None:
        """Apply the share to each environment of a mixture, too."""
        if len(environment.parts) > 1:
            for part in environment.parts:
                self._environment_counts.setdefault(part.name, deque(maxlen=WINDOW_COLLECTIONS))

    def has_too_many(self, failed: int, played: int) -> bool:
        """Return whether these failures of the current collection stop the stage."""
        if not failed or ((failed < played or self.is_refill) and self.max_share == 1):
            return False
        if failed == played and not self.is_refill:
            return True
        total_failed, total_played = self._sum_recent_counts(failed, played)
        return (
            total_failed > self.max_share * max(total_played, MIN_EPISODES) or self.max_share == 0
        )

    def check_failures(self, failed: Sequence[FailedEpisode], played: int) -> None:
        """Raise `error`, naming the first failure, if the current collection has too many; they are stored first."""
        if self.has_too_many(len(failed), played):
            hints = [self._store_episode_with_iteration(episode) for episode in failed]
            raise self._build_error(failed, played, hints)

    def close_collection(
        self, failed: Sequence[FailedEpisode], played: int, levels: Sequence[str] = ()
    ) -> list[str]:
        """Count a collection and store its failures; return what `store_episode` answered for each.

        Args:
            levels: of the played episodes; needed only for a mixture.
        Raises: `error` if too many failed.
        """
        hints = [self._store_episode_with_iteration(episode) for episode in failed]
        if self.has_too_many(len(failed), played):
            raise self._build_error(failed, played, hints)
        self._count_by_environment(failed, levels, hints)
        self._recent_counts.append((len(failed), played))
        self.total += len(failed)
        self.failed += len(failed)
        self.played += played
        return hints

    def reset(self) -> None:
        """Reset all counts."""
        self._recent_counts.clear()
        for counts in self._environment_counts.values():
            counts.clear()
        self.total = self.failed = self.played = 0

    def take_counts(self) -> tuple[int, int]:
        """Return the failed and played episodes since the last call."""
        counts = self.failed, self.played
        self.failed = self.played = 0
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the window and the total."""
        state: dict[str, Any] = {
            "past": [list(counts) for counts in self._recent_counts],
            "total": self.total,
        }
        if self._environment_counts:
            state["environments"] = {
                name: [list(pair) for pair in counts]
                for name, counts in self._environment_counts.items()
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._recent_counts.clear()
        self._recent_counts.extend((int(failed), int(played)) for failed, played in state["past"])
        self.total = int(state["total"])
        for name, counts in state.get("environments", {}).items():
            pairs = [(int(failed), int(played)) for failed, played in counts]
            self._environment_counts[name] = deque(pairs, maxlen=WINDOW_COLLECTIONS)

    def _count_by_environment(
        self, failed: Sequence[FailedEpisode], levels: Sequence[str], hints: Sequence[str]
    ) -> None:
        """Count a collection for each environment of a mixture. Raises: `error` if too many of one failed."""
        for name, counts in self._environment_counts.items():
            failures = [
                (episode, hint)
                for episode, hint in zip(failed, hints, strict=True)
                if episode.trajectory.environment == name
            ]
            played = sum(level.startswith(f"{name}/") for level in levels)
            if not played:
                continue
            counts.append((len(failures), played))
            total_failed, total_played = (sum(column) for column in zip(*counts, strict=True))
            allowed = self.max_share * max(total_played, MIN_EPISODES)
            if failures and self.max_share < 1 and total_failed > allowed:
                episodes, part_hints = zip(*failures, strict=True)
                raise self._build_error(episodes, played, part_hints, f" of '{name}'", counts)

    def _sum_recent_counts(self, failed: int, played: int) -> tuple[int, int]:
        recent_failed = sum(num_failed for num_failed, _ in self._recent_counts)
        recent_played = sum(num_played for _, num_played in self._recent_counts)
        return failed + recent_failed, played + recent_played

    def _store_episode_with_iteration(self, episode: FailedEpisode) -> str:
        episode.iteration = self.iteration
        return self.store_episode(episode) if self.store_episode is not None else ""

    def _build_error(
        self,
        failed: Sequence[FailedEpisode],
        played: int,
        hints: Sequence[str],
        owner: str = "",
        counts: Iterable[tuple[int, int]] | None = None,
    ) -> PosttrainError:
        """Build the error.

        Args:
            owner: of a mixture, the environment whose episodes are counted. counts: its (failed, played).
        """
        first = failed[0]
        total_failed, total_played = self._sum_recent_counts(len(failed), played)
        if counts is not None:
            total_failed, total_played = (sum(column) for column in zip(*counts, strict=True))
        limit = (
            "nothing is left to use"
            if len(failed) == played and not owner
            else f"{self.setting} allows {self.max_share:g}"
        )
        hint = next((f"; {text}" for text in hints if text), "")
        error = self.error(
            f"{total_failed} of the newest {total_played} episodes{owner} failed ({limit}). The first of this round: "
            f"{first.episode_label}: {first.failure_label}{hint}"
        )
        if first.trace:
            error.add_note(first.trace)
        return error
