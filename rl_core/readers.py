"""Readers of a run's files as pandas DataFrames: metrics, trajectories, rewards.

`run` is the `output` folder of a training, a finished stage's folder, a pipeline's folder (`outputs/NAME`; `stage`
selects one of its stages, of which the newest result counts), or the file itself. pandas is imported on first use.
The iterators that read one line at a time are `rl_core.analysis.read_trajectories`, `iter_metrics` and `iter_rewards`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.curve_figure import CurveFigure, build_curve_figure
from rl_core.analysis.trajectories import read_trajectories as iter_trajectories
from rl_core.data.files import MAX_LINE
from rl_core.errors import DataError
from rl_core.storage.append_log import (
    CheckedLine,
    has_valid_checksum,
    read_line_again,
    report_damaged_line,
)
from rl_core.types import Trajectory

if TYPE_CHECKING:
    import pandas as pd


METRICS_FILE = "metrics.jsonl"
REWARDS_FILE = "rewards.jsonl"
RECENT_FILE = "recent_rollouts.jsonl"
ANALYSIS_FILE = "analysis.csv"
HISTORY_FILE = "metrics_history.jsonl"


def read_metrics(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """Read metrics: one row per step, one column per metric, indexed by step; NaN if a metric was not measured.

    Of several values at one step, as after a resume, the newest counts.
    Raises: DataError if there are no metrics.
    """
    return build_metrics_frame(iter_metrics(run, stage=stage))


def read_rewards(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """Read one row per training rollout: iteration, level, seed, sample, success, reward, masked, and every component.

    Components are columns `reward/NAME` (raw) and `weighted/NAME` (contribution to the reward).
    Raises: DataError if there is no such file, or for an invalid line.
    """
    import pandas as pd

    rows = [_flatten_reward_row(row) for row in iter_rewards(run, stage=stage)]
    return pd.DataFrame.from_records(rows)


def read_analysis(run: str | Path, *, stage: str = "") -> pd.DataFrame:
    """Read the table of an analysis stage: one value per row, as model, group, name, metric, value, low, high, n.

    `group` is all, level, kind, tool, or `minus MODEL` for a paired difference; low and high bound the 95% interval.
    Raises: DataError if there is no analysis.
    """
    import pandas as pd

    path = _find_file(run, ANALYSIS_FILE, stage)
    frame = pd.read_csv(
        path,
        keep_default_na=False,
        na_values={name: [""] for name in ("value", "low", "high", "n")},
    )
    if list(frame.columns) != ["model", "group", "name", "metric", "value", "low", "high", "n"]:
        raise DataError(f"{path}: is not an analysis.csv")
    return frame


def read_history(run: str | Path, *, stage: str = "") -> dict[str, Any]:
    """Read the newest values of every metric, as a dashboard shows them, during training as well as afterwards.

    Returns: {"window": 10, "summary": {name: {last, mean, slope, p10, p50, p90, is_full}}, "metrics": {name: [[step,
    value], ...]}}; the summary is that of the newest export. A torn last line and damaged lines are skipped.
    Raises: DataError if there is no such file.
    """
    complete_name = HISTORY_FILE.removesuffix("l")
    path = _find_result_folder(run, [HISTORY_FILE, complete_name], stage) or Path(run)
    lines_path = path / HISTORY_FILE if path.is_dir() else path
    history: dict[str, Any]
    if lines_path.suffix != ".jsonl" or not lines_path.is_file():
        complete_path = _find_file(path, complete_name)
        try:
            history = json.loads(complete_path.read_bytes())
        except ValueError as error:
            raise DataError(f"{complete_path}: is not JSON ({error})") from None
        return history
    history = {"window": 0, "summary": {}, "metrics": {}}
    for number, row in _iter_json_lines(lines_path):
        if not isinstance(row.get("metrics"), dict) or not isinstance(row.get("summary"), dict):
            raise DataError(f"{lines_path}:{number}: is not an export of metrics")
        history |= {"window": row.get("window", 0), "summary": row["summary"]}
        for name, points in row["metrics"].items():
            history["metrics"].setdefault(name, []).extend(points)
    return history


def read_trajectories(run: str | Path, *, turns: bool = False, stage: str = "") -> pd.DataFrame:
    """Read one row per episode, of all trajectories files of an evaluation stage (column `model`) or of one file.

    Args:
        turns: True = one row per turn: what identifies the episode, then action, tool, observation, is_error.
    Raises: DataError if there are no trajectories, or for an invalid line.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for name, path in _find_trajectory_files(run, stage):
        model_column = {"model": name} if name else {}
        for trajectory, extra_columns in _iter_trajectories_with_columns(path):
            columns = {**model_column, **extra_columns}
            if turns:
                rows += _build_turn_rows(trajectory, columns)
            else:
                rows.append({**columns, **_build_episode_row(trajectory)})
    return pd.DataFrame.from_records(rows)


