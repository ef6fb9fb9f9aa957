"""Command `posttrain compare`: runs by settings, stages, curves and results; or two models on the same episodes."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    RUN_HELP,
    add_former_config_option,
    add_former_format_option,
    add_json_option,
    add_output_option,
    add_quiet_option,
    add_set_option,
    parse_positive_integer,
)
from posttrain.cli.tables import format_table, print_requested_data
from rl_core.errors import DataError, SettingsError
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from tasks.stage_registry import list_policy_stages, list_stage_names, list_training_stages

if TYPE_CHECKING:
    from rl_core.analysis.training_curves import TrainingCurve
    from rl_core.evaluation import Evaluation
    from rl_core.types import Trajectory
    from tasks.tracking import RunRow

CURVES = (
    "eval/success_rate",
    "train/success_rate",
    "reward/mean",
    "eval/loss",
    "train/loss",
    "policy/loss",
)
MAX_EXAMPLE_EPISODES = 5  # with different outcomes, per pair of runs
_MAX_LISTED_RUNS = 5000  # searched for names

EXAMPLES = (
    "compare demo-7f3a demo-91bc",
    "compare demo other_demo --to comparison    (the newest run of each pipeline)",
    "compare demo --models sft policy    (two models of a pipeline, on its held-out episodes)",
    "compare --models models:/demo@champion demo-7f3a --episodes 10",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    runs = parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help=f"{RUN_HELP}; with --models: the configuration whose episodes they play (default: that of the newest run)",
    )
    runs.required = False  # --models works without
    parser.add_argument(
        "--models",
        metavar="MODEL",
        nargs=2,
        help="two models: folder, hub name, models:/NAME@ALIAS, a run, or a stage: STAGE, STAGE/KEY, .../epochs/N",
    )
    parser.add_argument(
        "--episodes",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="with --models: lost and won episodes to show, each (default: 5)",
    )
    add_former_config_option(parser)
    add_set_option(
        parser, "with --models: override a setting of the configuration; may be repeated"
    )
    add_output_option(parser)
    add_json_option(parser)
    add_former_format_option(parser, ("table", "json"))
    parser.add_argument(
        "--to", metavar="FOLDER", help="also write compare.json and curves.png into FOLDER"
    )
    parser.add_argument("--out", dest="to", help=argparse.SUPPRESS)  # its name in the last release
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Compare runs, or two models."""
    arguments.config = getattr(arguments, "config", None)
    if arguments.models is not None:
        return _compare_models(arguments)
    if not arguments.runs:
        raise SettingsError(
            "name at least two runs (`posttrain runs` lists them), or two models with --models MODEL MODEL"
        )
    settings = run_setup.load_optional_settings(arguments)
    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    if uri is None:
        uri = run_setup.find_tracking_uri(output, arguments.runs[0])
    report_folder = Path(arguments.to) if arguments.to else None
    comparison = compare_tracked_runs(output, uri, arguments.runs, report_folder)
    if not print_requested_data(arguments, comparison):
        run_setup.print_wrapped(format_comparison(comparison))
    return 0


def _compare_models(arguments: argparse.Namespace) -> int:
    """Compare the two models of `--models`, on the episodes of a configuration or of the newest run."""
    from posttrain.cli.compare_models import compare_models

    if arguments.to:
        raise SettingsError(
            "--to: writes a comparison of runs; --models prints (--json for programs)"
        )
    configs = [*(arguments.runs or []), *filter(None, [arguments.config])]
    if len(configs) > 1:
        raise SettingsError(
            f"--models takes at most one configuration, not {len(configs)}; runs are compared without --models"
        )
    arguments.config = configs[0] if configs else None
    return compare_models(arguments)


