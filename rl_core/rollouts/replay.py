"""Replay of a recorded episode: its actions are sent to the environment again, and the results compared.

An environment is a function of (level, seed, actions), and a reward function one of the trajectory. Any difference
means non-determinism, or changed code or data.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.agent import Agent
from rl_core.environments.environment import Environment, Episode, Step, call_with_time_limit
from rl_core.environments.failed_episodes import FailedEpisode, format_error_trace
from rl_core.environments.two_player import (
    TwoPlayerEnvironment,
    TwoPlayerGame,
    build_last_step,
    check_game_length,
    read_seat,
)
from rl_core.errors import EnvironmentFault
from rl_core.rewards.user_function import RewardFunction, RewardSignature
from rl_core.rollouts.agent_replay import replay_agent
from rl_core.rollouts.episode_sequence import (
    compute_cut_reward,
    normalize_messages,
    normalize_step,
    was_last_action_played,
)
from rl_core.types import Message, Rollout, StopReason, Trajectory, Turn
from rl_core.user_code.checks import USER_CODE_ERRORS

TIMEOUT_TEXT = "has not returned within"  # part of the message for a hanging call
_MAX_SHOWN_CHARACTERS = 400  # of each text


@dataclass
class EpisodeReplay:
    """The result of a replay."""

    lines: list[str] = field(default_factory=list)  # report for the user, turn by turn
    differences: list[str] = field(default_factory=list)  # from the recording; [] = identical
    error: str = ""  # what the environment or a reward function raised during the replay
    trace: str = ""

    def compare_values(self, subject: str, recorded: Any, current: Any) -> None:
        """Record a difference between a recorded and a current value."""
        if not _is_same(recorded, current):
            self.differences.append(
                f"{subject}: recorded {_truncate_text(recorded)}, now {_truncate_text(current)}"
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
        recorded: a failed episode, or the trajectory of a successful one.
        rewards: by name. Each function gets this trajectory alone, even if it originally got a batch.
        timeout_s: per call.
    Raises: SettingsError for an agent's task that does not exist any more.
    """
    failed = recorded if isinstance(recorded, FailedEpisode) else None
    trajectory = failed.trajectory if failed is not None else recorded
    assert isinstance(trajectory, Trajectory)
    replay = EpisodeReplay()
    in_environment = failed is not None and not failed.failed_in.startswith("reward ")
    if isinstance(environment, Agent):
        _play_agent(environment, trajectory, failed, replay)
    else:
        opening = failed.messages if failed is not None else []
        moves = trajectory.info.get("game_moves") if failed is None else failed.game_moves
        if isinstance(environment, TwoPlayerEnvironment) and moves is not None:
            _play_game(environment, trajectory, moves, opening, replay, timeout_s)
        else:
            _play_actions(environment, trajectory, opening, replay, timeout_s)
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
        _score_trajectory(name, function, trajectory, expected, replay, timeout_s)
    return replay


def _play_agent(
    environment: Agent,
    trajectory: Trajectory,
    failed: FailedEpisode | None,
    replay: EpisodeReplay,
) -> None:
    """Run the agent again with the recorded answers, and compare what it asks, leaves and earns."""
    seed = trajectory.info.get("agent_seed", 0) if failed is None else failed.agent_seed or 0
    outcome = replay_agent(environment, trajectory, int(seed))
    replay.error, replay.trace = outcome.error, outcome.log
    for number, call in enumerate(outcome.session.calls, start=1):
        replay.lines.append(f"call {number}: {_truncate_text(call.messages[-1]['content'])}")
        said = call.reply["content"] or call.reply.get("tool_calls")
        replay.lines.append(f"  -> {_truncate_text(said)}")
    for subject, before, now in outcome.session.differences:
        replay.compare_values(subject, before, now)
    if outcome.session.num_unplayed:
        replay.compare_values("recorded calls that were not made", 0, outcome.session.num_unplayed)
    if replay.error:
        replay.lines.append(f"  error: {replay.error}")
    if outcome.score is not None and failed is None:
        recorded = trajectory.rewards.get("task", trajectory.reward)
        replay.compare_values("reward of the environment", recorded, outcome.score.reward)
        replay.compare_values("success", trajectory.success, outcome.score.success)


def _call_environment(
    trajectory: Trajectory, replay: EpisodeReplay, timeout_s: float, function: Callable[[], Any]
) -> Any:
    """Call the environment; record what it raises and return None then."""
    label = f"environment '{trajectory.environment}', level '{trajectory.level}', seed {trajectory.seed}"
    try:
        return call_with_time_limit(timeout_s, label, function)
    except USER_CODE_ERRORS as error:
        is_late = isinstance(error, EnvironmentFault) and TIMEOUT_TEXT in str(error)
        replay.error = (
            f"a call {TIMEOUT_TEXT} {timeout_s:g} s"
            if is_late
            else f"{type(error).__name__}: {error}"
        )
        replay.trace = format_error_trace(error)
        replay.lines.append(f"  error: {replay.error}")
        return None


