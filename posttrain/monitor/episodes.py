"""Latest trajectories and rewards of a run, read from the ends of their files in bounded time and memory."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.monitor.runs import RunView
from posttrain.monitor.tail import read_last_rows

MAX_TRAJECTORY_BYTES = 1 << 20  # read from a file's end: about a thousand trajectories
MAX_REWARD_BYTES = 512 << 10
_TRAJECTORY_FILE_NAME = re.compile(r"trajectories_(.+)\.jsonl")


def list_episode_files(run: RunView) -> dict[str, Path]:
    """List the trajectory files of a run by description; training first."""
    training: dict[str, Path] = {}
    others: dict[str, Path] = {}
    for stage in run.stages:
        if stage.folder is None:
            continue
        recent = stage.folder / "recent_rollouts.jsonl"
        if recent.is_file():
            training[f"{stage.label}: newest training rollouts"] = recent
        try:
            paths = sorted(stage.folder.glob("trajectories_*.jsonl"))
        except OSError:
            continue  # renamed or removed just now
        for path in paths:
            match = _TRAJECTORY_FILE_NAME.fullmatch(path.name)
            others[f"{stage.label}: held-out episodes of {match[1] if match else path.stem}"] = path
    return training | others


def format_replay_name(path: Path, row: Mapping[str, Any]) -> str:
    """Format an episode's name for `posttrain replay`: stage, iteration or evaluated model, level, seed, sample."""
    match = _TRAJECTORY_FILE_NAME.fullmatch(path.name)
    stage, origin = path.parent.parent.name, match[1] if match else row.get("iteration", "")
    return f"{stage}/{origin}/{row.get('level', '')}/{row.get('seed', 0)}/{row.get('sample', 0)}"


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Read the latest trajectories of a file, newest first; skip invalid lines."""
    rows = read_last_rows(path, MAX_TRAJECTORY_BYTES)
    return [row for row in reversed(rows) if isinstance(row.get("turns"), list)]


def has_misuse(row: Mapping[str, Any]) -> bool:
    """Return whether the policy got an error observation."""
    return any(turn.get("is_error") for turn in row["turns"] if isinstance(turn, dict))


def summarize_tool_calls(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarize calls per tool, most used first; misuse without a tool has its own row.

    Returns: {tool, calls, per_episode, share_of_episodes, error_rate, success_rate (of the episodes that used it)}
    """
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    episodes: dict[str, list[bool | None]] = defaultdict(list)
    for row in rows:
        used = set()
        for turn in row["turns"]:
            call = turn.get("tool_call")
            if call is None and not turn.get("is_error"):
                continue  # an answer
            name = str(call.get("name")) if isinstance(call, dict) else "(no tool understood)"
            calls[name] += 1
            errors[name] += bool(turn.get("is_error"))
            used.add(name)
        for name in used:
            episodes[name].append(row.get("success"))
    return [
        {
            "tool": name,
            "calls": count,
            "per_episode": count / len(rows),
            "share_of_episodes": len(episodes[name]) / len(rows),
            "error_rate": errors[name] / count,
            "success_rate": _compute_success_rate(episodes[name]),
        }
        for name, count in calls.most_common(30)
    ]


def _compute_success_rate(successes: Sequence[bool | None]) -> float | None:
    """Return the share of successes; None = no episode tells it."""
    known = [bool(success) for success in successes if success is not None]
    return sum(known) / len(known) if known else None


def summarize_reward_components(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Summarize recent means of each reward component, and their correlation with success.

    Returns: number of rollouts read; per part {part, raw, weighted, on_success, on_failure, correlation}, means of the
    weighted part (of the raw one if there is no weighted), correlation with success (None if either is constant).
    """
    rows = read_last_rows(path, MAX_REWARD_BYTES)
    rows = [row for row in rows if isinstance(row.get("rewards"), dict) and not row.get("masked")]
    if not rows:
        return 0, []
    success = np.array([_parse_number(row.get("success")) for row in rows])  # NaN = unknown
    names = {name for row in rows for name in row["rewards"] if not name.startswith("weighted/")}
    totals = np.array([_parse_number(row.get("reward")) for row in rows])
    table = [_summarize_component("total", totals, None, success)]
    for name in sorted(names):
        raw = np.array([_parse_number(row["rewards"].get(name)) for row in rows])
        weighted = np.array([_parse_number(row["rewards"].get(f"weighted/{name}")) for row in rows])
        table.append(_summarize_component(name, weighted, raw, success))
    return len(rows), table


def _summarize_component(
    name: str, weighted: np.ndarray, raw: np.ndarray | None, success: np.ndarray
) -> dict[str, Any]:
    is_known = np.isfinite(weighted)
    values, wins = weighted[is_known], success[is_known]
    judged = np.isfinite(wins)
    known, known_wins = values[judged], wins[judged]
    varies = len(known) > 2 and float(known.std()) > 1e-12 and float(known_wins.std()) > 0
    return {
        "part": name,
        "raw": None if raw is None else _compute_mean(raw[np.isfinite(raw)]),
        "weighted": _compute_mean(values),
        "on_success": _compute_mean(values[wins > 0]),
        "on_failure": _compute_mean(values[wins == 0]),
        "correlation": float(np.corrcoef(known, known_wins)[0, 1]) if varies else None,
    }


def _parse_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _compute_mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


class EpisodeImages:
    """Renderer of episodes as PNG images, on demand; only for shipped environments."""

    def __init__(self) -> None:
        self._load_renderer = lru_cache(maxsize=8)(_build_renderer)

    def render_png(self, environment: Mapping[str, Any], level: str, seed: int) -> bytes | None:
        """Render the image of an episode; None if its environment has none or is not a shipped one.

        A custom environment is named by import path, in its name or its options; viewing a run must not execute it.
        """
        from rl_core.environments import list_environment_code

        name, options = str(environment.get("name", "")), environment.get("options") or {}
        if not name or list_environment_code(name, options):
            return None
        try:
            return self._load_renderer(name, repr(sorted(options.items())))(level, seed)
        except Exception:  # settings of another version, a missing data file: the page does without
            return None


def _build_renderer(name: str, options: str) -> Callable[[str, int], bytes | None]:
    import ast

    from rl_core.environments import make_environment
    from rl_core.environments.pixel_grid_questions import encode_png

    environment = make_environment(name, dict(ast.literal_eval(options)))

    def draw_png(level: str, seed: int) -> bytes | None:
        image = getattr(environment.episode(seed, level), "image", None)
        return encode_png(image()) if callable(image) else None

    return draw_png
