"""`posttrain compare`: any number of runs side by side: settings, stages, curves, results on the same episodes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.analysis.statistics import bootstrap_paired_difference, sign_test
from rl_core.analysis.training_curves import (
    SweptConfiguration,
    TrainingCurve,
    draw_learning_curves,
    read_training_curves,
)
from rl_core.analysis.trajectories import find_turning_point, read_trajectories
from rl_core.errors import DataError, SettingsError
from rl_core.evaluation import Evaluation
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from tasks.stage_registry import list_policy_stages, list_stage_names, list_training_stages
from tasks.stages.evaluate import read_evaluation, resolve_trajectories_path
from tasks.tracking import RunRow, Tracking, find_run, list_stage_runs
from tasks.tracking.run_list import find_differing_settings

CURVES = (
    "eval/success_rate",
    "train/success_rate",
    "reward/mean",
    "eval/loss",
    "train/loss",
    "policy/loss",
)
MAX_EXAMPLE_EPISODES = 5  # episodes whose outcomes differ, for each pair
_MAX_LISTED_RUNS = 5000  # runs among which names are looked up


@dataclass(frozen=True)
class _ComparedRun:
    """One run with the finished stages that it made or took."""

    row: RunRow
    stages: dict[str, Path]  # folders that are here

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def last_trained_folder(self) -> Path | None:
        """Folder of the stage that it trained last."""
        done = [self.stages[name] for name in list_training_stages() if name in self.stages]
        return done[-1] if done else None

    @property
    def knows_success(self) -> bool:
        """False where nothing told success in its evaluation, which has rewards alone."""
        folder = self.stages.get("evaluate")
        path = folder / "summary.json" if folder is not None else None
        models = (
            json.loads(path.read_text()).get("models", {})
            if path is not None and path.is_file()
            else {}
        )
        return all(row.get("knows_success", True) for row in models.values())

    def read_newest_evaluation(self) -> tuple[Evaluation, Path] | None:
        """Evaluation of the newest policy, and the file of its episodes."""
        folder = self.stages.get("evaluate")
        if folder is None:
            return None
        for model in (*reversed(list_policy_stages()), "base"):
            if resolve_trajectories_path(folder, model).is_file():
                return read_evaluation(folder, model), resolve_trajectories_path(folder, model)
        return None


def compare_tracked_runs(
    output: Path, uri: str | None, run_names: Sequence[str], report_folder: Path | None = None
) -> dict[str, Any]:
    """Comparison of runs as plain values; the first is what the others are compared with.

    Args:
        wanted: names, ids or pipelines, as `posttrain runs` lists them. out: folder for compare.json and curves.png.
    Raises: DataError for an unknown run; SettingsError for fewer than two.
    """
    output = output.resolve()
    rows = Tracking(uri, output).list_runs(limit=_MAX_LISTED_RUNS)
    found = list({row.run_id: row for row in (find_run(rows, name) for name in run_names)}.values())
    if len(found) < 2:
        raise SettingsError("compare: name at least two different runs (posttrain runs lists them)")
    runs = [_ComparedRun(row, _find_stage_folders(rows, row, output)) for row in found]
    curves = {run.name: _read_run_curves(run) for run in runs}
    told = {
        "runs": [
            {
                "run": run.name,
                "status": run.row.status.lower(),
                "result": run.row.tags.get("result", ""),
            }
            for run in runs
        ],
        "settings": _transpose_settings(
            {run.name: find_setting_differences(found)[run.row.run_id] for run in runs}
        ),
        "stages": {
            name: {run.name: run.stages[name].name if name in run.stages else "" for run in runs}
            for name in list_stage_names()
            if any(name in run.stages for run in runs)
        },
        "curves": _summarize_curves(curves),
        "episodes": [_compare_episodes(runs[0], other) for other in runs[1:]],
    }
    if report_folder is not None:
        make_folder(report_folder)
        write_json_atomic(report_folder / "compare.json", told)
        drawn = next(
            (name for name in CURVES if any(name in found for found in curves.values())), ""
        )
        draw_learning_curves(
            report_folder / "curves.png",
            [
                SweptConfiguration(name, {}, None, [found[drawn]])
                for name, found in curves.items()
                if drawn in found
            ],
            drawn,
        )
    return told


def find_setting_differences(rows: Sequence[RunRow]) -> dict[str, dict[str, str]]:
    """By run id, the settings that are not the same in all these runs, of whichever pipelines they are."""
    return find_differing_settings(
        dataclasses.replace(row, tags={**row.tags, "pipeline": ""}) for row in rows
    )


def _find_stage_folders(rows: Sequence[RunRow], run: RunRow, output: Path) -> dict[str, Path]:
    """Folders of the stages that a run made, or took from an earlier one."""
    keys = {
        row.tags["stage"]: row.tags["stage_key"]
        for row in list_stage_runs(rows, run)
        if "stage_key" in row.tags
    }
    by_id = {row.run_id: row.tags.get("stage_key", "") for row in rows}
    for name in list_stage_names():
        source = run.tags.get(f"cached.{name}")
        if source:
            keys.setdefault(name, by_id.get(source) or source)
    home = output / run.tags.get("pipeline", "") / "stages"
    return {name: home / name / key for name, key in keys.items() if (home / name / key).is_dir()}


def _transpose_settings(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    keys = dict.fromkeys(key for found in settings.values() for key in found)
    return {key: {run: found.get(key, "-") for run, found in settings.items()} for key in keys}


def _read_run_curves(run: _ComparedRun) -> dict[str, TrainingCurve]:
    if run.last_trained_folder is None:
        return {}
    try:
        return read_training_curves(
            run.last_trained_folder / "metrics.jsonl", frozenset(CURVES)
        ).curves
    except DataError:
        return {}


def _summarize_curves(curves: Mapping[str, Mapping[str, TrainingCurve]]) -> dict[str, Any]:
    """Last value of each curve in each run, and the first step at which a run leaves the first one's."""
    told: dict[str, Any] = {}
    first = next(iter(curves))
    for name in CURVES:
        have = {
            run: found[name]
            for run, found in curves.items()
            if name in found and found[name].values
        }
        if len(have) < 2:
            continue
        told[name] = {
            "last": {run: curve.values[-1] for run, curve in have.items()},
            "parts_at": {
                run: _find_divergence_step(have[first], curve)
                for run, curve in have.items()
                if run != first
            }
            if first in have
            else {},
        }
    return told


