"""Rewards of experiences: the label stands for the truth in the reward, and nowhere else.

An environment is a function of (level, seed, actions, right answer). So the episode is played again with the recorded
actions and the label as its right answer, on a copy of the trajectory; the orchestrator that offline training uses
then scores that copy with all its components.

R rollouts of the experience, C components.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.heldout import within
from rl_core.errors import DataError, EnvironmentFault, RewardError, SettingsError
from rl_core.models.turn_states import Embed
from rl_core.online.experience import Experience
from rl_core.online.labels import Label
from rl_core.online.voting import plain_text
from rl_core.rewards.orchestrator import WEIGHTED, RewardOrchestrator
from rl_core.rollouts.episode_sequence import plain_messages, plain_step
from rl_core.types import Rollout, RolloutGroup, StopReason

__all__ = ["ExperienceScorer", "RewardTable", "labelled_rollouts"]

REPLAY_SECONDS = 60.0  # of an environment's call, where it may wait


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Rewards of an experience by rollout and component."""

    components: tuple[str, ...]  # [C]
    raw_RC: NDArray[np.float64]  # 0 where a rollout is masked
    weighted_RC: NDArray[np.float64]  # contributions to the total
    totals_R: NDArray[np.float64]
    is_known_R: NDArray[np.bool_]  # False = the label says nothing of this rollout, or a component failed on it
    success_R: NDArray[np.bool_]  # under the label

    def to_json(self) -> dict[str, Any]:
        """Plain values, None where nothing is known."""
        known = self.is_known_R.tolist()
        rows = zip(known, self.raw_RC.tolist(), self.weighted_RC.tolist(), self.totals_R.tolist(), strict=True)
        return {
            "components": list(self.components),
            "rollouts": [
                {"raw": raw, "weighted": weighted, "total": total} if is_known else None
                for is_known, raw, weighted, total in rows
            ],
        }


def labelled_rollouts(
    experience: Experience,
    label: Label,
    environment: Environment | None,
    *,
    same: Callable[[str, str], bool] | None = None,
) -> list[Rollout | None]:
    """Copies of the rollouts with the reward, success and right answer that follow from the label; None = unknown.

    Args:
        environment: that was played; None = chat, where an answer is right (1, else 0) if it is the label's.
        same: equality of an answer and a label, in chat and for scores; None = up to case and white space.
    Raises: DataError for an experience of another environment; EnvironmentFault where the replay fails.
    """
    same = same or (lambda answer, text: plain_text(answer) == plain_text(text))
    found: list[Rollout | None] = []
    for rollout in experience.rollouts:
        if label.kind == "played":
            found.append(_copied(rollout))
        elif label.kind == "score":
            found.append(_scored(rollout, label, same, experience.vote.answer))
        else:
            assert label.text is not None
            found.append(_answered(rollout, label.text, environment, same))
    return found


def _copied(rollout: Rollout, **changes: Any) -> Rollout:
    """A rollout whose trajectory is its own, with these values; a reward as an unscored trajectory has it."""
    old = rollout.trajectory
    rewards = {name: value for name, value in old.rewards.items() if name == "task"}
    trajectory = dataclasses.replace(old, turns=copy.deepcopy(old.turns), rewards=rewards, **changes)
    if "reward" in changes:
        trajectory.rewards = {"task": changes["reward"]}
    if "task" not in trajectory.rewards:
        trajectory.rewards = {"task": trajectory.reward}
    trajectory.reward = trajectory.rewards["task"]
    return dataclasses.replace(rollout, trajectory=trajectory, is_masked=False)


def _scored(rollout: Rollout, label: Label, same: Callable[[str, str], bool], given: str | None) -> Rollout | None:
    """A score is of one answer; of others nothing is known."""
    wanted, answer = label.text if label.text is not None else given, rollout.trajectory.answer
    is_meant = answer == wanted if answer is None or wanted is None else same(answer, wanted)
    if not is_meant:
        return None
    assert label.score is not None
    return _copied(rollout, reward=float(label.score), success=label.score >= 0.5)


