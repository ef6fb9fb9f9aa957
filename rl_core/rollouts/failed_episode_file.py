"""Failed episodes on disk: the first ones of a stage, whole, so that they can be played again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.errors import DataError
from rl_core.storage.checked_lines import read_checked, report_damage, sealed
from rl_core.storage.single_files import append_bytes, truncate_file
from rl_core.types import Rollout

__all__ = ["KEPT_EPISODES", "EpisodeName", "FailedEpisodeFile", "read_failed_episodes"]

KEPT_EPISODES = 50  # of a stage, the first ones


@dataclass(frozen=True, slots=True)
class EpisodeName:
    """Name of an episode for people: policy/12/easy/345/0, evaluate/sft/easy/345/0."""

    stage: str
    of: str  # number of the iteration, or the model that was evaluated
    level: str
    seed: int
    sample: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.of}/{self.level}/{self.seed}/{self.sample}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`. Raises: DataError."""
        parts = text.split("/")
        try:
            stage, of, seed, sample = parts[0], parts[1], int(parts[-2]), int(parts[-1])
            level = "/".join(parts[2:-2])
        except (IndexError, ValueError):
            level = ""
        if not level:
            raise DataError(
                f"episode {text!r} must read STAGE/ITERATION/LEVEL/SEED/SAMPLE, as in policy/12/easy/345/0, or for an "
                "evaluation STAGE/MODEL/LEVEL/SEED/SAMPLE, as in evaluate/policy/easy/345/0"
            )
        return cls(stage, of, level, seed, sample)


class FailedEpisodeFile:
    """Appends the first KEPT_EPISODES failed episodes of a stage to one file.

    A resumed run repeats the iterations since its checkpoint, so their episodes are cut first.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path = path
        self.stage = stage
        self._kept: int | None = None  # None = the file of an interrupted run has not been looked at

    def clear(self) -> None:
        """Remove the episodes of an earlier attempt."""
        self.path.unlink(missing_ok=True)
        self._kept = 0

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Note that an iteration was played: as a record of a trainer, so that nothing of later ones stays."""
        if self._kept is None:
            self._kept = self._cut(iteration)

    def add(self, episode: FailedEpisode, of: str) -> EpisodeName | None:
        """Append one; its name, or None if there are enough. `of`: the iteration's number or the model's name."""
        if self._kept is None:
            self._kept = self._cut(episode.iteration)
        if self._kept >= KEPT_EPISODES:
            return None
        played = episode.trajectory
        name = EpisodeName(self.stage, of, played.level, played.seed, played.sample)
        append_bytes(self.path, sealed({"episode": str(name), **episode.to_json()}, allow_nan=True), synced=True)
        self._kept += 1
        return name

    def _cut(self, iteration: int | None) -> int:
        """Cut the file before the first episode of that iteration or a later one; number of those that stay."""
        if not self.path.is_file():
            return 0
        place = count = 0
        for line in read_checked(self.path):
            found = (line.record or {}).get("iteration")
            if line.record is not None and (iteration is None or found is None or found >= iteration):
                break
            place, count = line.end, count + 1
        truncate_file(self.path, place)
        return count


def read_failed_episodes(path: Path) -> Iterator[tuple[str, FailedEpisode]]:
    """Name and content of the episodes of a file, in order; damaged lines are named and left out."""
    for line in read_checked(path):
        if line.record is None:
            report_damage(path, line, "one failed episode is lost")
            continue
        try:
            yield str(line.record.get("episode", "")), FailedEpisode.from_json(line.record)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: a line is no failed episode ({type(error).__name__}: {error})") from None