def trajectory_frame(trajectories: Iterable[Trajectory]) -> pd.DataFrame:
    """Build the table of `read_trajectories` from trajectories in memory (`Evaluation.trajectories`)."""
    import pandas as pd

    rows = [_build_episode_row(trajectory) for trajectory in trajectories]
    return pd.DataFrame.from_records(rows)


def plot_metrics(*runs: str | Path, names: Sequence[str] = (), stage: str = "") -> CurveFigure:
    """Draw curves of one run or several as a figure that a notebook shows; `.save("curves.svg")` writes it.

    Args:
        runs: as `run` of the other readers; the legend shows the last part of each path that tells them apart.
        names: metrics, a panel each; `*` matches any characters ("reward/*"). Default: reward, success, KL, entropy,
            length, loss.
    Raises: DataError without a run, for a run without metrics, or a name that none of them logged.
    """
    if not runs:
        raise DataError("plot_metrics: name at least one run, the output folder of a training")
    if len(set(map(str, runs))) < len(runs):
        raise DataError("plot_metrics: a run is named twice; name each once")
    labels = _shorten_run_names([Path(run) for run in runs]) if len(runs) > 1 else [""]
    return build_curve_figure(
        {label: read_series(run, stage=stage) for label, run in zip(labels, runs, strict=True)},
        names,
    )


def read_series(run: str | Path, *, stage: str = "") -> dict[str, list[tuple[float, float]]]:
    """Read every metric as its points (step, value), ordered by step; the newest value at a step counts."""
    series: dict[str, dict[float, float]] = {}
    for step, metrics in iter_metrics(run, stage=stage):
        for name, value in metrics.items():
            series.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in series.items()}


def _shorten_run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def build_metrics_frame(points: Iterable[tuple[float, Mapping[str, float]]]) -> pd.DataFrame:
    """Build one row per step, sorted by step, from (step, metrics)."""
    import pandas as pd

    by_step: dict[float, dict[str, float]] = {}
    for step, metrics in points:
        by_step.setdefault(step, {}).update(metrics)
    steps = sorted(by_step)
    labels = [int(step) if float(step).is_integer() else step for step in steps]
    names = sorted({name for metrics in by_step.values() for name in metrics})
    columns = {name: [by_step[step].get(name, math.nan) for step in steps] for name in names}
    return pd.DataFrame(columns, index=pd.Index(labels, name="step"))


def iter_metrics(run: str | Path, *, stage: str = "") -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of every line of a metrics.jsonl; skip a torn last line."""
    path = _find_file(run, METRICS_FILE, stage)
    for number, row in _iter_json_lines(path):
        if not isinstance(row.get("metrics"), dict) or not isinstance(row.get("step"), int):
            raise DataError(
                f'{path}:{number}: contains no metrics (a line is {{"step": 3, "metrics": {{...}}}})'
            )
        yield row["step"], row["metrics"]


def iter_rewards(run: str | Path, *, stage: str = "") -> Iterator[dict[str, Any]]:
    """Yield every line of a rewards.jsonl; skip a torn last line."""
    path = _find_file(run, REWARDS_FILE, stage)
    for number, row in _iter_json_lines(path):
        if not isinstance(row.get("rewards"), dict) or "iteration" not in row:
            raise DataError(
                f"{path}:{number}: contains no rewards of rollouts (a line has 'iteration', 'rewards', ...)"
            )
        yield row


def _find_result_folder(run: str | Path, names: Sequence[str], stage: str = "") -> Path | None:
    """Find the folder with a file matching one of the names (globs): `run` itself, or the newest result of a stage in
    it.

    Returns: None without such a folder, or if `run` is a file.
    Raises: DataError if several stages of a pipeline have one and none is named, or the named stage has none.
    """
    path = Path(run)
    if not path.is_dir() or (not stage and _has_file(path, names)):
        return path if path.is_dir() else None
    newest: dict[str, Path] = {}  # by stage
    for folder in sorted(path.glob("stages/*/*/"), key=_read_finish_time):
        is_result = "." not in folder.name  # unlike KEY.tracking and tokens.cache
        if is_result and _has_file(folder, names):
            newest[folder.parent.name] = folder
    stages = ", ".join(sorted(newest))
    if stage and stage not in newest:
        alternatives = f"; there are: {stages}" if stages else ""
        raise DataError(f"{path}: no stage '{stage}' with a {names[0]}{alternatives}")
    if len(newest) > 1 and not stage:
        raise DataError(
            f"{path}: several stages have a {names[0]}: {stages}. Name one: stage='{min(newest)}'"
        )
    return newest[stage] if stage else next(iter(newest.values()), None)


def _has_file(folder: Path, names: Sequence[str]) -> bool:
    return any(next(folder.glob(name), None) is not None for name in names)


def _read_finish_time(folder: Path) -> float:
    """Return the time at which a stage's result was published."""
    manifest = folder / "manifest.json"
    return (manifest if manifest.is_file() else folder).stat().st_mtime


