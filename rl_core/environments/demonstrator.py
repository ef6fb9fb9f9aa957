"""What environments with an imperfect demonstrator share: how often, and on which questions, it makes which mistake.

A demonstrator is right in a share `skill` of its episodes. Its mistakes are habits that go with the question: on
tempting ones (half of all) it mostly makes one main mistake. A policy that copies it is therefore mediocre at every
temperature, greedy decoding included, and has something to gain from reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.environments.environment import Demonstration, Environment, Episode
from rl_core.environments.tool_question import ANSWER_WORD, Costs
from rl_core.environments.tools import CallFormat, Toolset
from rl_core.errors import SettingsError, nearest
from rl_core.types import Message, ToolCall

__all__ = [
    "DemonstratedQuestions",
    "MistakenDemonstration",
    "check_skill",
    "choose_mistake",
    "demonstrate",
    "share_right",
]

MAIN_SHARE = 0.65  # of the mistakes on tempting questions that are the main one


@dataclass(slots=True)
class MistakenDemonstration(Demonstration):
    """A demonstration that says what went wrong."""

    mistake: str = ""  # the demonstrator's name for it; "" = none


def demonstrate(episode: Episode, actions: Sequence[str], mistake: str) -> MistakenDemonstration:
    """Play these actions, the last of which ends the episode, and write everything out."""
    messages = episode.reset()
    success = False
    for action in actions:
        step = episode.step(action)
        messages += [Message(role="assistant", content=action), *step.messages]
        success = bool(step.success)
    return MistakenDemonstration(messages, episode.level, episode.kind, episode.seed, success, mistake=mistake)


def share_right(skill: float, habit: float, *, tempting: bool) -> float:
    """Probability of no mistake: `skill` on average, as half of all questions are tempting."""
    return skill * (1 - habit) if tempting else skill * (1 + habit)


def choose_mistake(rng: random.Random, mistakes: Sequence[str], *, skill: float, habit: float, tempting: bool) -> str:
    """'' for none, or one of `mistakes`, of which the first is the main one."""
    if rng.random() < share_right(skill, habit, tempting=tempting):
        return ""
    main, *others = mistakes
    if tempting:
        return main if rng.random() < MAIN_SHARE else rng.choice(others)
    return rng.choice(mistakes)


def check_skill(skill: Mapping[str, float], habit: float, levels: Sequence[str]) -> None:
    """Raise SettingsError for levels that are not there and for shares that are none."""
    if not 0 <= habit <= 1:
        raise SettingsError(f"options.habit: {habit} must be between 0 and 1")
    for level, share in skill.items():
        if level not in levels:
            raise SettingsError(f"options.skill: no level '{level}'; {nearest(level, levels)}")
        if not (share >= 0 and share * (1 + habit) <= 1):
            raise SettingsError(
                f"options.skill.{level}: {share} must be between 0 and 1 / (1 + habit) = {1 / (1 + habit):.3g}"
            )


class DemonstratedQuestions(Environment):
    """An environment of questions that are answered with tools, and its demonstrator's ways."""

    blocking = False

    def __init__(
        self,
        data: Path | None,
        tools: Toolset,
        *,
        costs: Costs,
        call_format: CallFormat,
        instructions: str | None,
        skill: Mapping[str, float],
        habit: float,
    ) -> None:
        """`instructions`: what a system message says after the tools; None = there is none. `skill`: of every level.

        Raises: SettingsError for a skill or habit that is none.
        """
        super().__init__(data)
        self.skill, self.habit, self.call_format = dict(skill), habit, call_format
        check_skill(self.skill, habit, self.levels)
        self._tools, self._costs = tools, costs
        self._system = "" if instructions is None else f"{tools.instructions(call_format)}\n{instructions}"

    @property
    def tools(self) -> Toolset:
        """The tools; those that look at something need an episode (`bind`)."""
        return self._tools

    def _act_out(self, episode: Episode, calls: Sequence[ToolCall], answer: str, mistake: str) -> MistakenDemonstration:
        """Make these calls, then answer."""
        actions = [self._tools.format(call, self.call_format) for call in calls]
        return demonstrate(episode, [*actions, f"{ANSWER_WORD} {answer}"], mistake)