def _find_divergence_step(one: TrainingCurve, other: TrainingCurve) -> float | None:
    """First step that both have with different values; None = they never part."""
    values = dict(zip(one.steps, one.values, strict=True))
    pairs = zip(other.steps, other.values, strict=True)
    return next((step for step, value in pairs if step in values and values[step] != value), None)


def _compare_episodes(first: _ComparedRun, other: _ComparedRun) -> dict[str, Any]:
    """The other run minus the first on the episodes that both have played."""
    told: dict[str, Any] = {"first": first.name, "second": other.name}
    ours, theirs = first.read_newest_evaluation(), other.read_newest_evaluation()
    if ours is None or theirs is None:
        lacking = first.name if ours is None else other.name
        return {**told, "why": f"'{lacking}' has no evaluation here"}
    before = {episode.key: episode for episode in ours[0].episodes}
    pairs = [
        (before[episode.key], episode) for episode in theirs[0].episodes if episode.key in before
    ]
    if not pairs:
        return {
            **told,
            "why": "they have played no episode in common (evaluate.levels, episodes, episodes_seed)",
        }
    metric = "success" if first.knows_success and other.knows_success else "reward"
    value = operator.attrgetter(metric)
    gain = bootstrap_paired_difference(
        [value(new) for _, new in pairs], [value(old) for old, _ in pairs]
    )
    wins, losses = (
        sum(sign * (value(new) - value(old)) > 0 for old, new in pairs) for sign in (1, -1)
    )
    levels = dict.fromkeys(old.level for old, _ in pairs)
    return {
        **told,
        "episodes": len(pairs),
        "metric": metric,
        metric: [
            _compute_mean([value(episode) for episode in side[0].episodes])
            for side in (ours, theirs)
        ],
        "gain": gain._asdict(),
        "wins": wins,
        "losses": losses,
        "p_value": sign_test(wins, losses),
        "gain_by_level": {
            level: _compute_mean(
                [value(new) - value(old) for old, new in pairs if old.level == level]
            )
            for level in levels
        },
        "part": _find_diverging_episodes(
            ours[1], theirs[1], [old.key for old, new in pairs if value(old) != value(new)]
        ),
    }


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _find_diverging_episodes(
    ours: Path, theirs: Path, keys: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """The first episodes with different outcomes: where their turns part, and what is done there."""
    wanted = set(keys[:MAX_EXAMPLE_EPISODES])
    sides = []
    for path in (ours, theirs):
        played = (
            one
            for one in read_trajectories(path)
            if (one.level, one.seed) in wanted and one.sample == 0
        )
        sides.append({(one.level, one.seed): one for one in played})
    told = []
    for key in keys[:MAX_EXAMPLE_EPISODES]:
        pair = [side.get(key) for side in sides]
        if pair[0] is None or pair[1] is None:
            continue
        turn = find_turning_point(pair[0], pair[1])
        said = [
            one.turns[turn].action if turn is not None and turn < len(one.turns) else ""
            for one in pair
            if one
        ]
        told.append(
            {
                "level": key[0],
                "seed": key[1],
                "prompt": pair[0].prompt,
                "success": [one.success for one in pair if one],
                "reward": [one.reward for one in pair if one],
                "turn": turn,
                "actions": said,
            }
        )
    return told


def format_comparison(comparison: Mapping[str, Any]) -> str:
    """A comparison for the terminal."""
    runs = [row["run"] for row in comparison["runs"]]
    letters = dict(
        zip(
            runs,
            itertools.chain("ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(str, itertools.count(27))),
            strict=False,
        )
    )
    lines = [
        f"{letters[row['run']]}  {row['run']}  {row['status']}  {row['result'][:90]}"
        for row in comparison["runs"]
    ]
    lines += ["", "settings that differ"]
    lines += _format_columns(
        [(key, [values[run] for run in runs]) for key, values in comparison["settings"].items()],
        letters,
    )
    lines += ["", "stages"]
    for name, keys in comparison["stages"].items():
        same = len(set(keys.values())) == 1
        lines.append(
            f"  {name:<14}"
            + (
                "shared by all"
                if same
                else "  ".join(f"{letters[r]} {k[:8] or '-'}" for r, k in keys.items())
            )
        )
    lines += [
        "",
        "curves of the last training stage: last value, and the first step that is not that of A",
    ]
    for name, curve in comparison["curves"].items():
        parts = [
            f"{letters[run]} {value:.4g}"
            + (
                f" (from step {curve['parts_at'][run]:g})"
                if curve["parts_at"].get(run) is not None
                else ""
            )
            for run, value in curve["last"].items()
        ]
        lines.append(f"  {name:<20}" + "  ".join(parts))
    for pair in comparison["episodes"]:
        lines += ["", *_format_episode_pair(pair, letters)]
    return "\n".join(lines)


def _format_columns(
    rows: Sequence[tuple[str, Sequence[str]]], letters: Mapping[str, str]
) -> list[str]:
    if not rows:
        return ["  none"]
    width = max(len(key) for key, _ in rows)
    cells = [
        [letter for letter in letters.values()],
        *([value[:40] for value in values] for _, values in rows),
    ]
    widths = [max(len(line[index]) for line in cells) for index in range(len(letters))]
    heads = ["", *(key for key, _ in rows)]
    return [
        f"  {head:<{width}}  "
        + "  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip()
        for head, line in zip(heads, cells, strict=True)
    ]


def _format_episode_pair(pair: Mapping[str, Any], letters: Mapping[str, str]) -> list[str]:
    one, other = letters[pair["first"]], letters[pair["second"]]
    if "why" in pair:
        return [f"{other} against {one}: {pair['why']}"]
    gain, metric = pair["gain"], pair["metric"]
    before, after = (_format_value(value, metric) for value in pair[metric])
    difference, low, high = (
        _format_change(gain[name], metric) for name in ("difference", "low", "high")
    )
    lines = [
        f"{other} against {one} on {pair['episodes']} shared episodes: {metric} {after} against {before}, {difference} "
        f"[{low}, {high}]; better on {pair['wins']}, worse on {pair['losses']}, sign test p = {pair['p_value']:.3g}"
    ]
    levels = ", ".join(
        f"{level} {_format_change(value, metric)}" for level, value in pair["gain_by_level"].items()
    )
    lines.append(f"  by level: {levels}")
    for episode in pair["part"]:
        where = (
            "in the answer's scoring"
            if episode["turn"] is None
            else f"at turn {episode['turn'] + 1}"
        )
        acts = " | ".join(
            f"{name}: {text[:50]!r}"
            for name, text in zip((one, other), episode["actions"], strict=True)
        )
        outcome = _format_outcome(episode, (one, other), metric)
        lines.append(f"  {episode['level']} {episode['seed']}: {outcome}, parts {where}  {acts}")
    return lines


def _format_value(value: float, metric: str) -> str:
    return f"{value:.1%}" if metric == "success" else f"{value:.4g}"


def _format_change(value: float, metric: str) -> str:
    return f"{100 * value:+.1f} points" if metric == "success" else f"{value:+.4g}"


def _format_outcome(episode: Mapping[str, Any], letters: Sequence[str], metric: str) -> str:
    """Names of the sides that were right; where nobody can tell, the reward of each."""
    if metric != "success":
        return ", ".join(
            f"{name} {value:.4g}" for name, value in zip(letters, episode[metric], strict=True)
        )
    right = [name for name, ok in zip(letters, episode["success"], strict=True) if ok]
    return f"{' and '.join(right) or 'neither'} right"