def _find_file(run: str | Path, name: str, stage: str = "") -> Path:
    path = Path(run)
    folder = _find_result_folder(path, [name], stage)
    file = folder / name if folder is not None else path
    if not file.is_file():
        problem = f"there is no {name} in it" if path.is_dir() else "no such file or folder"
        raise DataError(f"{path}: {problem}")
    return file


def _iter_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file, without checksums. Report and skip a line that was damaged."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: the line is longer than {MAX_LINE // 2**20} MiB")
            start, end = end, end + len(line)
            if line.endswith(b"\n") and not has_valid_checksum(line):
                line = read_line_again(file, line, start)
            if line.endswith(b"\n") and not has_valid_checksum(line):
                problem = f"line {number}, damaged (its checksum does not match)"
                report_damaged_line(path, CheckedLine(None, start, end, problem))
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # torn by a kill, or still being written
                    return
                raise DataError(f"{path}:{number}: is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: must be an object")
            row.pop("crc", None)
            yield number, row


def _flatten_reward_row(row: Mapping[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name != "rewards"}
    return columns | _build_reward_columns(row["rewards"])


def _build_reward_columns(rewards: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name if name.startswith("weighted/") else f"reward/{name}": value
        for name, value in rewards.items()
    }


def _find_trajectory_files(run: str | Path, stage: str) -> list[tuple[str, Path]]:
    """Find (model name, file); the name is "" for a file of no particular model."""
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
    model_files = [
        (path.stem.removeprefix("trajectories_"), path)
        for path in sorted(folder.glob("trajectories_*.jsonl"))
    ]
    if model_files:
        return model_files
    paths = [folder / name for name in ("trajectories.jsonl", RECENT_FILE)]
    return [("", path) for path in paths if path.is_file()][:1]


def iter_recent_trajectories(path: Path) -> Iterator[tuple[int, Trajectory]]:
    """Yield (iteration, trajectory) of a recent_rollouts.jsonl, oldest first. Raises: DataError."""
    for trajectory, columns in _iter_trajectories_with_columns(path):
        yield int(columns["iteration"] or 0), trajectory


def _iter_trajectories_with_columns(path: Path) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
    """Yield trajectories and further columns: the iteration of each recent training rollout."""
    if path.name != RECENT_FILE:
        for trajectory in iter_trajectories(path):
            yield trajectory, {}
        return
    for _, row in _iter_json_lines(path):
        iteration = row.pop("iteration", None)
        yield Trajectory.from_json(row), {"iteration": iteration}


def _build_episode_row(trajectory: Trajectory) -> dict[str, Any]:
    columns = {
        name: value
        for name, value in trajectory.to_json().items()
        if name not in ("turns", "rewards", "row")
    }
    columns["num_turns"] = len(trajectory.turns)
    columns["tool_calls"] = sum(len(turn.calls) for turn in trajectory.turns)
    columns["misused"] = sum(turn.is_error for turn in trajectory.turns)
    columns["completion"] = trajectory.completion
    columns |= _build_reward_columns(trajectory.rewards)
    columns |= {f"row/{name}": value for name, value in trajectory.row.items()}
    return columns


def _build_turn_rows(trajectory: Trajectory, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    episode = {
        name: getattr(trajectory, name) for name in ("environment", "level", "seed", "sample")
    }
    return [
        {
            **columns,
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
