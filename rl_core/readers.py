"""Readers of a run's files as pandas DataFrames: metrics, trajectories, rewards.

`run` is the `output` folder of a training, a finished stage's folder, a pipeline's folder (`outputs/NAME`; `stage` says
which of its stages, the newest result stands), or the file itself. pandas is imported at the first use.
The iterators that read one line at a time are `rl_core.analysis.read_trajectories`, `iter_metrics` and `iter_rewards`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.trajectories import read_trajectories as iter_trajectories
from rl_core.data.files import MAX_LINE
from rl_core.errors import DataError
from rl_core.storage.line_logs import (
    CheckedLine,
    has_valid_checksum,
    read_line_again,
    report_damaged_line,
)
from rl_core.types import Trajectory

if TYPE_CHECKING:
    import pandas as pd


METRICS_FILE, REWARDS_FILE, RECENT_FILE, ANALYSIS_FILE = (
    "metrics.jsonl",
    "rewards.jsonl",
    "recent_rollouts.jsonl",
    "analysis.csv",
)
HISTORY_FILE = "metrics_history.jsonl"


def read_metrics(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """One row a step, one column a metric, indexed by step; NaN where a metric was not measured.

    Of several values at one step, as a resumed run leaves them, the newest stands.
    Raises: DataError where there are no metrics.
    """
    return build_metrics_frame(iter_metrics(run, stage=stage))


def read_rewards(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """One row a rollout of training: iteration, level, seed, sample, success, reward, masked, and every part.

    Parts are columns `reward/NAME` (raw) and `weighted/NAME` (what it added to the reward).
    Raises: DataError where there is no such file, or a line of it is none.
    """
    import pandas as pd

    return pd.DataFrame.from_records(
        [_flatten_reward_row(row) for row in iter_rewards(run, stage=stage)]
    )


def read_analysis(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """Table of an analysis stage: one value a row, as model, group, name, metric, value, low, high, n.

    `group` is all, level, kind, tool, or `minus MODEL` for a paired difference; low and high bound the 95% interval.
    Raises: DataError where there is no analysis.
    """
    import pandas as pd

    path = _find_file(run, ANALYSIS_FILE, stage)
    frame = pd.read_csv(
        path,
        keep_default_na=False,
        na_values={name: [""] for name in ("value", "low", "high", "n")},
    )
    if list(frame.columns) != ["model", "group", "name", "metric", "value", "low", "high", "n"]:
        raise DataError(f"{path}: is no analysis.csv")
    return frame


def read_history(run: str | Path, *, stage: str = "") -> dict[str, Any]:
    """The newest values of every metric, as a dashboard shows them, while training as well as after it.

    Returns: {"window": 10, "summary": {name: {last, mean, slope, p10, p50, p90, is_full}}, "metrics": {name: [[step,
    value], ...]}}; the summary is that of the newest export. A torn last line is passed over, a damaged one left out.
    Raises: DataError where there is no such file.
    """
    path = _find_result_folder(run, [HISTORY_FILE, HISTORY_FILE.removesuffix("l")], stage) or Path(
        run
    )
    lines = path / HISTORY_FILE if path.is_dir() else path
    if lines.suffix != ".jsonl" or not lines.is_file():
        whole = _find_file(path, HISTORY_FILE.removesuffix("l"))
        try:
            told: dict[str, Any] = json.loads(whole.read_bytes())
        except ValueError as error:
            raise DataError(f"{whole}: is not JSON ({error})") from None
        return told
    found: dict[str, Any] = {"window": 0, "summary": {}, "metrics": {}}
    for number, row in _iter_json_lines(lines):
        if not isinstance(row.get("metrics"), dict) or not isinstance(row.get("summary"), dict):
            raise DataError(f"{lines}:{number}: is no export of metrics")
        found |= {"window": row.get("window", 0), "summary": row["summary"]}
        for name, points in row["metrics"].items():
            found["metrics"].setdefault(name, []).extend(points)
    return found


def read_trajectories(run: str | Path, *, turns: bool = False, stage: str = "") -> pd.DataFrame:
    """One row an episode, of every trajectories file of an evaluation stage (column `model`) or of one file.

    Args:
        turns: one row a turn instead: what identifies the episode, then action, tool, observation, is_error.
    Raises: DataError where there are no trajectories, or a line is none.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for name, path in _find_trajectory_files(run, stage):
        made = (
            _iter_recent_trajectories(path)
            if path.name == RECENT_FILE
            else ((trajectory, {}) for trajectory in iter_trajectories(path))
        )
        for trajectory, extra in made:
            head = {"model": name, **extra} if name else dict(extra)
            rows += (
                _build_turn_rows(trajectory, head)
                if turns
                else [{**head, **_build_episode_row(trajectory)}]
            )
    return pd.DataFrame.from_records(rows)


