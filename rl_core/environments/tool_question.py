"""Base of question-answering episodes: any number of tool calls, then one answer.

An action is a tool call, an answer (`answer red`), or neither, which is misuse: an error message, and the episode
continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_core.data.reasoning import after_thought
from rl_core.environments.environment import Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.errors import SettingsError, ToolMisuse
from rl_core.types import Message, ToolCall

__all__ = ["ANSWER_WORD", "Costs", "QuestionEpisode", "read_answer", "same_text"]

ANSWER_WORD = "answer"


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs subtracted from the reward."""

    look: float = 0.0  # per successful tool call
    misuse: float = 0.0  # per misuse
    unsupported: float = 1.0  # reward of a right answer that does not follow from the observations

    def __post_init__(self) -> None:
        if not 0 <= self.unsupported <= 1:
            raise SettingsError(f"options.unsupported_reward: {self.unsupported} must be between 0 and 1")
        for name in ("look", "misuse"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"options.{name}_cost: {getattr(self, name)} must be between 0 and 1")


NO_COSTS = Costs()


def read_answer(text: str) -> str | None:
    """Text after the word `answer` on the last non-empty line; None if that line does not start with it."""
    lines = after_thought(text).strip().splitlines()
    words = lines[-1].split(maxsplit=1) if lines else []
    if not words or words[0] != ANSWER_WORD:
        return None
    return words[1].strip() if len(words) > 1 else ""


def same_text(answer: str, target: str) -> bool:
    """Equality up to case and white space."""
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
        costs: Costs = NO_COSTS,
        find_answer: Callable[[str], str | None] = read_answer,
        is_right: Callable[[str, str], bool] = same_text,
    ) -> None:
        super().__init__(seed, level)
        self.kind, self.prompt, self.target = kind, prompt, target
        self._tools, self._system, self._costs = tools, system, costs
        self._find_answer, self._is_right = find_answer, is_right

    def reset(self) -> list[Message]:
        """System message, if any, and the question."""
        messages = [Message(role="system", content=self._system)] if self._system else []
        return [*messages, Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Run a call, score an answer, or return an error message."""
        try:
            call = self._tools.parse(text)
        except ToolMisuse as misuse:
            return self._complain(f"error: {misuse}")
        if call is not None:
            observation, is_error = self._tools.run(call)
            cost = self._costs.misuse if is_error else self._costs.look
            if not is_error:
                self.observe(call)
            return Step(_observed(observation), reward=-cost, tool_call=call, is_error=is_error)
        answer = self._find_answer(text)
        if answer is None:
            return self._complain(f"error: neither a call nor '{ANSWER_WORD} ...'")
        success = self._is_right(answer, self.target)
        grounded = self.grounded()
        reward = self._costs.unsupported if success and grounded is False else float(success)
        return Step(reward=reward, terminated=True, answer=answer, success=success, is_grounded=grounded)

    def observe(self, call: ToolCall) -> None:
        """Hook called after a successful call, for episodes that track the evidence for an answer."""

    def grounded(self) -> bool | None:
        """True if the observations determine the answer; None = unknown."""
        return None

    def _complain(self, message: str) -> Step:
        return Step(_observed(message), reward=-self._costs.misuse, is_error=True)


def _observed(content: str) -> list[Message]:
    return [Message(role="tool", content=content)]