def _close(played: Episode | TwoPlayerGame, replay: EpisodeReplay, timeout_s: float) -> None:
    """Close what an episode or a game holds open; an error of that changes no result."""
    try:
        call_with_time_limit(timeout_s, "the replay", played.close)
    except USER_CODE_ERRORS as error:
        replay.lines.append(f"  its close failed: {type(error).__name__}: {error}")


def _play_actions(
    environment: Environment,
    trajectory: Trajectory,
    opening: Sequence[Message],
    replay: EpisodeReplay,
    timeout_s: float,
) -> None:
    call = functools.partial(_call_environment, trajectory, replay, timeout_s)
    episode: Episode | None = call(
        lambda: environment.episode(seed=trajectory.seed, level=trajectory.level)
    )
    if episode is None:
        return
    try:
        _play_episode(episode, trajectory, opening, replay, call)
    finally:
        _close(episode, replay, timeout_s)


def _play_episode(
    episode: Episode,
    trajectory: Trajectory,
    opening: Sequence[Message],
    replay: EpisodeReplay,
    call: Callable[[Callable[[], Any]], Any],
) -> None:
    messages = call(lambda: normalize_messages(episode.reset()))
    if messages is None:
        return
    _show_opening(messages, trajectory, opening, replay)
    total, last = 0.0, Step()
    for number, turn in enumerate(trajectory.turns, start=1):
        replay.lines.append(f"turn {number}: {_truncate_text(turn.action)}")
        if turn is trajectory.turns[-1] and not was_last_action_played(
            trajectory, episode.cut_reward, last.answer
        ):
            replay.lines.append("  cut off by the token limit: not sent to the environment")
            break
        step = call(functools.partial(_step_episode, episode, turn.action))
        if step is None:
            return
        last, total = step, total + step.reward
        if not math.isfinite(step.reward):
            replay.error = f"step returned reward {step.reward}, not a finite reward"
            return
        if _show_step(number, turn, step, trajectory, replay):
            break
    if trajectory.stop_reason != StopReason.FAILED:
        total += compute_cut_reward(trajectory, episode)
        _compare_outcome(trajectory, episode.target, last, total, replay)


def _show_opening(
    messages: Sequence[Message],
    trajectory: Trajectory,
    opening: Sequence[Message],
    replay: EpisodeReplay,
) -> None:
    """Show the prompt and compare it; `opening`: all recorded messages, of a failed episode."""
    prompt = next(
        (message["content"] for message in reversed(messages) if message["role"] == "user"), ""
    )
    replay.lines.append(f"prompt: {_truncate_text(prompt)}")
    if opening:
        replay.compare_values("opening messages", list(opening), messages)
    else:
        replay.compare_values("prompt", trajectory.prompt, prompt)


def _play_game(
    environment: TwoPlayerEnvironment,
    trajectory: Trajectory,
    moves: Sequence[str],
    opening: Sequence[Message],
    replay: EpisodeReplay,
    timeout_s: float,
) -> None:
    """Play a game between policies again, with the moves of both; compare what the recorded player saw and earned."""
    call = functools.partial(_call_environment, trajectory, replay, timeout_s)
    game: TwoPlayerGame | None = call(
        lambda: environment.create_game(trajectory.seed, trajectory.level)
    )
    if game is None:
        return
    try:
        call(game.begin)
        _play_moves(game, trajectory, moves, opening, replay, call)
        if replay.error or game.outcome is None:
            return
        player = read_seat(trajectory.kind)
        move = trajectory.turns[-1].action if trajectory.turns else ""
        step = call(lambda: normalize_step(build_last_step(game, player, move)))
        if step is not None and trajectory.stop_reason != StopReason.FAILED:
            replay.compare_values(
                "reason of the end", trajectory.info["reason"], step.info["reason"]
            )
            _compare_outcome(trajectory, "", step, step.reward, replay)
    finally:
        _close(game, replay, timeout_s)


def _take_messages(game: TwoPlayerGame, player: int) -> list[Message]:
    return normalize_messages(game.take_messages(player))


def _play_moves(
    game: TwoPlayerGame,
    trajectory: Trajectory,
    moves: Sequence[str],
    opening: Sequence[Message],
    replay: EpisodeReplay,
    call: Callable[[Callable[[], Any]], Any],
) -> None:
    """Play the recorded moves; the player whose move is missing then has lost by a limit (`forfeit`)."""
    seat, forfeit = read_seat(trajectory.kind), trajectory.info.get("forfeit")
    remaining, seen = list(moves), 0  # observations of the recorded player
    while not replay.error and game.outcome is None:
        mover = game.to_move
        messages = call(functools.partial(_take_messages, game, mover))
        if messages is None:
            return
        if not messages:
            replay.error = "a player got no message to act on"
            return
        if mover == seat and seen == 0:
            _show_opening(messages, trajectory, opening, replay)
        elif mover == seat and (known := trajectory.turns[seen - 1].observation) is not None:
            text = "\n".join(message["content"] for message in messages)
            replay.lines.append(f"  -> {_truncate_text(text)}")
            replay.compare_values(f"observation of turn {seen}", known, text)
        seen += mover == seat
        if remaining:
            move = remaining.pop(0)
            replay.lines.append(f"player {mover}: {_truncate_text(move)}")
            call(functools.partial(game.play, move))
            if not remaining and game.outcome is None:
                call(lambda: check_game_length(len(moves)))
        elif forfeit is not None:
            replay.lines.append(f"player {mover}: {_truncate_text(forfeit)}")
            call(functools.partial(game.forfeit, forfeit))
            forfeit = None
        else:
            if trajectory.stop_reason != StopReason.FAILED:
                replay.compare_values("end of the game", True, False)
            return
    replay.compare_values("recorded moves that were not played", 0, len(remaining))