def trajectory_frame(trajectories: Iterable[Trajectory]) -> pd.DataFrame:
    """As `read_trajectories`, of trajectories in memory (`Evaluation.trajectories`)."""
    import pandas as pd

    return pd.DataFrame.from_records(
        [_build_episode_row(trajectory) for trajectory in trajectories]
    )


def build_metrics_frame(points: Iterable[tuple[float, Mapping[str, float]]]) -> pd.DataFrame:
    """(step, metrics) as one row a step, sorted by step."""
    import pandas as pd

    by_step: dict[float, dict[str, float]] = {}
    for step, metrics in points:
        by_step.setdefault(step, {}).update(metrics)
    index = pd.Index(
        [int(step) if float(step).is_integer() else step for step in sorted(by_step)], name="step"
    )
    names = sorted({name for metrics in by_step.values() for name in metrics})
    columns = {
        name: [by_step[step].get(name, math.nan) for step in sorted(by_step)] for name in names
    }
    return pd.DataFrame(columns, index=index)


def iter_metrics(run: str | Path, *, stage: str = "") -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics) of every line of a metrics.jsonl, one at a time; a torn last line is passed over."""
    path = _find_file(run, METRICS_FILE, stage)
    for number, row in _iter_json_lines(path):
        if not isinstance(row.get("metrics"), dict) or not isinstance(row.get("step"), int):
            raise DataError(
                f'{path}:{number}: holds no metrics (a line is {{"step": 3, "metrics": {{...}}}})'
            )
        yield row["step"], row["metrics"]


def iter_rewards(run: str | Path, *, stage: str = "") -> Iterator[dict[str, Any]]:
    """Every line of a rewards.jsonl, one at a time; a torn last line is passed over."""
    path = _find_file(run, REWARDS_FILE, stage)
    for number, row in _iter_json_lines(path):
        if not isinstance(row.get("rewards"), dict) or "iteration" not in row:
            raise DataError(
                f"{path}:{number}: holds no rewards of rollouts (a line has 'iteration', 'rewards', ...)"
            )
        yield row


def _find_result_folder(run: str | Path, names: Sequence[str], stage: str = "") -> Path | None:
    """The folder that holds a file of one of the names (globs): `run` itself, or the newest result of a stage in it.

    Returns: None where there is none, or where `run` is a file.
    Raises: DataError where several stages of a pipeline have one and none is named, or the one named has none.
    """
    path = Path(run)
    if not path.is_dir() or (not stage and _has_file(path, names)):
        return path if path.is_dir() else None
    newest: dict[str, Path] = {}
    for folder in sorted(path.glob("stages/*/*/"), key=_read_finish_time):
        if "." not in folder.name and _has_file(
            folder, names
        ):  # KEY.tracking and tokens.cache are no results
            newest[folder.parent.name] = folder
    stages = ", ".join(sorted(newest))
    if stage and stage not in newest:
        raise DataError(
            f"{path}: no stage '{stage}' with a {names[0]}"
            + (f"; there are: {stages}" if stages else "")
        )
    if len(newest) > 1 and not stage:
        raise DataError(
            f"{path}: several stages have a {names[0]}: {stages}. Name one: stage='{min(newest)}'"
        )
    return newest[stage] if stage else next(iter(newest.values()), None)


def _has_file(folder: Path, names: Sequence[str]) -> bool:
    return any(next(folder.glob(name), None) is not None for name in names)


def _read_finish_time(folder: Path) -> float:
    """Time at which a stage's result was published."""
    manifest = folder / "manifest.json"
    return (manifest if manifest.is_file() else folder).stat().st_mtime


