"""`reckoning`: multi-turn arithmetic on a one-digit register, with optional thoughts before each answer.

    user    4 +3 ~ -1            the register starts at 4 and stays within 0 to 9; ~ mirrors it: x becomes 9 - x
    policy  4 7 2 1              the thought: the register at the start and after each operation
            answer 1
    user    1 +5 +2 ~            continues from there
    policy  answer 1             the thought may be omitted

A right answer leads to the next question; a wrong or missing one ends the episode. Levels differ in the number of
questions and of operations in each. There are no tools, only thoughts. Mirrors make the order of operations matter:
without them the answer is a sum, which a transformer computes in one pass; with them it needs intermediate steps.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    MistakenDemonstration,
    is_same_text,
    read_answer,
)
from rl_core.environments.tools import Toolset
from rl_core.errors import SettingsError
from rl_core.types import Message

# level: (questions per episode, operations per question)
LEVELS = {"easy": (2, 3), "medium": (3, 3), "hard": (4, 3)}
TOP = 9  # maximum of the register; the minimum is 0
MIRROR = 0  # encodes ~ among the numbers of a question


def compute_register_values(start: int, numbers: list[int]) -> list[int]:
    """Compute the register after each operation: a number is added, `MIRROR` maps x to 9 - x."""
    return list(itertools.accumulate(numbers, _apply_operation, initial=start))[1:]


def _apply_operation(value: int, number: int) -> int:
    return TOP - value if number == MIRROR else value + number


class ReckoningEpisode(Episode):
    """Several questions on one register; `target` holds all right answers, `next_target` the pending one."""

    def __init__(self, seed: int, level: str, start: int, questions: list[list[int]]) -> None:
        super().__init__(seed, level)
        self.kind = f"{len(questions[0])} signs"
        self.questions = self.hidden = questions  # numbers to add (negative = minus), or MIRROR
        self.starts = [start]  # the register before each question
        for numbers in questions:
            self.starts.append(compute_register_values(self.starts[-1], numbers)[-1])
        self.question_index = 0  # index of the pending question
        self.prompt = self._format_question(0)
        self.target = " ".join(map(str, self.starts[1:]))

    @property
    def next_target(self) -> str:
        """Right answer of the pending question."""
        return str(self.starts[self.question_index + 1])

    def reset(self) -> list[Message]:
        """Return the first question, with the register's start value."""
        return [Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Score the answer on the last line; the lines above it are the thought and not scored."""
        answer = read_answer(text)
        right = answer is not None and is_same_text(answer, self.next_target)
        last = self.question_index == len(self.questions) - 1
        reward = float(right) / len(self.questions)
        if not right or last:
            return Step(
                reward=reward,
                terminated=True,
                answer=answer,
                success=right,
                is_error=answer is None,
            )
        self.question_index += 1
        return Step(
            [Message(role="user", content=self._format_question(self.question_index))],
            reward=reward,
            answer=answer,
        )

    def _format_question(self, index: int) -> str:
        signs = " ".join(
            "~" if number == MIRROR else f"{number:+d}" for number in self.questions[index]
        )
        return f"{self.starts[index]} {signs}"


class Reckoning(Environment):
    """Additions, subtractions and mirrors on one digit, in several consecutive questions."""

    name = "reckoning"
    levels = tuple(LEVELS)
    blocking = False

    def __init__(
        self,
        data: Path | None = None,
        *,
        max_number: int = 5,
        mirrors: float = 0.4,
        slip: float = 0.05,
        direct: float = 0.35,
        habit: float = 0.6,
        guess: float = 0.2,
    ) -> None:
        """Set the operations of the questions and the error rates of the demonstrator.

        Args:
            max_number: numbers are 1 to this, at most 5, so that plus or minus always stays in range.
            mirrors: share of mirrors among the operations.
            slip: probability that a value in a thought is off by one; later values build on it.
            direct: share of questions answered without a thought.
            habit: modulates `direct` by the register's parity: direct (1 + habit) if even, direct (1 - habit) if odd.
            guess: probability that an answer without a thought is right; otherwise it is any other digit.
        """
        super().__init__(data)
        if not 1 <= max_number <= 5:
            raise SettingsError(f"options.max_number: {max_number} must be between 1 and 5")
        for name, share in (
            ("mirrors", mirrors),
            ("slip", slip),
            ("direct", direct),
            ("habit", habit),
            ("guess", guess),
        ):
            if not 0 <= share <= 1:
                raise SettingsError(f"options.{name}: {share} must be between 0 and 1")
        if direct * (1 + habit) > 1:
            raise SettingsError(
                f"options.habit: direct (1 + habit) = {direct * (1 + habit):.3g} must be at most 1"
            )
        self.max_number, self.mirrors = max_number, mirrors
        self.slip, self.direct, self.habit, self.guess = slip, direct, habit, guess

    @property
    def tools(self) -> Toolset:
        """No tools."""
        return Toolset([])

    def episode(self, seed: int, level: str) -> ReckoningEpisode:
        """Return the episode of a level and seed."""
        self.check_level(level)
        rng = random.Random(f"reckoning/{level}/{seed}")
        num_questions, num_signs = LEVELS[level]
        start = value = rng.randint(0, TOP)
        questions: list[list[int]] = [[] for _ in range(num_questions)]
        for numbers in questions:
            for _ in range(num_signs):
                size = rng.randint(1, self.max_number)
                number = rng.choice([n for n in (size, -size) if 0 <= value + n <= TOP])
                numbers.append(MIRROR if rng.random() < self.mirrors else number)
                value = _apply_operation(value, numbers[-1])
        return ReckoningEpisode(seed, level, start, questions)

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Return the turns of the imperfect demonstrator, up to the end or its first wrong answer."""
        episode = self.episode(seed, level)
        rng = random.Random(f"reckoning/demonstrator/{level}/{seed}")
        messages = episode.reset()
        while True:
            action, mistake = self._demonstrate_turn(episode, rng)
            step = episode.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.terminated:
                break
        success = bool(step.success)
        return MistakenDemonstration(messages, level, episode.kind, seed, success, mistake=mistake)

    def _demonstrate_turn(self, episode: ReckoningEpisode, rng: random.Random) -> tuple[str, str]:
        """Generate one turn of the demonstrator and its mistake ("" = right answer)."""
        start = episode.starts[episode.question_index]
        numbers = episode.questions[episode.question_index]
        tilt = 1 + self.habit if start % 2 == 0 else 1 - self.habit
        if rng.random() < self.direct * tilt:
            answer = int(episode.next_target)
            if rng.random() < self.guess:
                return f"{ANSWER_WORD} {answer}", ""
            wrong = rng.choice([other for other in range(TOP + 1) if other != answer])
            return f"{ANSWER_WORD} {wrong}", "no_thought"
        values = [start]
        for number in numbers:
            start = _apply_operation(start, number)
            slips = rng.random() < self.slip
            if slips or not 0 <= start <= TOP:  # an earlier slip may have left the range
                start = _shift_by_one(start, rng)
            values.append(start)
        mistake = "" if str(start) == episode.next_target else "slip"
        return f"{' '.join(map(str, values))}\n{ANSWER_WORD} {start}", mistake


def _shift_by_one(value: int, rng: random.Random) -> int:
    """Return a random neighbour of the value within the register's range."""
    if value >= TOP or (value > 0 and rng.random() < 0.5):
        return min(TOP, value - 1)
    return max(0, value + 1)