def _answered(
    rollout: Rollout, text: str, environment: Environment | None, same: Callable[[str, str], bool]
) -> Rollout:
    answer = rollout.trajectory.answer
    if environment is None:
        success = answer is not None and same(answer, text)
        return _copied(rollout, reward=float(success), success=success, target=text)
    return _replayed(rollout, text, environment)


def _replayed(rollout: Rollout, text: str, environment: Environment) -> Rollout:
    """The episode played again with this right answer: rewards are added up as when it was collected."""
    played = rollout.trajectory
    place = f"environment '{environment.name}', level '{played.level}', seed {played.seed}"
    if played.environment != environment.name:
        raise DataError(f"an experience of environment '{played.environment}'; this worker has '{environment.name}'")

    def call(function: Callable[[], Any]) -> Any:
        return within(REPLAY_SECONDS, place, function) if environment.blocking else function()

    try:
        episode = call(lambda: environment.episode(seed=played.seed, level=played.level))
        try:
            call(lambda: plain_messages(episode.reset()))
            episode.target = text
            reward, success, grounded = 0.0, False, None
            for turn in played.turns:
                if turn is played.turns[-1] and _was_cut(played.stop_reason, turn):
                    break
                step = call(functools.partial(_step, episode, turn.action))
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
    return _copied(rollout, reward=reward, success=success, is_grounded=grounded, target=text)


def _step(episode: Episode, action: str) -> Step:
    return plain_step(episode.step(action))


def _was_cut(stop_reason: str, turn: Any) -> bool:
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
        embed: Embed | None = None,
        same: Callable[[str, str], bool] | None = None,
    ) -> None:
        """embed: the policy's states, where a component needs them."""
        self.rewards = rewards
        self.environment = environment
        self.embed = embed
        self.same = same

    def score(self, pairs: Sequence[tuple[Experience, Label]]) -> list[RewardTable | str]:
        """Rewards of each experience under its label, as one batch of groups; a text = why it could not be scored.

        A label that no component can use (a word where a number is compared) spoils no other experience: then each is
        scored by itself, and the orchestrator's state is as if the spoilt ones had never been there.
        """
        found: list[list[Rollout | None] | str] = []
        for experience, label in pairs:
            try:
                found.append(labelled_rollouts(experience, label, self.environment, same=self.same))
            except (DataError, EnvironmentFault, SettingsError) as error:  # an unknown level is the request's
                found.append(str(error))
        before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score([rollouts for rollouts in found if not isinstance(rollouts, str)])
        if not problem:
            return [one if isinstance(one, str) else self._table(one) for one in found]
        self.rewards.load_state_dict(before)
        return [one if isinstance(one, str) else self._score_alone(one) for one in found]

    def _score_alone(self, rollouts: Sequence[Rollout | None]) -> RewardTable | str:
        before = copy.deepcopy(self.rewards.state_dict())
        problem = self._score([rollouts])
        if problem:
            self.rewards.load_state_dict(before)
        return problem or self._table(rollouts)

    def _score(self, found: Sequence[Sequence[Rollout | None]]) -> str:
        """Score the known rollouts; why it cannot be done, "" = it is."""
        groups = [RolloutGroup([rollout for rollout in rollouts if rollout is not None]) for rollouts in found]
        groups = [group for group in groups if group.rollouts]
        try:
            if groups:
                self.rewards.score(groups, embed=self.embed)
        except RewardError as error:
            return str(error)
        except statistics.StatisticsError:
            return "no rollout could be scored"
        wrong = next((r for group in groups for r in group.rollouts if not math.isfinite(r.reward)), None)
        return "" if wrong is None else f"a reward is {wrong.reward}"

    def _table(self, found: Sequence[Rollout | None]) -> RewardTable:
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
            weighted_RC[index] = [values[WEIGHTED + name] for name in names]
            totals_R[index] = rollout.reward
        return RewardTable(names, raw_RC, weighted_RC, totals_R, known_R, success_R)
