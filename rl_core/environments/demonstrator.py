"""Imperfect demonstrator shared by question environments: frequency and kind of its mistakes per question.

A demonstrator is right in a share `skill` of its episodes. Its mistakes depend on the question: on tempting ones (half
of all) it mostly makes one main mistake. A policy that imitates it is therefore mediocre at every temperature, greedy
decoding included, which leaves room for RL to improve it.
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

MAIN_SHARE = 0.65  # share of the main mistake among the mistakes on tempting questions


@dataclass(slots=True)
class MistakenDemonstration(Demonstration):
    """A demonstration labelled with its mistake."""

    mistake: str = ""  # "" = none


def demonstrate(episode: Episode, actions: Sequence[str], mistake: str) -> MistakenDemonstration:
    """Play `actions`, of which the last ends the episode, and record the conversation."""
    messages = episode.reset()
    success = False
    for action in actions:
        step = episode.step(action)
        messages += [Message(role="assistant", content=action), *step.messages]
        success = bool(step.success)
    return MistakenDemonstration(messages, episode.level, episode.kind, episode.seed, success, mistake=mistake)


def share_right(skill: float, habit: float, *, tempting: bool) -> float:
    """Probability of a right demonstration: `skill` on average, since half of all questions are tempting."""
    return skill * (1 - habit) if tempting else skill * (1 + habit)


def choose_mistake(rng: random.Random, mistakes: Sequence[str], *, skill: float, habit: float, tempting: bool) -> str:
    """Random mistake, '' for none; `mistakes[0]` is the main one."""
    if rng.random() < share_right(skill, habit, tempting=tempting):
        return ""
    main, *others = mistakes
    if tempting:
        return main if rng.random() < MAIN_SHARE else rng.choice(others)
    return rng.choice(mistakes)


def check_skill(skill: Mapping[str, float], habit: float, levels: Sequence[str]) -> None:
    """Raise SettingsError for unknown levels and for shares out of range."""
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
    """Base of question environments with tools and an imperfect demonstrator."""

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
        """`instructions`: system message text after the tool list; None = no system message. `skill`: by level.

        Raises: SettingsError for a skill or habit out of range.
        """
        super().__init__(data)
        self.skill, self.habit, self.call_format = dict(skill), habit, call_format
        check_skill(self.skill, habit, self.levels)
        self._tools, self._costs = tools, costs
        self._system = "" if instructions is None else f"{tools.instructions(call_format)}\n{instructions}"

    @property
    def tools(self) -> Toolset:
        """The tools, not yet bound to an episode (`Toolset.bind`)."""
        return self._tools

    def _act_out(self, episode: Episode, calls: Sequence[ToolCall], answer: str, mistake: str) -> MistakenDemonstration:
        """Demonstration that makes `calls`, then answers."""
        actions = [self._tools.format(call, self.call_format) for call in calls]
        return demonstrate(episode, [*actions, f"{ANSWER_WORD} {answer}"], mistake)