def _step_episode(episode: Episode, action: str) -> Step:
    return normalize_step(episode.step(action))


def _show_step(
    number: int, turn: Turn, step: Step, trajectory: Trajectory, replay: EpisodeReplay
) -> bool:
    """Record the result of a step and its differences from the recording; return whether the episode has ended."""
    has_ended = step.terminated or step.truncated
    observation = None if has_ended else "\n".join(message["content"] for message in step.messages)
    if step.tool_call is not None:
        replay.lines.append(
            f"  calls {step.tool_call.name} {_truncate_text(step.tool_call.arguments)}"
        )
    replay.lines.append(
        f"  -> {'the end' if has_ended else _truncate_text(observation)} (reward {step.reward:g})"
    )
    if not has_ended and not step.messages:
        replay.error = "a step neither ended the episode nor returned an observation"
        return True
    replay.compare_values(f"tool call of turn {number}", turn.tool_call, step.tool_call)
    replay.compare_values(f"misuse in turn {number}", turn.is_error, step.is_error)
    is_last = turn is trajectory.turns[-1]
    if turn.observation is not None:
        replay.compare_values(
            f"observation of turn {number}",
            turn.observation,
            observation or "none: the episode ended",
        )
    elif is_last and trajectory.stop_reason in (StopReason.TERMINATED, StopReason.ENVIRONMENT):
        replay.compare_values(f"end at turn {number}", True, has_ended)
    return has_ended


def _compare_outcome(
    trajectory: Trajectory, target: str, last: Step, total: float, replay: EpisodeReplay
) -> None:
    replay.compare_values("answer", trajectory.answer, last.answer)
    if trajectory.success is not None:
        replay.compare_values("success", trajectory.success, bool(last.success))
    replay.compare_values(
        "reward of the environment", trajectory.rewards.get("task", trajectory.reward), total
    )
    replay.compare_values("right answer (target)", trajectory.target, target)


def _score_trajectory(
    name: str,
    function: RewardFunction,
    trajectory: Trajectory,
    expected: str,
    replay: EpisodeReplay,
    timeout_s: float,
) -> None:
    """Score a copy of the trajectory twice.

    Args:
        expected: the recorded error; "" = none.
    """
    task = trajectory.rewards.get("task", trajectory.reward)
    bare = dataclasses.replace(trajectory, rewards={"task": task}, reward=task)
    results: list[Any] = []
    for _ in range(2):
        try:
            value = call_with_time_limit(
                timeout_s,
                f"reward '{name}'",
                lambda: _compute_reward_values(RewardSignature(function, name), bare),
            )
            results.append(value[0] if len(value) == 1 else f"{len(value)} values for 1 trajectory")
        except USER_CODE_ERRORS as error:
            results.append(f"raised {type(error).__name__}: {error}")
            replay.error, replay.trace = results[-1], format_error_trace(error)
    result = results[0]
    replay.lines.append(f"reward {name}: {_truncate_text(result)}")
    if not _is_same(*results):
        first, second = map(_truncate_text, results)
        text = f"reward '{name}' gave {first} and {second} for the same trajectory"
        replay.differences.append(text)
        replay.lines.append(f"  ! {text}")
    if expected:
        now = result if isinstance(result, str) else f"gave {result!r}"
        if isinstance(result, float) and not math.isfinite(result):
            now += ", no finite number"
        replay.compare_values(f"error of reward '{name}'", expected, now)
    elif name in trajectory.rewards:
        replay.compare_values(f"reward '{name}'", trajectory.rewards[name], result)


def _compute_reward_values(signature: RewardSignature, trajectory: Trajectory) -> list[Any]:
    """Score a copy of the trajectory without token ids; see `rewards.user_function` for None values."""
    values = signature.call_function([Rollout([], [], [], [], copy.deepcopy(trajectory))])
    return [0.0 if value is None and signature.is_trl else value for value in values]


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, int | float):
        return first == second or (math.isnan(first) and math.isnan(second))
    return bool(first == second)


def _truncate_text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    # Escape control characters that a policy may write before they reach a terminal.
    text = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text[: _MAX_SHOWN_CHARACTERS + 1]
    )
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
