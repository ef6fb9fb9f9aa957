"""Rollout files: the first failed episodes of a stage, and token ids of rollouts.

Failed episodes are stored completely, so that they can be replayed. Token ids are stored next to the trajectories, so
that text is never tokenised again.

T completion tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Self

from rl_core.analysis.trajectories import read_trajectories
from rl_core.data.files import MAX_LINE
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.errors import DataError
from rl_core.storage.append_log import AppendLog, read_records
from rl_core.storage.atomic_files import replace_file
from rl_core.types import Rollout

MAX_FAILED_EPISODES = 50  # per stage
_CONSEQUENCE = "one failed episode is lost"  # of a damaged line


@dataclass(frozen=True, slots=True)
class EpisodeName:
    """A readable name of an episode: policy/12/easy/345/0, evaluate/sft/easy/345/0."""

    stage: str
    source: str  # number of the iteration, or the evaluated model
    level: str
    seed: int
    sample: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.source}/{self.level}/{self.seed}/{self.sample}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form.

        Raises: DataError.
        """
        parts = text.split("/")
        try:
            stage, source, seed, sample = parts[0], parts[1], int(parts[-2]), int(parts[-1])
            level = "/".join(parts[2:-2])
        except (IndexError, ValueError):
            level = ""
        if not level:
            raise DataError(
                f"episode {text!r} must read STAGE/ITERATION/LEVEL/SEED/SAMPLE, as in policy/12/easy/345/0, or for an "
                "evaluation STAGE/MODEL/LEVEL/SEED/SAMPLE, as in evaluate/policy/easy/345/0"
            )
        return cls(stage, source, level, seed, sample)


class FailedEpisodeFile:
    """A file with the first MAX_FAILED_EPISODES failed episodes of a stage.

    A resumed run repeats the iterations since its checkpoint, so their episodes are removed first.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path = path
        self.stage = stage
        self._log = AppendLog(path, synced=True, allow_nan=True, consequence=_CONSEQUENCE)
        # None = the file of an interrupted run has not been read yet
        self._num_episodes: int | None = None

    def clear_file(self) -> None:
        """Remove the episodes of an earlier attempt."""
        self.path.unlink(missing_ok=True)
        self._num_episodes = 0

    def __call__(self, iteration: int, rollouts: Iterable[Rollout]) -> None:
        """Note that an iteration was played, as a record of a trainer: drop episodes of this and later iterations."""
        if self._num_episodes is None:
            self._num_episodes = self._truncate_before(iteration)

    def append_episode(self, episode: FailedEpisode, source: str) -> EpisodeName | None:
        """Append an episode and return its name; return None if the file is full.

        Args:
            source: the iteration's number or the model's name.
        """
        if self._num_episodes is None:
            self._num_episodes = self._truncate_before(episode.iteration)
        if self._num_episodes >= MAX_FAILED_EPISODES:
            return None
        trajectory = episode.trajectory
        name = EpisodeName(self.stage, source, trajectory.level, trajectory.seed, trajectory.sample)
        record = {"episode": str(name), **episode.to_json()}
        self._log.append_record(record)
        self._num_episodes += 1
        return name

    def _truncate_before(self, iteration: int | None) -> int:
        """Cut the file before the first episode of that iteration or a later one; return the number of remaining
        episodes.
        """

        def is_stale(record: dict[str, Any]) -> bool:
            recorded = record.get("iteration")
            return iteration is None or recorded is None or recorded >= iteration

        return self._log.truncate_tail(is_stale)


def read_failed_episodes(path: Path) -> Iterator[tuple[str, FailedEpisode]]:
    """Yield name and content of a file's episodes in order; report and skip damaged lines."""
    for record in read_records(path, consequence=_CONSEQUENCE):
        try:
            yield str(record.get("episode", "")), FailedEpisode.from_json(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: invalid line in a file of failed episodes ({type(error).__name__}: {error})"
            ) from None


def build_tokens_path(trajectories: Path) -> Path:
    """Return the path of the tokens of a trajectories_NAME.jsonl: tokens_NAME.jsonl in the same folder."""
    return trajectories.with_name(trajectories.name.replace("trajectories", "tokens", 1))


def write_tokens(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write one line per rollout, in the order of its trajectories file.

    {"prompt": [ids], "completion": [ids], "runs": [lengths of sampled, observed, sampled, ... tokens]}, and
    "contexts": [`Rollout.context_starts`] if there are several.
    """
    with replace_file(path) as file:
        for rollout in rollouts:
            runs = [
                (bool(sampled), sum(1 for _ in run)) for sampled, run in groupby(rollout.loss_mask)
            ]
            lengths = [length for _, length in runs]
            row = {
                "prompt": rollout.prompt_ids,
                "completion": rollout.completion_ids,
                "runs": lengths if not runs or runs[0][0] else [0, *lengths],
            }
            if rollout.context_starts:
                row["contexts"] = rollout.context_starts
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read_rollouts(trajectories: Path, limit: int) -> list[Rollout]:
    """Read the first `limit` rollouts of a trajectories file with their tokens, without log-probabilities.

    Raises: DataError naming file and line if the tokens do not match the trajectories.
    """
    path = build_tokens_path(trajectories)
    rollouts = []
    rows = _read_token_rows(path)
    for number, trajectory in enumerate(islice(read_trajectories(trajectories), limit), start=1):
        prompt, completion, mask, starts = next(rows, ([], [], [], []))
        if (
            len(completion) != trajectory.num_completion_tokens
            or sum(mask) != trajectory.num_action_tokens
        ):
            raise DataError(
                f"{path}:{number}: {len(completion)} tokens, but the trajectory has "
                f"{trajectory.num_completion_tokens}; the two files do not match"
            )
        rollouts.append(
            Rollout(
                prompt_ids=prompt,
                completion_ids=completion,
                loss_mask=mask,
                sampler_logprobs=[0.0] * len(completion),
                trajectory=trajectory,
                context_starts=starts,
            )
        )
    return rollouts


def _read_token_rows(path: Path) -> Iterator[tuple[list[int], list[int], list[bool], list[int]]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            try:
                row = json.loads(line)
                prompt, completion, runs = (row[name] for name in ("prompt", "completion", "runs"))
                contexts = row.get("contexts", [])
                lists = (prompt, completion, runs, contexts)
                if not all(map(_is_count_list, lists)) or sum(runs) != len(completion):
                    raise ValueError("expected lists of ids, and runs that sum to the completion")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(
                    f"{path}:{number}: invalid line in a tokens file ({error})"
                ) from None
            mask = [
                sampled
                for index, length in enumerate(runs)
                for sampled in [index % 2 == 0] * length
            ]
            yield prompt, completion, mask, contexts


def _is_count_list(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**31 for value in values
    )
