"""Command `posttrain replay`: replay recorded episodes against the environment and the reward functions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_data_options
from rl_core.errors import DataError, PosttrainError, SettingsError
from rl_core.types import Trajectory

if TYPE_CHECKING:
    from rl_core.environments.failed_episodes import FailedEpisode
    from rl_core.rewards.user_function import RewardFunction
    from rl_core.rollouts.replay import EpisodeReplay
    from rl_core.rollouts.rollout_files import EpisodeName
    from tasks.config import PipelineSettings

EXAMPLES = (
    "replay    (lists the stored failed episodes of the newest run)",
    "replay policy/12/easy/345/0",
    "replay demo-7f3a policy/12/easy/345/0",
    "replay demo evaluate/policy/hard/17/0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(
        parser,
        optional=True,
        was_option=True,
        metavar="CONFIG|RUN",
        help_text="a configuration, or a run by its short id (default: the newest run)",
    )
    parser.add_argument(
        "episode",
        metavar="EPISODE",
        nargs="?",
        help="STAGE/ITERATION/LEVEL/SEED/SAMPLE, or evaluate/MODEL/LEVEL/SEED/SAMPLE",
    )
    add_data_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Replay a recorded episode, or list the failed ones."""
    name = arguments.config
    if arguments.episode is None and name is not None and _is_episode_name(name):
        arguments.config, arguments.episode = None, name
    target = run_setup.resolve_target(arguments, import_code=True)
    settings = run_setup.load_target_settings(target)
    if arguments.json or arguments.csv:
        from posttrain.cli.tables import print_requested_data

        if arguments.episode is not None:
            raise SettingsError("--json and --csv list the stored episodes; leave EPISODE out")
        print_requested_data(arguments, list_failed_episodes(settings))
        return 0
    if arguments.episode is None:
        run_setup.print_wrapped(format_failed_episodes(settings))
        return 0
    text, is_same = replay_recorded_episode(settings, arguments.episode, trace=arguments.debug)
    run_setup.print_wrapped(text)
    return 0 if is_same else 1


def _is_episode_name(text: str) -> bool:
    """Return whether the text has the parts of an episode's name, and names no file."""
    from rl_core.rollouts.rollout_files import EpisodeName

    try:
        EpisodeName.parse(text)  # a level may have slashes, as in a mixture
    except DataError:
        return False
    return not Path(text).exists()


def replay_recorded_episode(
    settings: PipelineSettings, name: str, *, trace: bool = False
) -> tuple[str, bool]:
    """Replay an episode; return a report, and True if the replay gave what was recorded.

    Args:
        name: of an episode, as in messages and `posttrain replay`.
        trace: show tracebacks of the replay, too.
    Raises: DataError for an episode that is not stored.
    """
    from rl_core.rollouts.replay import replay_episode
    from rl_core.rollouts.rollout_files import EpisodeName
    from tasks.stages.loading import build_pipeline_environment

    episode_name = EpisodeName.parse(name)
    home = _resolve_pipeline_folder(settings)
    recordings = list(_find_recordings(home, episode_name))
    if not recordings:
        raise DataError(
            f"episode {name} is not stored in {home}. Stored are the first failed episodes of a stage (`posttrain "
            "replay` lists them), episodes of a training's newest iterations, and all episodes of an evaluation"
        )
    location, recorded = recordings[0]
    data = _list_stage_folders(home / "stages" / "prepare_data")
    environment = build_pipeline_environment(settings, data[0] if data else None)
    outcome = replay_episode(
        environment,
        recorded,
        _load_reward_functions(settings, recorded),
        timeout_s=_read_step_timeout(settings),
    )
    lines = [f"{name}, recorded in {location}"]
    if len(recordings) > 1:
        lines.append(f"{len(recordings)} recorded episodes have this name; this is the first")
    lines += [
        *_format_recording(recorded),
        "",
        "replayed:",
        *outcome.lines,
        "",
        _format_verdict(recorded, outcome),
    ]
    if trace and outcome.trace:
        lines += ["", outcome.trace.rstrip()]
    return "\n".join(lines), not outcome.differences


def format_failed_episodes(settings: PipelineSettings) -> str:
    """List the stored failed episodes, newest stage folder first, one line each."""
    lines = [
        f"{failure['episode']}  {failure['what'].splitlines()[0][:160]}"
        for failure in list_failed_episodes(settings)
    ]
    if not lines:
        return f"no failed episodes are stored in {_resolve_pipeline_folder(settings)}"
    return "\n".join(lines)


