"""Rewards of experiences under their labels, and demonstrations from the right answers of a recorded buffer.

An environment is a function of (level, seed, actions, right answer). So the episode is replayed with the recorded
actions and the label as its right answer, on a copy of the trajectory. The orchestrator of offline training then scores
that copy with all its components. The label stands for the truth in the reward, and nowhere else.

A file of demonstrations is new data for a retraining (`prepare_data.demonstrations`).

R rollouts of the experience, C components.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
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
from rl_core.rollouts.episode_sequence import (
    compute_cut_reward,
    normalize_messages,
    normalize_step,
    was_last_action_played,
)
from rl_core.settings import OnlineLabelSettings
from rl_core.types import Conversation, Rollout, RolloutGroup, Trajectory
from rl_core.user_code.checks import USER_CODE_ERRORS

REPLAY_TIMEOUT_SECONDS = 60.0  # per call of an environment that can block


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Rewards of an experience by rollout and component."""

    components: tuple[str, ...]  # [C]
    raw_RC: NDArray[np.float64]  # 0 for a masked rollout
    weighted_RC: NDArray[np.float64]  # contributions to the total
    totals_R: NDArray[np.float64]
    # False = the label does not apply to this rollout, or a component failed on it
    is_known_R: NDArray[np.bool_]
    success_R: NDArray[np.bool_]  # under the label

    def to_json(self) -> dict[str, Any]:
        """Return plain values, None for unknown rewards."""
        columns = (self.is_known_R, self.raw_RC, self.weighted_RC, self.totals_R)
        rollouts = [
            {"raw": raw, "weighted": weighted, "total": total} if is_known else None
            for is_known, raw, weighted, total in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        return {"components": list(self.components), "rollouts": rollouts}


def apply_label(
    experience: Experience,
    label: Label,
    environment: Environment | None,
    *,
    is_same_answer: Callable[[str, str], bool] | None = None,
) -> list[Rollout | None]:
    """Copy the rollouts with reward, success and right answer according to the label; None if unknown.

    Args:
        environment: that was played; None = chat, where an answer is right (1, else 0) if it equals the label's.
        is_same_answer: equality of an answer and a label, in chat and for scores; None = ignoring case and white space.
    Raises: DataError for an experience of another environment; EnvironmentFault if the replay fails.
    """
    is_same_answer = is_same_answer or _have_equal_normal_form
    labelled: list[Rollout | None] = []
    for rollout in experience.rollouts:
        if label.kind == "played":
            labelled.append(_copy_rollout(rollout))
        elif label.kind == "score":
            labelled.append(_apply_score(rollout, label, is_same_answer, experience.vote.answer))
        else:
            assert label.text is not None
            labelled.append(_apply_right_answer(rollout, label.text, environment, is_same_answer))
    return labelled


def _have_equal_normal_form(answer: str, text: str) -> bool:
    return normalise_answer(answer) == normalise_answer(text)


def _copy_rollout(rollout: Rollout, **changes: Any) -> Rollout:
    """Copy a rollout and its trajectory with these values; rewards are as in an unscored trajectory."""
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
    """Apply a score to the one answer it is about; return None for other answers, which stay unknown."""
    scored_answer = label.text if label.text is not None else returned_answer
    answer = rollout.trajectory.answer
    if answer is None or scored_answer is None:
        is_scored = answer == scored_answer
    else:
        is_scored = is_same_answer(answer, scored_answer)
    if not is_scored:
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
    """Replay the episode with this right answer; rewards are added up as during collection."""
    recorded = rollout.trajectory
    known = [part.name for part in environment.parts]
    if recorded.environment not in known:
        raise DataError(
            f"an experience of environment '{recorded.environment}'; this worker has '{', '.join(known)}'"
        )
    environment = environment.find_part(recorded.level)
    description = (
        f"environment '{environment.name}', level '{recorded.level}', seed {recorded.seed}"
    )

    def call(function: Callable[[], Any]) -> Any:
        if environment.blocking:
            return call_with_time_limit(REPLAY_TIMEOUT_SECONDS, description, function)
        return function()

    try:
        episode = call(lambda: environment.episode(seed=recorded.seed, level=recorded.level))
        try:
            call(lambda: normalize_messages(episode.reset()))
            episode.target = text
            reward, step = 0.0, Step()
            for turn in recorded.turns:
                if turn is recorded.turns[-1] and not was_last_action_played(
                    recorded, episode.cut_reward, step.answer
                ):
                    break
                step = call(functools.partial(_step_episode, episode, turn.action))
                reward += step.reward
                if step.terminated or step.truncated:
                    break
            if not (step.terminated or step.truncated):
                reward += compute_cut_reward(recorded, episode)
        finally:
            call(episode.close)
    except (SettingsError, EnvironmentFault):
        raise
    except USER_CODE_ERRORS as error:
        raise EnvironmentFault(f"{description}: {type(error).__name__}: {error}") from error
    success = bool(step.success)
    return _copy_rollout(
        rollout, reward=reward, success=success, is_grounded=step.is_grounded, target=text
    )


def _step_episode(episode: Episode, action: str) -> Step:
    return normalize_step(episode.step(action))


class ExperienceScorer:
    """Scorer of experiences with the orchestrator of offline training.

    The orchestrator's state (running scales, the curiosity model) changes with every call, so calls must be made in the
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
        """Configure the scorer.

        Args:
            embed: the policy's embeddings of turns, if a component needs them.
        """
        self.rewards = rewards
        self.environment = environment
        self.embed = embed
        self.is_same_answer = is_same_answer

    def score_experiences(
        self, pairs: Sequence[tuple[Experience, Label]]
    ) -> list[RewardTable | str]:
        """Return the rewards of each experience under its label, scored as one batch of groups; a string is an error.

        A label that a component cannot use (a word where a number is expected) does not affect other experiences: each
        is then
        scored alone, and the orchestrator's state is as if the failing ones had been absent.
        """
        labelled: list[list[Rollout | None] | str] = []
        for experience, label in pairs:
            try:
                rollouts = apply_label(
                    experience, label, self.environment, is_same_answer=self.is_same_answer
                )
                labelled.append(rollouts)
            # An unknown level in a request raises SettingsError.
            except (DataError, EnvironmentFault, SettingsError) as error:
                labelled.append(str(error))
        state_before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score_rollouts([item for item in labelled if not isinstance(item, str)])
        if problem:
            self.rewards.load_state_dict(state_before)
        score = self._score_alone if problem else self._build_reward_table
        return [item if isinstance(item, str) else score(item) for item in labelled]

    def _score_alone(self, rollouts: Sequence[Rollout | None]) -> RewardTable | str:
        state_before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score_rollouts([rollouts])
        if problem:
            self.rewards.load_state_dict(state_before)
        return problem or self._build_reward_table(rollouts)

    def _score_rollouts(self, experiences: Sequence[Sequence[Rollout | None]]) -> str:
        """Score the known rollouts; return "" or the error."""
        groups = [
            RolloutGroup([rollout for rollout in rollouts if rollout is not None])
            for rollouts in experiences
        ]
        groups = [group for group in groups if group.rollouts]
        try:
            if groups:
                self.rewards.score(groups, embed=self.embed)
        except RewardError as error:
            return str(error)
        for group in groups:
            if all(rollout.is_masked for rollout in group.rollouts):
                return "no rollout could be scored"
            for rollout in group.rollouts:
                if not math.isfinite(rollout.reward):
                    return f"a reward is {rollout.reward}"
        return ""

    def _build_reward_table(self, rollouts: Sequence[Rollout | None]) -> RewardTable:
        names = tuple(self.rewards.weights)
        shape = (len(rollouts), len(names))
        raw_RC, weighted_RC, totals_R = np.zeros(shape), np.zeros(shape), np.zeros(shape[0])
        is_known_R, success_R = np.zeros(shape[0], dtype=bool), np.zeros(shape[0], dtype=bool)
        for index, rollout in enumerate(rollouts):
            if rollout is None or rollout.is_masked:
                continue
            values = rollout.trajectory.rewards
            is_known_R[index], success_R[index] = True, bool(rollout.trajectory.success)
            # 0 for a component that only other environments of a mixture have.
            raw_RC[index] = [values.get(name, 0.0) for name in names]
            weighted_RC[index] = [values.get(WEIGHTED_PREFIX + name, 0.0) for name in names]
            totals_R[index] = rollout.reward
        return RewardTable(names, raw_RC, weighted_RC, totals_R, is_known_R, success_R)


def read_labelled_experiences(
    log: Path, settings: OnlineLabelSettings
) -> Iterator[tuple[Experience, Label]]:
    """Yield the experiences of a log with their final label, as chosen by the worker."""
    experiences: dict[str, Experience] = {}
    labels: dict[str, Label | None] = {}
    for record in ExperienceLogReader(log).read_records():
        try:
            if record.kind == "experience":
                experience = record.parse_experience()
                first_label = None
                if settings.use_consensus:
                    first_label = create_pseudo_label(
                        experience.vote,
                        min_confidence=settings.min_confidence,
                        min_votes=settings.min_votes,
                        confidence=settings.confidence,
                    )
                if first_label is None and settings.trust_environment:
                    first_label = Label("played", "environment")
                experiences.setdefault(experience.request_id, experience)
                labels.setdefault(experience.request_id, first_label)
            elif record.kind == "label" and record.value["request_id"] in experiences:
                request_id, (_, label) = record.value["request_id"], record.parse_label()
                labels[request_id] = choose_prevailing_label(labels[request_id], label)
        except (DataError, KeyError, TypeError):  # the worker skips it too
            continue
    for request_id, experience in experiences.items():
        final_label = labels[request_id]
        if final_label is not None:
            yield experience, final_label


def extract_demonstrations(
    log: Path, settings: OnlineLabelSettings, environment: Environment | None
) -> Iterator[dict[str, Any]]:
    """Yield one right answer of each request: its messages, `tools` if any, `request_id`, the label's source.

    In a conversation only the answer is imitated: earlier assistant turns have weight 0.
    Args:
        environment: whose episodes were served; None = conversations.
    Raises: DataError if the log holds nothing of this environment that was right.
    """
    count = 0
    for experience, label in read_labelled_experiences(log, settings):
        try:
            rollouts = apply_label(experience, label, environment)
            right = [
                rollout.trajectory
                for rollout in rollouts
                if rollout is not None and rollout.success and not rollout.is_truncated
            ]
            if not right:
                continue
            if environment is None:
                row = _build_conversation_row(experience.conversation, right[0])
            else:
                row = _replay_messages(environment, right[0])
        # The last two are raised for values of the wrong type.
        except (DataError, EnvironmentFault, SettingsError, KeyError, TypeError):
            continue
        count += 1
        yield {**row, "request_id": experience.request_id, "label": label.source}
    if not count:
        noun = "conversation"
        if environment is not None:
            noun = f"episode of environment '{environment.name}'"
        raise DataError(f"{log}: holds no {noun} that is right according to its label")


def _build_conversation_row(
    conversation: Conversation | None, answer: Trajectory
) -> dict[str, Any]:
    """Return a conversation followed by the answer."""
    if conversation is None:
        raise DataError("recorded without messages, or an episode")
    earlier = [
        {**message, "weight": 0} if message["role"] == "assistant" else dict(message)
        for message in conversation.messages
    ]
    last_message = {"role": "assistant", "content": answer.turns[-1].action}
    row: dict[str, Any] = {"messages": [*earlier, last_message]}
    return {**row, "tools": conversation.tools} if conversation.tools else row


def _replay_messages(environment: Environment, trajectory: Trajectory) -> dict[str, Any]:
    """Replay an episode and return its messages."""
    episode = environment.episode(seed=trajectory.seed, level=trajectory.level)
    try:
        messages: list[dict[str, Any]] = [dict(message) for message in episode.reset()]
        for turn in trajectory.turns:
            messages.append({"role": "assistant", "content": turn.action})
            step = episode.step(turn.action)
            if step.terminated or step.truncated:
                break
            messages += [dict(message) for message in step.messages]
    finally:
        episode.close()
    return {"messages": messages}
