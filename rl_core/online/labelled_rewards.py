"""Rewards of experiences: the label stands for the truth in the reward, and nowhere else.

An environment is a function of (level, seed, actions, right answer). So the episode is played again with the recorded
actions and the label as its right answer, on a copy of the trajectory; the orchestrator that offline training uses
then scores that copy with all its components.

R rollouts of the experience, C components.

Demonstrations out of a recorded buffer: episodes and chat answers that were right under their label.

For a retraining: a file of them is new data of `prepare_data.demonstrations`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.environments.environment import Environment, Episode, Step, call_with_time_limit
from rl_core.errors import DataError, EnvironmentFault, RewardError, SettingsError
from rl_core.models.hidden_states import TurnEmbedder
from rl_core.online.experience import Experience
from rl_core.online.experience_log import ExperienceLogReader
from rl_core.online.labels import Label, choose_prevailing_label, create_pseudo_label
from rl_core.online.voting import normalise_answer
from rl_core.rewards.orchestrator import WEIGHTED_PREFIX, RewardOrchestrator
from rl_core.rollouts.episode_sequence import normalize_messages, normalize_step
from rl_core.settings import OnlineLabelSettings
from rl_core.types import Conversation, Rollout, RolloutGroup, StopReason, Trajectory

REPLAY_TIMEOUT_SECONDS = 60.0  # of an environment's call, where it may wait


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Rewards of an experience by rollout and component."""

    components: tuple[str, ...]  # [C]
    raw_RC: NDArray[np.float64]  # 0 where a rollout is masked
    weighted_RC: NDArray[np.float64]  # contributions to the total
    totals_R: NDArray[np.float64]
    # False = the label says nothing of this rollout, or a component failed on it
    is_known_R: NDArray[np.bool_]
    success_R: NDArray[np.bool_]  # under the label

    def to_json(self) -> dict[str, Any]:
        """Plain values, None where nothing is known."""
        known = self.is_known_R.tolist()
        rows = zip(
            known,
            self.raw_RC.tolist(),
            self.weighted_RC.tolist(),
            self.totals_R.tolist(),
            strict=True,
        )
        return {
            "components": list(self.components),
            "rollouts": [
                {"raw": raw, "weighted": weighted, "total": total} if is_known else None
                for is_known, raw, weighted, total in rows
            ],
        }


def apply_label(
    experience: Experience,
    label: Label,
    environment: Environment | None,
    *,
    is_same_answer: Callable[[str, str], bool] | None = None,
) -> list[Rollout | None]:
    """Copies of the rollouts with the reward, success and right answer that follow from the label; None = unknown.

    Args:
        environment: that was played; None = chat, where an answer is right (1, else 0) if it is the label's.
        same: equality of an answer and a label, in chat and for scores; None = up to case and white space.
    Raises: DataError for an experience of another environment; EnvironmentFault where the replay fails.
    """
    is_same_answer = is_same_answer or (
        lambda answer, text: normalise_answer(answer) == normalise_answer(text)
    )
    found: list[Rollout | None] = []
    for rollout in experience.rollouts:
        if label.kind == "played":
            found.append(_copy_rollout(rollout))
        elif label.kind == "score":
            found.append(_apply_score(rollout, label, is_same_answer, experience.vote.answer))
        else:
            assert label.text is not None
            found.append(_apply_right_answer(rollout, label.text, environment, is_same_answer))
    return found


def _copy_rollout(rollout: Rollout, **changes: Any) -> Rollout:
    """A rollout whose trajectory is its own, with these values; a reward as an unscored trajectory has it."""
    old = rollout.trajectory
    rewards = {name: value for name, value in old.rewards.items() if name == "task"}
    trajectory = dataclasses.replace(
        old, turns=copy.deepcopy(old.turns), rewards=rewards, **changes
    )
    if "reward" in changes:
        trajectory.rewards = {"task": changes["reward"]}
    if "task" not in trajectory.rewards:
        trajectory.rewards = {"task": trajectory.reward}
    trajectory.reward = trajectory.rewards["task"]
    return dataclasses.replace(rollout, trajectory=trajectory, is_masked=False)


def _apply_score(
    rollout: Rollout,
    label: Label,
    is_same_answer: Callable[[str, str], bool],
    returned_answer: str | None,
) -> Rollout | None:
    """A score is of one answer; of others nothing is known."""
    wanted, answer = (
        label.text if label.text is not None else returned_answer,
        rollout.trajectory.answer,
    )
    is_meant = (
        answer == wanted if answer is None or wanted is None else is_same_answer(answer, wanted)
    )
    if not is_meant:
        return None
    assert label.score is not None
    return _copy_rollout(rollout, reward=float(label.score), success=label.score >= 0.5)


