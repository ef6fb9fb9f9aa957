"""Token ids of rollouts on disk, beside their trajectories, so that text is never tokenised again.

T completion tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

from rl_core.analysis.trajectories import read_trajectories
from rl_core.data.files import MAX_LINE
from rl_core.errors import DataError
from rl_core.storage.single_files import replacing
from rl_core.types import Rollout

__all__ = ["read_rollouts", "tokens_path", "write_tokens"]


def tokens_path(trajectories: Path) -> Path:
    """Path of the tokens of a trajectories_NAME.jsonl: tokens_NAME.jsonl beside it."""
    return trajectories.with_name(trajectories.name.replace("trajectories", "tokens", 1))


def write_tokens(path: Path, rollouts: Iterable[Rollout]) -> None:
    """One line for each rollout, in the order of its trajectories file.

    {"prompt": [ids], "completion": [ids], "runs": [lengths of sampled, observed, sampled, ... tokens]}, and
    "contexts": [`Rollout.context_starts`] where there are several.
    """
    with replacing(path) as file:
        for rollout in rollouts:
            runs = [(bool(sampled), sum(1 for _ in run)) for sampled, run in groupby(rollout.loss_mask)]
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
    """The first `limit` rollouts of a trajectories file, with their tokens; log-probabilities are not kept.

    Raises: DataError naming file and line where the tokens do not belong to the trajectories.
    """
    path = tokens_path(trajectories)
    rollouts = []
    rows = _rows(path)
    for number, trajectory in enumerate(islice(read_trajectories(trajectories), limit), start=1):
        prompt, completion, mask, starts = next(rows, ([], [], [], []))
        if len(completion) != trajectory.num_completion_tokens or sum(mask) != trajectory.num_action_tokens:
            raise DataError(
                f"{path}:{number}: {len(completion)} tokens, but the trajectory has "
                f"{trajectory.num_completion_tokens}; the two files do not belong together"
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


def _rows(path: Path) -> Iterator[tuple[list[int], list[int], list[bool], list[int]]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            try:
                row = json.loads(line)
                prompt, completion, runs = (row[name] for name in ("prompt", "completion", "runs"))
                contexts = row.get("contexts", [])
                if not all(map(_are_counts, (prompt, completion, runs, contexts))) or sum(runs) != len(completion):
                    raise ValueError("expected lists of ids, and runs that add up to the completion")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(f"{path}:{number}: this is no line of a tokens file ({error})") from None
            mask = [sampled for index, length in enumerate(runs) for sampled in [index % 2 == 0] * length]
            yield prompt, completion, mask, contexts


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)
