"""Episodes of one question: tool calls, then one answer; and an imperfect demonstrator for them.

An action is a tool call, an answer (`answer red`), or neither, which is misuse: an error message, and the episode
continues. `score_answer` serves episodes scored in a child process (`reasoning_gym`, `verifiers`).

A demonstrator is right in a share `skill` of its episodes. Its mistakes depend on the question: on tempting ones (half
of all) it mostly makes one main mistake. A policy that imitates it is therefore mediocre at every temperature, greedy
decoding included, which leaves room for RL to improve it.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import Demonstration, Environment, Episode, Step
from rl_core.environments.subprocess_host import ChildFailed, ChildTimeout
from rl_core.environments.tools import CallFormat, Toolset
from rl_core.errors import SettingsError, ToolMisuse, suggest_name
from rl_core.types import Message, ToolCall

logger = logging.getLogger(__name__)

ANSWER_WORD = "answer"
NO_ANSWER = f"error: no answer; write <answer>...</answer> or end with the line '{ANSWER_WORD} ...'"
MAIN_MISTAKE_SHARE = 0.65  # share of the main mistake among the mistakes on tempting questions
_OPEN, _CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True)
class QuestionCosts:
    """Costs subtracted from the reward."""

    look: float = 0.0  # per successful tool call
    misuse: float = 0.0  # per misuse
    unsupported: float = 1.0  # reward of a right answer that does not follow from the observations

    def __post_init__(self) -> None:
        if not 0 <= self.unsupported <= 1:
            raise SettingsError(
                f"options.unsupported_reward: {self.unsupported} must be between 0 and 1"
            )
        for name in ("look", "misuse"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(
                    f"options.{name}_cost: {getattr(self, name)} must be between 0 and 1"
                )


NO_COSTS = QuestionCosts()


def read_answer(text: str) -> str | None:
    """Return the text after the word `answer` on the last non-empty line; None if that line does not start with it."""
    lines = strip_thought(text).strip().splitlines()
    words = lines[-1].split(maxsplit=1) if lines else []
    if not words or words[0] != ANSWER_WORD:
        return None
    return words[1].strip() if len(words) > 1 else ""


def is_same_text(answer: str, target: str) -> bool:
    """Compare ignoring case and white space."""
    return answer.lower().split() == target.lower().split()


class QuestionEpisode(Episode):
    """One question with its tools and target. Reward 1.0 for the right answer, minus the costs."""

    def __init__(
        self,
        seed: int,
        level: str,
        *,
        kind: str,
        prompt: str,
        target: str,
        tools: Toolset,
        system: str = "",
        costs: QuestionCosts = NO_COSTS,
        find_answer: Callable[[str], str | None] = read_answer,
        is_right: Callable[[str, str], bool] = is_same_text,
    ) -> None:
        super().__init__(seed, level)
        self.kind, self.prompt, self.target = kind, prompt, target
        self._tools, self._system, self._costs = tools, system, costs
        self._find_answer, self._is_right = find_answer, is_right

    def reset(self) -> list[Message]:
        """Return the system message, if any, and the question."""
        messages = [Message(role="system", content=self._system)] if self._system else []
        return [*messages, Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Run a call, score an answer, or return an error message."""
        try:
            call = self._tools.parse(text)
        except ToolMisuse as misuse:
            return self._report_misuse(f"error: {misuse}")
        if call is not None:
            observation, is_error = self._tools.run(call)
            cost = self._costs.misuse if is_error else self._costs.look
            if not is_error:
                self.observe_call(call)
            return Step(
                _build_tool_message(observation), reward=-cost, tool_call=call, is_error=is_error
            )
        answer = self._find_answer(text)
        if answer is None:
            return self._report_misuse(f"error: neither a call nor '{ANSWER_WORD} ...'")
        success = self._is_right(answer, self.target)
        grounded = self.is_answer_grounded()
        reward = self._costs.unsupported if success and grounded is False else float(success)
        return Step(
            reward=reward, terminated=True, answer=answer, success=success, is_grounded=grounded
        )

    def observe_call(self, call: ToolCall) -> None:
        """Observe a successful call; a hook for episodes that track the evidence for an answer."""

    def is_answer_grounded(self) -> bool | None:
        """Return whether the observations determine the answer; None = unknown."""
        return None

    def _report_misuse(self, message: str) -> Step:
        return Step(_build_tool_message(message), reward=-self._costs.misuse, is_error=True)


def _build_tool_message(content: str) -> list[Message]:
    return [Message(role="tool", content=content)]


def read_tagged_answer(text: str) -> str | None:
    """Return the text of the last <answer>...</answer>, else after `answer` on the last line; None = neither."""
    visible = strip_thought(text)
    answer, start = None, visible.find(_OPEN)
    while start >= 0:  # a regular expression would need quadratic time for unclosed tags
        end = visible.find(_CLOSE, start)
        if end < 0:
            break
        answer = visible[start + len(_OPEN) : end].strip()
        start = visible.find(_OPEN, end)
    return read_answer(text) if answer is None else answer


