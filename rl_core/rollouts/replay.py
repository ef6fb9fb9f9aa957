"""Replay of a recorded episode: its actions are shown to the environment again, and the results compared.

An environment is a function of (level, seed, actions), and a reward function one of the trajectory: any difference is
non-determinism, or a change of code or data since.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.environment import Environment, Episode, Step, call_with_time_limit
from rl_core.environments.failed_episodes import FailedEpisode, format_error_trace
from rl_core.errors import EnvironmentFault
from rl_core.rewards.user_function import RewardFunction, RewardSignature
from rl_core.rollouts.episode_sequence import normalize_messages, normalize_step
from rl_core.types import Message, Rollout, StopReason, Trajectory, Turn

TIMEOUT_TEXT = "has not returned within"  # in the message of a call that hangs
_MAX_SHOWN_CHARACTERS = 400  # characters of a text


@dataclass
class EpisodeReplay:
    """Outcome of a replay."""

    lines: list[str] = field(default_factory=list)  # turn by turn, for people
    differences: list[str] = field(default_factory=list)  # from the recording; [] = the same
    error: str = ""  # type and text of what the environment or a reward function raised this time
    trace: str = ""

    def compare_values(self, what: str, recorded: Any, found: Any) -> None:
        """Note a difference."""
        if not _is_same(recorded, found):
            self.differences.append(
                f"{what}: recorded {_truncate_text(recorded)}, now {_truncate_text(found)}"
            )
            self.lines.append(f"  ! {self.differences[-1]}")


def replay_episode(
    environment: Environment,
    recorded: FailedEpisode | Trajectory,
    rewards: Mapping[str, RewardFunction] | None = None,
    *,
    timeout_s: float = 600.0,
) -> EpisodeReplay:
    """Play the recorded actions again, score the recorded trajectory twice with each reward function, and compare.

    Args:
        recorded: a failed episode, or a trajectory that ended well.
        rewards: by name. A function is given this trajectory alone, whatever else it was given with.
        timeout_s: of a call.
    """
    failed = recorded if isinstance(recorded, FailedEpisode) else None
    played = failed.trajectory if failed is not None else recorded
    assert isinstance(played, Trajectory)
    replay = EpisodeReplay()
    in_environment = failed is not None and not failed.failed_in.startswith("reward ")
    _play_actions(
        environment, played, failed.messages if failed is not None else [], replay, timeout_s
    )
    if failed is not None and in_environment:
        if not (TIMEOUT_TEXT in failed.error and TIMEOUT_TEXT in replay.error):
            replay.compare_values(
                f"error in {failed.failed_in}", failed.error, replay.error or "none"
            )
        return replay
    if replay.error:
        replay.differences.append(f"the environment: recorded no error, now {replay.error}")
        return replay
    for name, function in (rewards or {}).items():
        expected = (
            failed.error if failed is not None and failed.failed_in == f"reward '{name}'" else ""
        )
        _score_trajectory(name, function, played, expected, replay, timeout_s)
    return replay


def _play_actions(
    environment: Environment,
    played: Trajectory,
    opening: Sequence[Message],
    replay: EpisodeReplay,
    timeout_s: float,
) -> None:
    place = f"environment '{played.environment}', level '{played.level}', seed {played.seed}"

    def call(function: Callable[[], Any]) -> Any:
        try:
            return call_with_time_limit(timeout_s, place, function)
        except (Exception, SystemExit) as error:
            is_late = isinstance(error, EnvironmentFault) and TIMEOUT_TEXT in str(error)
            replay.error = (
                f"a call {TIMEOUT_TEXT} {timeout_s:g} s"
                if is_late
                else f"{type(error).__name__}: {error}"
            )
            replay.trace = format_error_trace(error)
            replay.lines.append(f"  error: {replay.error}")
            return None

    episode: Episode | None = call(
        lambda: environment.episode(seed=played.seed, level=played.level)
    )
    messages = call(lambda: normalize_messages(episode.reset())) if episode is not None else None
    if episode is None or messages is None:
        return
    prompt = next(
        (message["content"] for message in reversed(messages) if message["role"] == "user"), ""
    )
    replay.lines.append(f"prompt: {_truncate_text(prompt)}")
    if opening:
        replay.compare_values("opening messages", list(opening), messages)
    else:
        replay.compare_values("prompt", played.prompt, prompt)
    total, last = 0.0, Step()
    for number, turn in enumerate(played.turns, start=1):
        replay.lines.append(f"turn {number}: {_truncate_text(turn.action)}")
        if turn is played.turns[-1] and _is_cut_off(played, turn):
            replay.lines.append("  cut off by the token limit: the environment was not shown it")
            break
        step = call(functools.partial(_step_episode, episode, turn.action))
        if step is None:
            return
        last, total = step, total + step.reward
        if not math.isfinite(step.reward):
            replay.error = f"step returned reward {step.reward}, not a finite reward"
            return
        if _show_step(number, turn, step, played, replay):
            break
    if played.stop_reason != StopReason.FAILED:
        _compare_outcome(played, episode, last, total, replay)


def _step_episode(episode: Episode, action: str) -> Step:
    return normalize_step(episode.step(action))


def _is_cut_off(played: Trajectory, turn: Turn) -> bool:
    """True = the last action was cut off; an observation that did not fit left a call or an error behind."""
    return (
        played.stop_reason == StopReason.MAX_TOKENS and turn.tool_call is None and not turn.is_error
    )


def _show_step(
    number: int, turn: Turn, step: Step, played: Trajectory, replay: EpisodeReplay
) -> bool:
    """Note what the step gave, and how it differs from the recording; True = the episode has ended."""
    ended = step.terminated or step.truncated
    observation = None if ended else "\n".join(message["content"] for message in step.messages)
    if step.tool_call is not None:
        replay.lines.append(
            f"  calls {step.tool_call.name} {_truncate_text(step.tool_call.arguments)}"
        )
    replay.lines.append(
        f"  -> {'the end' if ended else _truncate_text(observation)} (reward {step.reward:g})"
    )
    if not ended and not step.messages:
        replay.error = "a step neither ended the episode nor returned an observation"
        return True
    replay.compare_values(f"tool call of turn {number}", turn.tool_call, step.tool_call)
    replay.compare_values(f"misuse in turn {number}", turn.is_error, step.is_error)
    is_last = turn is played.turns[-1]
    if turn.observation is not None:
        replay.compare_values(
            f"observation of turn {number}",
            turn.observation,
            observation or "none: the episode ended",
        )
    elif is_last and played.stop_reason in (StopReason.TERMINATED, StopReason.ENVIRONMENT):
        replay.compare_values(f"end at turn {number}", True, ended)
    return ended


def _compare_outcome(
    played: Trajectory, episode: Episode, last: Step, total: float, replay: EpisodeReplay
) -> None:
    replay.compare_values("answer", played.answer, last.answer)
    replay.compare_values("success", played.success, bool(last.success))
    replay.compare_values(
        "reward of the environment", played.rewards.get("task", played.reward), total
    )
    replay.compare_values("right answer (target)", played.target, episode.target)


def _score_trajectory(
    name: str,
    function: RewardFunction,
    played: Trajectory,
    expected: str,
    replay: EpisodeReplay,
    timeout_s: float,
) -> None:
    """Score a copy of the trajectory twice; `expected`: the recorded error, "" = none."""
    task = played.rewards.get("task", played.reward)
    bare = dataclasses.replace(played, rewards={"task": task}, reward=task)
    found: list[Any] = []
    for _ in range(2):
        try:
            value = call_with_time_limit(
                timeout_s,
                f"reward '{name}'",
                lambda: _compute_reward_values(RewardSignature(function, name), bare),
            )
            found.append(value[0] if len(value) == 1 else f"{len(value)} values for 1 trajectory")
        except (Exception, SystemExit) as error:
            found.append(f"raised {type(error).__name__}: {error}")
            replay.error, replay.trace = found[-1], format_error_trace(error)
    replay.lines.append(f"reward {name}: {_truncate_text(found[0])}")
    if not _is_same(*found):
        text = f"reward '{name}' gave {_truncate_text(found[0])} and {_truncate_text(found[1])} for the same trajectory"
        replay.differences.append(text)
        replay.lines.append(f"  ! {text}")
    if expected:
        now = found[0] if isinstance(found[0], str) else f"gave {found[0]!r}"
        now += (
            ", no finite number"
            if isinstance(found[0], float) and not math.isfinite(found[0])
            else ""
        )
        replay.compare_values(f"error of reward '{name}'", expected, now)
    elif name in played.rewards:
        replay.compare_values(f"reward '{name}'", played.rewards[name], found[0])


def _compute_reward_values(signature: RewardSignature, played: Trajectory) -> list[Any]:
    """Values of a copy of the trajectory, which knows no token ids; see `rewards.user_function` for None."""
    values = signature.call_function([Rollout([], [], [], [], copy.deepcopy(played))])
    return [0.0 if value is None and signature.is_trl else value for value in values]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _truncate_text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    # A policy may write control characters: none reaches a terminal.
    text = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text[: _MAX_SHOWN_CHARACTERS + 1]
    )
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
