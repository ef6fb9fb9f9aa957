"""`posttrain replay`: a recorded episode, played again against the environment and the reward functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.cli.resumable_runs import load_recorded_settings
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.errors import DataError, PosttrainError, SettingsError
from rl_core.rewards.user_function import RewardFunction, import_reward_function
from rl_core.rollouts.replay import EpisodeReplay, replay_episode
from rl_core.rollouts.rollout_files import EpisodeName, read_failed_episodes
from rl_core.types import Trajectory
from tasks.config import PipelineSettings
from tasks.lifecycle.crashed_runs import list_recorded_runs
from tasks.pipeline.stage_result import FAILED_EPISODES, RECENT_ROLLOUTS
from tasks.stages.evaluate import resolve_trajectories_path
from tasks.stages.loading import build_pipeline_environment


def replay_recorded_episode(
    settings: PipelineSettings, name: str, *, trace: bool = False
) -> tuple[str, bool]:
    """Text for people, and True if the replay gave what was recorded.

    Args:
        name: of an episode, as in messages and `posttrain replay`. trace: show tracebacks of the replay too.
    Raises: DataError for an episode that was not kept.
    """
    wanted = EpisodeName.parse(name)
    home = _resolve_pipeline_folder(settings)
    found = list(_find_recordings(home, wanted))
    if not found:
        raise DataError(
            f"episode {name} is not kept in {home}. Kept are the first failed episodes of a stage (`posttrain replay` "
            "lists them), episodes of the newest iterations of a training, and all of an evaluation"
        )
    where, recorded = found[0]
    data = _list_stage_folders(home / "stages" / "prepare_data")
    environment = build_pipeline_environment(settings, data[0] if data else None)
    outcome = replay_episode(
        environment,
        recorded,
        _load_reward_functions(settings, recorded),
        timeout_s=_read_step_timeout(settings),
    )
    lines = [f"{name}, recorded in {where}"]
    if len(found) > 1:
        lines.append(f"{len(found)} recorded episodes have this name; this is the first")
    lines += [
        *_format_recording(recorded),
        "",
        "played again:",
        *outcome.lines,
        "",
        _format_verdict(recorded, outcome),
    ]
    if trace and outcome.trace:
        lines += ["", outcome.trace.rstrip()]
    return "\n".join(lines), not outcome.differences


def format_failed_episodes(settings: PipelineSettings) -> str:
    """The failed episodes that are kept, newest stage folder first, one line each."""
    lines = [
        f"{found['episode']}  {found['what'].splitlines()[0][:160]}"
        for found in list_failed_episodes(settings)
    ]
    return (
        "\n".join(lines) or f"no failed episodes are kept in {_resolve_pipeline_folder(settings)}"
    )


def list_failed_episodes(settings: PipelineSettings) -> list[dict[str, str]]:
    """The same for programs: {episode, what}."""
    return [
        {"episode": str(name), "what": episode.failure_label}
        for stage in sorted((_resolve_pipeline_folder(settings) / "stages").glob("*/"))
        for folder in _list_stage_folders(stage)
        for name, episode in read_failed_episodes(folder / FAILED_EPISODES)
    ]


def _resolve_pipeline_folder(settings: PipelineSettings) -> Path:
    return Path(settings.output).resolve() / settings.name


def load_newest_run_settings(output: Path) -> PipelineSettings:
    """Settings of the newest run in a folder. Raises: DataError where there is none."""
    for record in list_recorded_runs(output.resolve()):
        if record.settings is not None:
            return load_recorded_settings(record, output, is_resumed=False)
    raise DataError(
        f"no runs in {output.resolve()}; give the run's --config, or its --output folder"
    )


@dataclass(frozen=True)
class _RecordingLocation:
    """Place of a recording, for people."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def _find_recordings(
    home: Path, episode_name: EpisodeName
) -> Iterator[tuple[_RecordingLocation, FailedEpisode | Trajectory]]:
    """Recordings of an episode, those of the stage's newest folder first, failed ones first."""
    for folder in _list_stage_folders(home / "stages" / episode_name.stage):
        path = folder / FAILED_EPISODES
        for line, (name, episode) in enumerate(read_failed_episodes(path), start=1):
            if name == str(episode_name):
                yield _RecordingLocation(path, line), episode
        for path in (
            folder / RECENT_ROLLOUTS,
            resolve_trajectories_path(folder, episode_name.source),
        ):
            yield from _read_matching_trajectories(path, episode_name)


def _read_matching_trajectories(
    path: Path, episode_name: EpisodeName
) -> Iterator[tuple[_RecordingLocation, Trajectory]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
                iteration = row.pop("iteration", None)
                trajectory = Trajectory.from_json(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"{path}:{number}: this is no trajectory") from None
            of = episode_name.source if iteration is None else str(iteration)
            found = (of, trajectory.level, trajectory.seed, trajectory.sample)
            if found == (
                episode_name.source,
                episode_name.level,
                episode_name.seed,
                episode_name.sample,
            ):
                yield _RecordingLocation(path, number), trajectory


def _list_stage_folders(stage: Path) -> list[Path]:
    """Folders of a stage, open and finished ones, the newest first."""
    folders = [path for path in stage.glob("*") if path.is_dir() and path.suffix in ("", ".open")]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _load_reward_functions(
    settings: PipelineSettings, recorded: FailedEpisode | Trajectory
) -> dict[str, RewardFunction]:
    """The user's reward functions that scored it: episodes of an evaluation have the environment's reward alone."""
    policy = settings.stages.policy
    scored = isinstance(recorded, FailedEpisode) and recorded.failed_in.startswith("reward ")
    names = [name for name in (policy.rewards if policy is not None else {}) if ":" in name]
    if isinstance(recorded, Trajectory):
        names = [name for name in names if name in recorded.rewards]
    elif not scored:
        names = []
    try:
        return {name: import_reward_function(name) for name in names}
    except PosttrainError as error:
        raise SettingsError(str(error)) from None


def _read_step_timeout(settings: PipelineSettings) -> float:
    policy = settings.stages.policy
    return policy.sampling.step_timeout_s if policy is not None else 600.0


def _format_recording(recorded: FailedEpisode | Trajectory) -> list[str]:
    if isinstance(recorded, FailedEpisode):
        lines = [f"it failed: {recorded.failure_label}"]
        return lines + [f"    {line}" for line in recorded.trace.rstrip().splitlines()]
    end = f"ended by {recorded.stop_reason}, success {recorded.success}, reward {recorded.reward:g}"
    return [
        f"{end}; rewards {', '.join(f'{name} {value:g}' for name, value in recorded.rewards.items())}"
    ]


def _format_verdict(recorded: FailedEpisode | Trajectory, outcome: EpisodeReplay) -> str:
    if not outcome.differences:
        same = "the same error" if isinstance(recorded, FailedEpisode) else "the same result"
        return f"{same} as recorded: it does not depend on chance"
    return (
        f"it differs from the recording in {len(outcome.differences)} places, the first: {outcome.differences[0]}\n"
        "An environment has to be a function of (seed, level, actions), a reward function one of the trajectory: no "
        "global random numbers, no time, no order of sets, no state between calls. Or the code has changed since"
    )