@functools.lru_cache(maxsize=64)  # each message is logged once
def _warn_about_failed_scoring(episode: str, problem: str) -> None:
    logger.warning("%s: %s; the answer earns 0", episode, problem)


def score_answer(
    episode: Episode, answer: str, score: Callable[[], float], success_threshold: float
) -> Step:
    """Finish `episode` with the score of its answer; an answer that cannot be scored earns 0 and counts as misuse."""
    try:
        value, problem = float(score()), ""
    except ChildTimeout as error:
        value, problem = 0.0, f"scoring timed out: {error}"
    except (ChildFailed, TypeError, ValueError, LookupError, ArithmeticError) as error:
        value, problem = 0.0, f"scoring failed: {error}"
    if not math.isfinite(value):
        value, problem = 0.0, f"the score is {value}"
    if problem:
        _warn_about_failed_scoring(type(episode).__name__, problem)
    return Step(
        reward=value,
        terminated=True,
        answer=answer,
        success=not problem and value >= success_threshold,
        is_error=bool(problem),
        info={"scoring": problem} if problem else {},
    )


@dataclass(slots=True)
class MistakenDemonstration(Demonstration):
    """A demonstration labelled with its mistake."""

    mistake: str = ""  # "" = none


def record_demonstration(
    episode: Episode, actions: Sequence[str], mistake: str
) -> MistakenDemonstration:
    """Play `actions`, of which the last ends the episode, and record the conversation."""
    messages = episode.reset()
    success = False
    for action in actions:
        step = episode.step(action)
        messages += [Message(role="assistant", content=action), *step.messages]
        success = bool(step.success)
    return MistakenDemonstration(
        messages, episode.level, episode.kind, episode.seed, success, mistake=mistake
    )


def compute_success_probability(skill: float, habit: float, *, tempting: bool) -> float:
    """Compute the probability of a right demonstration: `skill` on average, as half of all questions are tempting."""
    return skill * (1 - habit) if tempting else skill * (1 + habit)


def choose_mistake(
    rng: random.Random, mistakes: Sequence[str], *, skill: float, habit: float, tempting: bool
) -> str:
    """Choose a random mistake, '' for none; `mistakes[0]` is the main one."""
    if rng.random() < compute_success_probability(skill, habit, tempting=tempting):
        return ""
    main, *others = mistakes
    if tempting:
        return main if rng.random() < MAIN_MISTAKE_SHARE else rng.choice(others)
    return rng.choice(mistakes)


def validate_skill(skill: Mapping[str, float], habit: float, levels: Sequence[str]) -> None:
    """Raise SettingsError for unknown levels and for shares out of range."""
    if not 0 <= habit <= 1:
        raise SettingsError(f"options.habit: {habit} must be between 0 and 1")
    for level, share in skill.items():
        if level not in levels:
            raise SettingsError(f"options.skill: no level '{level}'; {suggest_name(level, levels)}")
        if not (share >= 0 and share * (1 + habit) <= 1):
            raise SettingsError(
                f"options.skill.{level}: {share} must be between 0 and 1 / (1 + habit) = {1 / (1 + habit):.3g}"
            )


class DemonstratedQuestionEnvironment(Environment):
    """Base of question environments with tools and an imperfect demonstrator."""

    blocking = False

    def __init__(
        self,
        data: Path | None,
        tools: Toolset,
        *,
        costs: QuestionCosts,
        call_format: CallFormat,
        instructions: str | None,
        skill: Mapping[str, float],
        habit: float,
    ) -> None:
        """Set up the tools, the system message and the demonstrator.

        Args:
            instructions: system message text after the tool list; None = no system message.
            skill: share of right demonstrations by level.
        Raises: SettingsError for a skill or habit out of range.
        """
        super().__init__(data)
        self.skill, self.habit, self.call_format = dict(skill), habit, call_format
        validate_skill(self.skill, habit, self.levels)
        self._tools, self._costs = tools, costs
        self._system = (
            "" if instructions is None else f"{tools.instructions(call_format)}\n{instructions}"
        )

    @property
    def tools(self) -> Toolset:
        """The tools, not yet bound to an episode (`Toolset.bind`)."""
        return self._tools

    def _demonstrate_calls(
        self, episode: Episode, calls: Sequence[ToolCall], answer: str, mistake: str
    ) -> MistakenDemonstration:
        """Record a demonstration that makes `calls`, then answers."""
        actions = [self._tools.format(call, self.call_format) for call in calls]
        return record_demonstration(episode, [*actions, f"{ANSWER_WORD} {answer}"], mistake)
