"""`posttrain replay`: a recorded episode, played again against the environment and the reward functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.cli.resume import settings_of
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.errors import DataError, PosttrainError, SettingsError
from rl_core.rewards.user_function import RewardFunction, import_function
from rl_core.rollouts.failed_episode_file import EpisodeName, read_failed_episodes
from rl_core.rollouts.replay import Replay, replay_episode
from rl_core.types import Trajectory
from tasks.config import PipelineSettings
from tasks.lifecycle.dead_runs import recorded_runs
from tasks.pipeline.result import FAILED_EPISODES, RECENT_ROLLOUTS
from tasks.stages.evaluate import trajectories_path
from tasks.stages.loading import make_environment

__all__ = ["kept_episodes", "kept_table", "recorded_settings", "replay"]


def replay(settings: PipelineSettings, name: str, *, trace: bool = False) -> tuple[str, bool]:
    """Text for people, and True if the replay gave what was recorded.

    Args:
        name: of an episode, as in messages and `posttrain replay`. trace: show tracebacks of the replay too.
    Raises: DataError for an episode that was not kept.
    """
    wanted = EpisodeName.parse(name)
    home = _home(settings)
    found = list(_find(home, wanted))
    if not found:
        raise DataError(
            f"episode {name} is not kept in {home}. Kept are the first failed episodes of a stage (`posttrain replay` "
            "lists them), episodes of the newest iterations of a training, and all of an evaluation"
        )
    where, recorded = found[0]
    data = _newest(home / "stages" / "prepare_data")
    environment = make_environment(settings, data[0] if data else None)
    outcome = replay_episode(environment, recorded, _functions(settings, recorded), timeout_s=_timeout(settings))
    lines = [f"{name}, recorded in {where}"]
    if len(found) > 1:
        lines.append(f"{len(found)} recorded episodes have this name; this is the first")
    lines += [*_story(recorded), "", "played again:", *outcome.lines, "", _verdict(recorded, outcome)]
    if trace and outcome.trace:
        lines += ["", outcome.trace.rstrip()]
    return "\n".join(lines), not outcome.differences


def kept_table(settings: PipelineSettings) -> str:
    """The failed episodes that are kept, newest stage folder first, one line each."""
    lines = [f"{found['episode']}  {found['what'].splitlines()[0][:160]}" for found in kept_episodes(settings)]
    return "\n".join(lines) or f"no failed episodes are kept in {_home(settings)}"


def kept_episodes(settings: PipelineSettings) -> list[dict[str, str]]:
    """The same for programs: {episode, what}."""
    return [
        {"episode": str(name), "what": episode.what}
        for stage in sorted((_home(settings) / "stages").glob("*/"))
        for folder in _newest(stage)
        for name, episode in read_failed_episodes(folder / FAILED_EPISODES)
    ]


def _home(settings: PipelineSettings) -> Path:
    return Path(settings.output).resolve() / settings.name


def recorded_settings(output: Path) -> PipelineSettings:
    """Settings of the newest run in a folder. Raises: DataError where there is none."""
    for record in recorded_runs(output.resolve()):
        if record.settings is not None:
            return settings_of(record, output, goes_on=False)
    raise DataError(f"no runs in {output.resolve()}; give the run's --config, or its --output folder")


@dataclass(frozen=True)
class _Source:
    """Place of a recording, for people."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def _find(home: Path, wanted: EpisodeName) -> Iterator[tuple[_Source, FailedEpisode | Trajectory]]:
    """Recordings of an episode, those of the stage's newest folder first, failed ones first."""
    for folder in _newest(home / "stages" / wanted.stage):
        path = folder / FAILED_EPISODES
        for line, (name, episode) in enumerate(read_failed_episodes(path), start=1):
            if name == str(wanted):
                yield _Source(path, line), episode
        for path in (folder / RECENT_ROLLOUTS, trajectories_path(folder, wanted.of)):
            yield from _trajectories(path, wanted)


def _trajectories(path: Path, wanted: EpisodeName) -> Iterator[tuple[_Source, Trajectory]]:
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
            of = wanted.of if iteration is None else str(iteration)
            found = (of, trajectory.level, trajectory.seed, trajectory.sample)
            if found == (wanted.of, wanted.level, wanted.seed, wanted.sample):
                yield _Source(path, number), trajectory


def _newest(stage: Path) -> list[Path]:
    """Folders of a stage, open and finished ones, the newest first."""
    folders = [path for path in stage.glob("*") if path.is_dir() and path.suffix in ("", ".open")]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _functions(settings: PipelineSettings, recorded: FailedEpisode | Trajectory) -> dict[str, RewardFunction]:
    """The user's reward functions that scored it: episodes of an evaluation have the environment's reward alone."""
    policy = settings.stages.policy
    scored = isinstance(recorded, FailedEpisode) and recorded.failed_in.startswith("reward ")
    names = [name for name in (policy.rewards if policy is not None else {}) if ":" in name]
    if isinstance(recorded, Trajectory):
        names = [name for name in names if name in recorded.rewards]
    elif not scored:
        names = []
    try:
        return {name: import_function(name) for name in names}
    except PosttrainError as error:
        raise SettingsError(str(error)) from None


def _timeout(settings: PipelineSettings) -> float:
    policy = settings.stages.policy
    return policy.sampling.step_timeout_s if policy is not None else 600.0


def _story(recorded: FailedEpisode | Trajectory) -> list[str]:
    if isinstance(recorded, FailedEpisode):
        lines = [f"it failed: {recorded.what}"]
        return lines + [f"    {line}" for line in recorded.trace.rstrip().splitlines()]
    end = f"ended by {recorded.stop_reason}, success {recorded.success}, reward {recorded.reward:g}"
    return [f"{end}; rewards {', '.join(f'{name} {value:g}' for name, value in recorded.rewards.items())}"]


def _verdict(recorded: FailedEpisode | Trajectory, outcome: Replay) -> str:
    if not outcome.differences:
        same = "the same error" if isinstance(recorded, FailedEpisode) else "the same result"
        return f"{same} as recorded: it does not depend on chance"
    return (
        f"it differs from the recording in {len(outcome.differences)} places, the first: {outcome.differences[0]}\n"
        "An environment has to be a function of (seed, level, actions), a reward function one of the trajectory: no "
        "global random numbers, no time, no order of sets, no state between calls. Or the code has changed since"
    )