@dataclass(frozen=True)
class _ComparedRun:
    """Run with the finished stages that it ran or took from the cache."""

    row: RunRow
    stages: dict[str, Path]  # existing folders

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
        """True if its evaluation knows success; otherwise it has only rewards."""
        models = {}
        if "evaluate" in self.stages:
            path = self.stages["evaluate"] / "summary.json"
            if path.is_file():
                models = json.loads(path.read_text()).get("models", {})
        return all(row.get("knows_success", True) for row in models.values())

    def read_newest_evaluation(self) -> tuple[Evaluation, Path] | None:
        """Read the evaluation of the newest policy; return it with the file of its episodes."""
        from tasks.stages.evaluate import read_evaluation, resolve_trajectories_path

        folder = self.stages.get("evaluate")
        if folder is None:
            return None
        for model in (*reversed(list_policy_stages()), "base"):
            path = resolve_trajectories_path(folder, model)
            if path.is_file():
                return read_evaluation(folder, model), path
        return None


def compare_tracked_runs(
    output: Path, uri: str | None, run_names: Sequence[str], report_folder: Path | None = None
) -> dict[str, Any]:
    """Compare runs with the first one; return the comparison as a record.

    Args:
        run_names: names, ids or pipelines, as `posttrain runs` lists them.
        report_folder: folder for compare.json and curves.png.
    Raises: DataError for an unknown run; SettingsError for fewer than two.
    """
    from tasks.tracking import Tracking, find_run

    output = output.resolve()
    rows = Tracking(uri, output).list_runs(limit=_MAX_LISTED_RUNS)
    named_rows = [find_run(rows, name) for name in run_names]
    compared_rows = list({row.run_id: row for row in named_rows}.values())
    if len(compared_rows) < 2:
        raise SettingsError("compare: name at least two different runs (posttrain runs lists them)")
    runs = [_ComparedRun(row, _find_stage_folders(rows, row, output)) for row in compared_rows]
    curves = {run.name: _read_run_curves(run) for run in runs}
    differences = find_setting_differences(compared_rows)
    comparison = {
        "runs": [
            {
                "id": run.row.short_id,
                "run": run.name,
                "status": run.row.status.lower(),
                "result": run.row.tags.get("result", ""),
            }
            for run in runs
        ],
        "settings": _transpose_settings({run.name: differences[run.row.run_id] for run in runs}),
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
        write_json_atomic(report_folder / "compare.json", comparison)
        _draw_curves(report_folder / "curves.png", curves)
    return comparison


def _draw_curves(path: Path, curves: Mapping[str, Mapping[str, TrainingCurve]]) -> None:
    """Draw the first curve of `CURVES` that any run has."""
    from rl_core.analysis.training_curves import SweptConfiguration, draw_learning_curves

    metric = next(
        (name for name in CURVES if any(name in run_curves for run_curves in curves.values())), ""
    )
    configurations = [
        SweptConfiguration(run, {}, None, [run_curves[metric]])
        for run, run_curves in curves.items()
        if metric in run_curves
    ]
    draw_learning_curves(path, configurations, metric)


def find_setting_differences(rows: Sequence[RunRow]) -> dict[str, dict[str, str]]:
    """Return, by run id, the settings that differ between these runs, also across pipelines."""
    from tasks.tracking.run_list import find_differing_settings

    return find_differing_settings(
        dataclasses.replace(row, tags={**row.tags, "pipeline": ""}) for row in rows
    )


def _find_stage_folders(rows: Sequence[RunRow], run: RunRow, output: Path) -> dict[str, Path]:
    """Return the folders of the stages that a run ran or took from an earlier run."""
    from tasks.tracking import list_stage_runs

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
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    return {key: {run: values.get(key, "-") for run, values in settings.items()} for key in keys}


def _read_run_curves(run: _ComparedRun) -> dict[str, TrainingCurve]:
    from rl_core.analysis.training_curves import read_training_curves

    if run.last_trained_folder is None:
        return {}
    try:
        return read_training_curves(
            run.last_trained_folder / "metrics.jsonl", frozenset(CURVES)
        ).curves
    except DataError:
        return {}


def _summarize_curves(curves: Mapping[str, Mapping[str, TrainingCurve]]) -> dict[str, Any]:
    """Return the last value of each curve in each run, and the first step at which a run leaves the first one's."""
    summaries: dict[str, Any] = {}
    first = next(iter(curves))
    for name in CURVES:
        compared = {
            run: run_curves[name]
            for run, run_curves in curves.items()
            if name in run_curves and run_curves[name].values
        }
        if len(compared) < 2:
            continue
        divergence = {}
        if first in compared:
            divergence = {
                run: _find_divergence_step(compared[first], curve)
                for run, curve in compared.items()
                if run != first
            }
        summaries[name] = {
            "last": {run: curve.values[-1] for run, curve in compared.items()},
            "parts_at": divergence,
        }
    return summaries


def _find_divergence_step(first: TrainingCurve, other: TrainingCurve) -> float | None:
    """Return the first shared step with different values; None = the curves never diverge."""
    values = dict(zip(first.steps, first.values, strict=True))
    pairs = zip(other.steps, other.values, strict=True)
    return next((step for step, value in pairs if step in values and values[step] != value), None)


def _compare_episodes(first: _ComparedRun, other: _ComparedRun) -> dict[str, Any]:
    """Compare the other run with the first on the episodes that both played."""
    from rl_core.analysis.statistics import bootstrap_paired_difference, sign_test

    names = {"first": first.name, "second": other.name}
    first_results, other_results = first.read_newest_evaluation(), other.read_newest_evaluation()
    if first_results is None or other_results is None:
        missing = first.name if first_results is None else other.name
        return {**names, "why": f"'{missing}' has no evaluation here"}
    first_episodes = {episode.key: episode for episode in first_results[0].episodes}
    pairs = [
        (first_episodes[episode.key], episode)
        for episode in other_results[0].episodes
        if episode.key in first_episodes
    ]
    if not pairs:
        return {
            **names,
            "why": "they have no episode in common (evaluate.levels, episodes, episodes_seed)",
        }
    metric = "success" if first.knows_success and other.knows_success else "reward"
    value = operator.attrgetter(metric)
    gain = bootstrap_paired_difference(
        [value(new) for _, new in pairs], [value(old) for old, _ in pairs]
    )
    wins = sum(value(new) > value(old) for old, new in pairs)
    losses = sum(value(new) < value(old) for old, new in pairs)
    levels = dict.fromkeys(old.level for old, _ in pairs)
    differing = [old.key for old, new in pairs if value(old) != value(new)]
    return {
        **names,
        "episodes": len(pairs),
        "metric": metric,
        metric: [
            _compute_mean([value(episode) for episode in results[0].episodes])
            for results in (first_results, other_results)
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
        "part": _find_diverging_episodes(first_results[1], other_results[1], differing),
    }


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _find_diverging_episodes(
    first: Path, other: Path, keys: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the first episodes with different outcomes: the turn where they diverge, and the actions there."""
    from rl_core.analysis.trajectories import find_turning_point

    keys = keys[:MAX_EXAMPLE_EPISODES]
    first_trajectories = _read_first_samples(first, keys)
    other_trajectories = _read_first_samples(other, keys)
    examples = []
    for key in keys:
        if key not in first_trajectories or key not in other_trajectories:
            continue
        pair = (first_trajectories[key], other_trajectories[key])
        turn = find_turning_point(*pair)
        examples.append(
            {
                "level": key[0],
                "seed": key[1],
                "prompt": pair[0].prompt,
                "success": [trajectory.success for trajectory in pair],
                "reward": [trajectory.reward for trajectory in pair],
                "turn": turn,
                "actions": [_read_action(trajectory, turn) for trajectory in pair],
            }
        )
    return examples


def _read_first_samples(
    path: Path, keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Trajectory]:
    from rl_core.analysis.trajectories import read_trajectories

    wanted = set(keys)
    return {
        (trajectory.level, trajectory.seed): trajectory
        for trajectory in read_trajectories(path)
        if (trajectory.level, trajectory.seed) in wanted and trajectory.sample == 0
    }


def _read_action(trajectory: Trajectory, turn: int | None) -> str:
    if turn is None or turn >= len(trajectory.turns):
        return ""
    return trajectory.turns[turn].action


def format_comparison(comparison: Mapping[str, Any]) -> str:
    """Format a comparison for the terminal; runs are called A, B, ..."""
    letters = _assign_letters([row["run"] for row in comparison["runs"]])
    lines = [
        f"{letters[row['run']]}  {_format_run(row)}  {row['status']}  {row['result'][:90]}"
        for row in comparison["runs"]
    ]
    lines += ["", "settings that differ", *_format_settings(comparison["settings"], letters)]
    lines += ["", "stages"]
    for name, keys in comparison["stages"].items():
        text = "  ".join(f"{letters[run]} {key[:8] or '-'}" for run, key in keys.items())
        if len(set(keys.values())) == 1:
            text = "shared by all"
        lines.append(f"  {name:<14}{text}")
    lines += [
        "",
        "curves of the last training stage: last value, and the first step that differs from A",
    ]
    for name, curve in comparison["curves"].items():
        parts = []
        for run, value in curve["last"].items():
            step = curve["parts_at"].get(run)
            note = f" (from step {step:g})" if step is not None else ""
            parts.append(f"{letters[run]} {value:.4g}{note}")
        lines.append(f"  {name:<20}" + "  ".join(parts))
    for pair in comparison["episodes"]:
        lines += ["", *_format_episode_pair(pair, letters)]
    return "\n".join(lines)


def _format_run(row: Mapping[str, str]) -> str:
    return f"{row['id']} ({row['run']})" if row.get("id") else row["run"]


def _assign_letters(runs: Sequence[str]) -> dict[str, str]:
    labels = itertools.chain("ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(str, itertools.count(27)))
    return dict(zip(runs, labels, strict=False))


def _format_settings(
    settings: Mapping[str, Mapping[str, str]], letters: Mapping[str, str]
) -> list[str]:
    if not settings:
        return ["  none"]
    rows = [
        [f"  {key}", *(values[run][:40] for run in letters)] for key, values in settings.items()
    ]
    return format_table(["", *letters.values()], rows).splitlines()


def _format_episode_pair(pair: Mapping[str, Any], letters: Mapping[str, str]) -> list[str]:
    first, other = letters[pair["first"]], letters[pair["second"]]
    if "why" in pair:
        return [f"{other} against {first}: {pair['why']}"]
    gain, metric = pair["gain"], pair["metric"]
    first_value, other_value = (_format_value(value, metric) for value in pair[metric])
    difference = _format_change(gain["difference"], metric)
    low, high = _format_change(gain["low"], metric), _format_change(gain["high"], metric)
    lines = [
        f"{other} against {first} on {pair['episodes']} shared episodes: {metric} {other_value} against {first_value}, "
        f"{difference} [{low}, {high}]; better on {pair['wins']}, worse on {pair['losses']}, "
        f"sign test p = {pair['p_value']:.3g}"
    ]
    levels = ", ".join(
        f"{level} {_format_change(value, metric)}" for level, value in pair["gain_by_level"].items()
    )
    lines.append(f"  by level: {levels}")
    for episode in pair["part"]:
        where = "in the answer's scoring"
        if episode["turn"] is not None:
            where = f"at turn {episode['turn'] + 1}"
        actions = " | ".join(
            f"{name}: {text[:50]!r}"
            for name, text in zip((first, other), episode["actions"], strict=True)
        )
        outcome = _format_outcome(episode, (first, other), metric)
        lines.append(
            f"  {episode['level']} {episode['seed']}: {outcome}, diverges {where}  {actions}"
        )
    return lines


def _format_value(value: float, metric: str) -> str:
    return f"{value:.1%}" if metric == "success" else f"{value:.4g}"


def _format_change(value: float, metric: str) -> str:
    return f"{100 * value:+.1f} points" if metric == "success" else f"{value:+.4g}"


def _format_outcome(episode: Mapping[str, Any], letters: Sequence[str], metric: str) -> str:
    """Name the runs that were right; if success is unknown, list the reward of each."""
    if metric != "success":
        return ", ".join(
            f"{name} {value:.4g}" for name, value in zip(letters, episode[metric], strict=True)
        )
    right = [name for name, is_right in zip(letters, episode["success"], strict=True) if is_right]
    return f"{' and '.join(right) or 'neither'} right"