def _apply_right_answer(
    rollout: Rollout,
    text: str,
    environment: Environment | None,
    is_same_answer: Callable[[str, str], bool],
) -> Rollout:
    answer = rollout.trajectory.answer
    if environment is None:
        success = answer is not None and is_same_answer(answer, text)
        return _copy_rollout(rollout, reward=float(success), success=success, target=text)
    return _replay_episode(rollout, text, environment)


def _replay_episode(rollout: Rollout, text: str, environment: Environment) -> Rollout:
    """The episode played again with this right answer: rewards are added up as when it was collected."""
    played = rollout.trajectory
    place = f"environment '{environment.name}', level '{played.level}', seed {played.seed}"
    if played.environment != environment.name:
        raise DataError(
            f"an experience of environment '{played.environment}'; this worker has '{environment.name}'"
        )

    def call(function: Callable[[], Any]) -> Any:
        return (
            call_with_time_limit(REPLAY_TIMEOUT_SECONDS, place, function)
            if environment.blocking
            else function()
        )

    try:
        episode = call(lambda: environment.episode(seed=played.seed, level=played.level))
        try:
            call(lambda: normalize_messages(episode.reset()))
            episode.target = text
            reward, success, grounded = 0.0, False, None
            for turn in played.turns:
                if turn is played.turns[-1] and _is_cut_off(played.stop_reason, turn):
                    break
                step = call(functools.partial(_step_episode, episode, turn.action))
                reward += step.reward
                success, grounded = bool(step.success), step.is_grounded
                if step.terminated or step.truncated:
                    break
        finally:
            call(episode.close)
    except (SettingsError, EnvironmentFault):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(f"{place}: {type(error).__name__}: {error}") from error
    return _copy_rollout(rollout, reward=reward, success=success, is_grounded=grounded, target=text)


def _step_episode(episode: Episode, action: str) -> Step:
    return normalize_step(episode.step(action))


def _is_cut_off(stop_reason: str, turn: Any) -> bool:
    """True = the last action was cut off by a limit, and the environment was not shown it."""
    return stop_reason == StopReason.MAX_TOKENS and turn.tool_call is None and not turn.is_error


class ExperienceScorer:
    """Scores experiences with the orchestrator of offline training.

    The orchestrator's state (running scales, the curiosity model) changes with every call, so calls are made in the
    order of learning.
    """

    def __init__(
        self,
        rewards: RewardOrchestrator,
        environment: Environment | None,
        *,
        embed: TurnEmbedder | None = None,
        is_same_answer: Callable[[str, str], bool] | None = None,
    ) -> None:
        """embed: the policy's states, where a component needs them."""
        self.rewards = rewards
        self.environment = environment
        self.embed = embed
        self.is_same_answer = is_same_answer

    def score_experiences(
        self, pairs: Sequence[tuple[Experience, Label]]
    ) -> list[RewardTable | str]:
        """Rewards of each experience under its label, as one batch of groups; a text = why it could not be scored.

        A label that no component can use (a word where a number is compared) spoils no other experience: then each is
        scored by itself, and the orchestrator's state is as if the spoilt ones had never been there.
        """
        found: list[list[Rollout | None] | str] = []
        for experience, label in pairs:
            try:
                found.append(
                    apply_label(
                        experience, label, self.environment, is_same_answer=self.is_same_answer
                    )
                )
            except (
                DataError,
                EnvironmentFault,
                SettingsError,
            ) as error:  # an unknown level is the request's
                found.append(str(error))
        before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score_rollouts(
            [rollouts for rollouts in found if not isinstance(rollouts, str)]
        )
        if not problem:
            return [one if isinstance(one, str) else self._build_reward_table(one) for one in found]
        self.rewards.load_state_dict(before)
        return [one if isinstance(one, str) else self._score_alone(one) for one in found]

    def _score_alone(self, rollouts: Sequence[Rollout | None]) -> RewardTable | str:
        before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score_rollouts([rollouts])
        if problem:
            self.rewards.load_state_dict(before)
        return problem or self._build_reward_table(rollouts)

    def _score_rollouts(self, found: Sequence[Sequence[Rollout | None]]) -> str:
        """Score the known rollouts; why it cannot be done, "" = it is."""
        groups = [
            RolloutGroup([rollout for rollout in rollouts if rollout is not None])
            for rollouts in found
        ]
        groups = [group for group in groups if group.rollouts]
        try:
            if groups:
                self.rewards.score(groups, embed=self.embed)
        except RewardError as error:
            return str(error)
        except statistics.StatisticsError:
            return "no rollout could be scored"
        wrong = next(
            (r for group in groups for r in group.rollouts if not math.isfinite(r.reward)), None
        )
        return "" if wrong is None else f"a reward is {wrong.reward}"

    def _build_reward_table(self, found: Sequence[Rollout | None]) -> RewardTable:
        names = tuple(self.rewards.weights)
        shape = (len(found), len(names))
        raw_RC, weighted_RC, totals_R = np.zeros(shape), np.zeros(shape), np.zeros(shape[0])
        known_R, success_R = np.zeros(shape[0], dtype=bool), np.zeros(shape[0], dtype=bool)
        for index, rollout in enumerate(found):
            if rollout is None or rollout.is_masked:
                continue
            values = rollout.trajectory.rewards
            known_R[index], success_R[index] = True, rollout.trajectory.success
            raw_RC[index] = [values[name] for name in names]
            weighted_RC[index] = [values[WEIGHTED_PREFIX + name] for name in names]
            totals_R[index] = rollout.reward
        return RewardTable(names, raw_RC, weighted_RC, totals_R, known_R, success_R)