def list_failed_episodes(settings: PipelineSettings) -> list[dict[str, str]]:
    """Return the stored failed episodes as records {episode, what}."""
    from rl_core.rollouts.rollout_files import read_failed_episodes
    from tasks.pipeline.stage_result import FAILED_EPISODES

    return [
        {"episode": str(name), "what": episode.failure_label}
        for stage in sorted((_resolve_pipeline_folder(settings) / "stages").glob("*/"))
        for folder in _list_stage_folders(stage)
        for name, episode in read_failed_episodes(folder / FAILED_EPISODES)
    ]


def _resolve_pipeline_folder(settings: PipelineSettings) -> Path:
    return Path(settings.output).resolve() / settings.name


@dataclass(frozen=True)
class _RecordingLocation:
    """File and line of a recording."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def _find_recordings(
    home: Path, episode_name: EpisodeName
) -> Iterator[tuple[_RecordingLocation, FailedEpisode | Trajectory]]:
    """Yield recordings of an episode: those of the stage's newest folder first, failed ones first."""
    from rl_core.rollouts.rollout_files import read_failed_episodes
    from tasks.pipeline.stage_result import FAILED_EPISODES, RECENT_ROLLOUTS
    from tasks.stages.evaluate import resolve_trajectories_path

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
    wanted = (episode_name.source, episode_name.level, episode_name.seed, episode_name.sample)
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
                iteration = row.pop("iteration", None)
                trajectory = Trajectory.from_json(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"{path}:{number}: this is no trajectory") from None
            source = episode_name.source if iteration is None else str(iteration)
            recorded = (source, trajectory.level, trajectory.seed, trajectory.sample)
            if recorded == wanted:
                yield _RecordingLocation(path, number), trajectory


def _list_stage_folders(stage: Path) -> list[Path]:
    """List the folders of a stage, open and finished ones, the newest first."""
    folders = [path for path in stage.glob("*") if path.is_dir() and path.suffix in ("", ".open")]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _load_reward_functions(
    settings: PipelineSettings, recorded: FailedEpisode | Trajectory
) -> dict[str, RewardFunction]:
    """Load the user's reward functions that scored the episode; an evaluation uses none of them."""
    from rl_core.user_code.load import import_function

    policy = settings.stages.policy
    weights = policy.rewards if policy is not None else {}
    played = recorded if isinstance(recorded, Trajectory) else recorded.trajectory
    for entry in settings.environments:
        if entry.resolved_label == played.environment and entry.rewards:
            weights = entry.rewards
    names = [name for name in weights if ":" in name]
    if isinstance(recorded, Trajectory):
        names = [name for name in names if name in recorded.rewards]
    elif not recorded.failed_in.startswith("reward "):
        names = []
    try:
        return {name: import_function(name, f"rewards.{name}") for name in names}
    except PosttrainError as error:
        raise SettingsError(str(error)) from None


def _read_step_timeout(settings: PipelineSettings) -> float:
    policy = settings.stages.policy
    return policy.sampling.step_timeout_s if policy is not None else 600.0


def _format_recording(recorded: FailedEpisode | Trajectory) -> list[str]:
    if not isinstance(recorded, Trajectory):
        lines = [f"it failed: {recorded.failure_label}"]
        return lines + [f"    {line}" for line in recorded.trace.rstrip().splitlines()]
    success = "" if recorded.success is None else f"success {recorded.success}, "
    ending = f"ended by {recorded.stop_reason}, {success}reward {recorded.reward:g}"
    rewards = ", ".join(f"{name} {value:g}" for name, value in recorded.rewards.items())
    return [f"{ending}; rewards {rewards}"]


def _format_verdict(recorded: FailedEpisode | Trajectory, outcome: EpisodeReplay) -> str:
    if not outcome.differences:
        same = "the same result" if isinstance(recorded, Trajectory) else "the same error"
        return f"{same} as recorded: the episode is deterministic"
    return (
        f"it differs from the recording in {len(outcome.differences)} places, the first: {outcome.differences[0]}\n"
        "An environment must depend only on (seed, level, actions), a reward function only on the trajectory: no "
        "global random numbers, no time, no order of sets, no state between calls. Or the code has changed since"
    )