def _find_file(run: str | Path, name: str, stage: str = "") -> Path:
    path = Path(run)
    folder = _find_result_folder(path, [name], stage)
    found = folder / name if folder is not None else path
    if not found.is_file():
        raise DataError(
            f"{path}: there is no {name} in it"
            if path.is_dir()
            else f"{path}: no such file or folder"
        )
    return found


def _iter_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of a file, without their checksums. A line that was changed since is named and left out."""
    place = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: the line is longer than {MAX_LINE // 2**20} MiB")
            start, place = place, place + len(line)
            if line.endswith(b"\n") and not has_valid_checksum(line):
                line = read_line_again(file, line, start)
            if line.endswith(b"\n") and not has_valid_checksum(line):
                report_damaged_line(
                    path,
                    CheckedLine(
                        None, start, place, f"line {number}, damaged (its checksum does not match)"
                    ),
                )
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # cut off by a kill, or being written just now
                    return
                raise DataError(f"{path}:{number}: is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: has to be an object")
            row.pop("crc", None)
            yield number, row


def _flatten_reward_row(row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in row.items() if name != "rewards"}
    parts = {
        name if name.startswith("weighted/") else f"reward/{name}": v
        for name, v in row["rewards"].items()
    }
    return plain | parts


def _find_trajectory_files(run: str | Path, stage: str) -> list[tuple[str, Path]]:
    """(model name, file); the name is "" where there is one file of no model in particular."""
    if not Path(run).is_dir():
        return [("", Path(run))]
    evaluated, recent = ["trajectories_*.jsonl", "trajectories.jsonl"], [RECENT_FILE]
    if stage:
        folder = _find_result_folder(run, evaluated + recent, stage)
    else:
        folder = _find_result_folder(run, evaluated) or _find_result_folder(run, recent)
    if folder is None:
        raise DataError(
            f"{run}: there is no trajectories file in it (trajectories_NAME.jsonl, {RECENT_FILE})"
        )
    named = [
        (path.stem.removeprefix("trajectories_"), path)
        for path in sorted(folder.glob("trajectories_*.jsonl"))
    ]
    return (
        named
        or [
            ("", path)
            for name in ("trajectories.jsonl", RECENT_FILE)
            if (path := folder / name).is_file()
        ][:1]
    )


def _iter_recent_trajectories(path: Path) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
    """Trajectories of the newest iterations, with the iteration of each."""
    for _, row in _iter_json_lines(path):
        iteration = row.pop("iteration", None)
        yield Trajectory.from_json(row), {"iteration": iteration}


def _build_episode_row(trajectory: Trajectory) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in trajectory.to_json().items()
        if name not in ("turns", "rewards", "row")
    }
    rewards = {
        name if name.startswith("weighted/") else f"reward/{name}": value
        for name, value in trajectory.rewards.items()
    }
    calls = sum(len(turn.calls) for turn in trajectory.turns)
    errors = sum(turn.is_error for turn in trajectory.turns)
    columns = {f"row/{name}": value for name, value in trajectory.row.items()}
    counts = {
        "num_turns": len(trajectory.turns),
        "tool_calls": calls,
        "misused": errors,
        "completion": trajectory.completion,
    }
    return {**plain, **counts, **rewards, **columns}


def _build_turn_rows(trajectory: Trajectory, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    episode = {
        name: getattr(trajectory, name) for name in ("environment", "level", "seed", "sample")
    }
    return [
        {
            **head,
            **episode,
            "turn": index,
            "action": turn.action,
            "tool": turn.tool_call.name if turn.tool_call is not None else None,
            "arguments": turn.tool_call.arguments if turn.tool_call is not None else None,
            "observation": turn.observation,
            "is_error": turn.is_error,
            "num_tokens": turn.num_tokens,
            "calls": len(turn.calls),
            **{f"info/{name}": value for name, value in turn.info.items()},
        }
        for index, turn in enumerate(trajectory.turns)
    ]