def read_labelled_experiences(
    log: Path, settings: OnlineLabelSettings
) -> Iterator[tuple[Experience, Label]]:
    """Experiences of a log with the label that counts in the end, as the worker chooses it."""
    found: dict[str, tuple[Experience, Label | None]] = {}
    for record in ExperienceLogReader(log).read_records():
        try:
            if record.kind == "experience":
                experience = record.parse_experience()
                first = None
                if settings.use_consensus:
                    first = create_pseudo_label(
                        experience.vote,
                        min_confidence=settings.min_confidence,
                        min_votes=settings.min_votes,
                        confidence=settings.confidence,
                    )
                if first is None and settings.trust_environment:
                    first = Label("played", "environment")
                found.setdefault(experience.request_id, (experience, first))
            elif (
                record.kind == "label"
                and (entry := found.get(record.value["request_id"])) is not None
            ):
                found[record.value["request_id"]] = (
                    entry[0],
                    choose_prevailing_label(entry[1], record.parse_label()[1]),
                )
        except (DataError, KeyError, TypeError):  # the worker leaves it out as well
            continue
    yield from ((experience, label) for experience, label in found.values() if label is not None)


def extract_demonstrations(
    log: Path, settings: OnlineLabelSettings, environment: Environment | None
) -> Iterator[dict[str, Any]]:
    """One right answer of each request: its messages, `tools` where it had some, `request_id`, the label's source.

    In a conversation the answer alone is imitated: earlier turns of the assistant have weight 0.

    Args:
        environment: whose episodes were served; None = conversations.
    Raises: DataError where the log holds nothing of this environment that was right.
    """
    count = 0
    for experience, label in read_labelled_experiences(log, settings):
        try:
            rollouts = apply_label(experience, label, environment)
            best = next(
                (
                    r.trajectory
                    for r in rollouts
                    if r is not None and r.success and not r.is_truncated
                ),
                None,
            )
            if best is None:
                continue
            row = (
                _build_conversation_row(experience.conversation, best)
                if environment is None
                else _replay_messages(environment, best)
            )
        except (
            DataError,
            EnvironmentFault,
            SettingsError,
            KeyError,
            TypeError,
        ):  # of values of another type
            continue
        count += 1
        yield {**row, "request_id": experience.request_id, "label": label.source}
    if not count:
        what = (
            "conversation"
            if environment is None
            else f"episode of environment '{environment.name}'"
        )
        raise DataError(f"{log}: holds no {what} that is right under its label")


def _build_conversation_row(
    conversation: Conversation | None, answer: Trajectory
) -> dict[str, Any]:
    """A conversation with the answer at its end."""
    if conversation is None:
        raise DataError("was recorded without its messages, or is an episode")
    earlier = [
        {**message, "weight": 0} if message["role"] == "assistant" else dict(message)
        for message in conversation.messages
    ]
    row: dict[str, Any] = {
        "messages": [*earlier, {"role": "assistant", "content": answer.turns[-1].action}]
    }
    return {**row, "tools": conversation.tools} if conversation.tools else row


def _replay_messages(environment: Environment, played: Trajectory) -> dict[str, Any]:
    """The messages of an episode, played again."""
    episode = environment.episode(seed=played.seed, level=played.level)
    try:
        messages: list[dict[str, Any]] = [dict(message) for message in episode.reset()]
        for turn in played.turns:
            messages.append({"role": "assistant", "content": turn.action})
            step = episode.step(turn.action)
            if step.terminated or step.truncated:
                break
            messages += [dict(message) for message in step.messages]
    finally:
        episode.close()
    return {"messages": messages}
