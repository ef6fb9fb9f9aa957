"""`arithmetic`: chains of whole numbers such as '3 + 4 * 2', and a calculator.

    user    3 + 4 * 2 = ?
    policy  calculator 3 + 4 * 2
    tool    11
    policy  answer 11

Levels differ in the number of operands.
"""

from __future__ import annotations

import random
from pathlib import Path

from rl_core.environments.calculator import CALCULATOR, calculate_text
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    DemonstratedQuestionEnvironment,
    MistakenDemonstration,
    QuestionCosts,
    QuestionEpisode,
    choose_mistake,
)
from rl_core.environments.tools import CallFormat, Toolset
from rl_core.errors import SettingsError
from rl_core.types import ToolCall

LEVELS = {"easy": 2, "medium": 3, "hard": 5}  # numbers in a chain
SKILL = {"easy": 0.4, "medium": 0.35, "hard": 0.35}
SIGNS = {"sum": ("+", "-"), "product": ("*",), "mixed": ("+", "-", "*")}  # by kind of question
MISTAKES = ("other_sign", "dropped", "no_look", "off_by_one")  # the main one first


class ArithmeticEpisode(QuestionEpisode):
    """One chain; `parts` holds its numbers and signs alternately."""

    def __init__(
        self,
        seed: int,
        level: str,
        kind: str,
        parts: list[str],
        tools: Toolset,
        system: str,
        costs: QuestionCosts,
    ) -> None:
        chain = " ".join(parts)
        super().__init__(
            seed,
            level,
            kind=kind,
            prompt=f"{chain} = ?",
            target=calculate_text(chain),
            tools=tools,
            system=system,
            costs=costs,
        )
        self.parts = parts


class Arithmetic(DemonstratedQuestionEnvironment):
    """Arithmetic on chains of integers, with a calculator tool."""

    name = "arithmetic"
    levels = tuple(LEVELS)

    def __init__(
        self,
        data: Path | None = None,
        *,
        max_number: int = 20,
        instructions: bool = False,
        call_format: CallFormat = "line",
        look_cost: float = 0.0,
        misuse_cost: float = 0.0,
        skill: dict[str, float] | None = None,
        habit: float = 0.25,
    ) -> None:
        """Set up chains of numbers from 1 to `max_number`; the other options are those of `PixelGrid`."""
        if not 5 <= max_number <= 9999:
            raise SettingsError(f"options.max_number: {max_number} must be between 5 and 9999")
        self.max_number = max_number
        ending = f"When you know the result, end with the line '{ANSWER_WORD} X'."
        super().__init__(
            data,
            Toolset([CALCULATOR]),
            costs=QuestionCosts(look=look_cost, misuse=misuse_cost),
            call_format=call_format,
            instructions=ending if instructions else None,
            skill={**SKILL, **(skill or {})},
            habit=habit,
        )

    def episode(self, seed: int, level: str) -> ArithmeticEpisode:
        """Return the episode of a level and seed."""
        self.check_level(level)
        rng = random.Random(f"arithmetic/{level}/{seed}")
        kind = rng.choice(tuple(SIGNS) if LEVELS[level] > 2 else ("sum", "product"))
        parts = [str(rng.randint(1, self.max_number))]
        for _ in range(LEVELS[level] - 1):
            parts += [rng.choice(SIGNS[kind]), str(rng.randint(1, self.max_number))]
        if kind == "mixed":  # at least one * and one of + -, otherwise the kind would be wrong
            signs = rng.sample(range(1, len(parts), 2), 2)
            parts[signs[0]], parts[signs[1]] = "*", rng.choice(("+", "-"))
        return ArithmeticEpisode(seed, level, kind, parts, self._tools, self._system, self._costs)

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Return the imperfect demonstrator's episode; chains that start with an even number are the tempting ones."""
        episode = self.episode(seed, level)
        rng = random.Random(f"arithmetic/demonstrator/{level}/{seed}")
        tempting = int(episode.parts[0]) % 2 == 0
        mistake = choose_mistake(
            rng, MISTAKES, skill=self.skill[level], habit=self.habit, tempting=tempting
        )
        parts = list(episode.parts)
        if mistake == "other_sign":
            sign = rng.choice(range(1, len(parts), 2))
            parts[sign] = rng.choice([other for other in SIGNS["mixed"] if other != parts[sign]])
        elif mistake == "dropped":
            parts = parts[:-2]
        chain = " ".join(parts)
        answer = calculate_text(chain)
        if mistake == "no_look":
            answer = str(rng.randint(1, self.max_number))
        elif mistake == "off_by_one":
            answer = str(int(answer) + rng.choice((-1, 1)))
        calls = [] if mistake == "no_look" else [ToolCall("calculator", {"expression": chain})]
        return self._demonstrate_calls(episode, calls, answer, mistake)
