"""`reckoning`: a register of one digit, carried through several questions, and a policy that may think on paper first.

    user    4 +3 ~ -1            the register starts at 4, and never leaves 0 to 9; ~ mirrors it, 0 to 9 and 9 to 0
    policy  4 7 2 1              the thought: the register, and what it is after each sign
            answer 1
    user    1 +5 +2 ~            goes on from there
    policy  answer 1             no thought at all is allowed, too

Every right answer brings the next question; a wrong one, or none, ends the episode. Levels differ in the number of
questions and of signs in each. There are no tools: what helps is the thought. Mirrors make the order of the signs
count: without them the answer is a sum, which a transformer sees at a glance; with them it has to be worked out.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from rl_core.environments.demonstrator import MistakenDemonstration
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tool_question import ANSWER_WORD, read_answer, same_text
from rl_core.environments.tools import Toolset
from rl_core.errors import SettingsError
from rl_core.types import Message

__all__ = ["MIRROR", "Reckoning", "ReckoningEpisode", "running_values"]

LEVELS = {"easy": (2, 3), "medium": (3, 3), "hard": (4, 3)}  # questions of an episode, signs in each
TOP = 9  # what the register never exceeds; nor does it fall below 0
MIRROR = 0  # among the numbers of a question: the sign ~


def running_values(start: int, numbers: list[int]) -> list[int]:
    """The register after each sign: a number is added, `MIRROR` turns x into 9 - x."""
    return list(itertools.accumulate(numbers, _apply, initial=start))[1:]


def _apply(value: int, number: int) -> int:
    return TOP - value if number == MIRROR else value + number


class ReckoningEpisode(Episode):
    """Some questions about one register. `target` is all right answers, `next_target` that of the one asked last."""

    def __init__(self, seed: int, level: str, start: int, questions: list[list[int]]) -> None:
        super().__init__(seed, level)
        self.kind = f"{len(questions[0])} signs"
        self.questions = questions  # numbers to add, negative ones for a minus, and mirrors
        self.starts = [start]  # the register before each question
        for numbers in questions:
            self.starts.append(running_values(self.starts[-1], numbers)[-1])
        self.asked = 0  # index of the question that waits for its answer
        self.prompt = self._text(0)
        self.target = " ".join(map(str, self.starts[1:]))

    @property
    def next_target(self) -> str:
        """The right answer of the question that waits."""
        return str(self.starts[self.asked + 1])

    def reset(self) -> list[Message]:
        """The first question, with the register's start."""
        return [Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Judge the answer on the last line; what stands above it is nobody's business but the policy's."""
        answer = read_answer(text)
        right = answer is not None and same_text(answer, self.next_target)
        last = self.asked == len(self.questions) - 1
        reward = float(right) / len(self.questions)
        if not right or last:
            return Step(reward=reward, terminated=True, answer=answer, success=right, is_error=answer is None)
        self.asked += 1
        return Step([Message(role="user", content=self._text(self.asked))], reward=reward, answer=answer)

    def _text(self, index: int) -> str:
        signs = " ".join("~" if number == MIRROR else f"{number:+d}" for number in self.questions[index])
        return f"{self.starts[index]} {signs}"


class Reckoning(Environment):
    """Chains of additions, subtractions and mirrors on one digit, in several questions that build on each other."""

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
        """What is reckoned, and what the demonstrator does wrong.

        Args:
            max_number: numbers are 1 to this, at most 5: then one of plus and minus always fits.
            mirrors: share of the signs that mirror the register.
            slip: chance that a value of its thought is off by one; it goes on from there.
            direct: share of questions that it answers without a thought. habit: how much more often it does so where
                the register is even, and more seldom where it is odd: direct (1 + habit) and direct (1 - habit).
            guess: how often an answer without a thought is right; else it is any other digit.
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
            raise SettingsError(f"options.habit: direct (1 + habit) = {direct * (1 + habit):.3g} must be at most 1")
        self.max_number, self.mirrors = max_number, mirrors
        self.slip, self.direct, self.habit, self.guess = slip, direct, habit, guess

    @property
    def tools(self) -> Toolset:
        """None."""
        return Toolset([])

    def episode(self, seed: int, level: str) -> ReckoningEpisode:
        """The questions of that level and seed."""
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
                value = _apply(value, numbers[-1])
        return ReckoningEpisode(seed, level, start, questions)

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """What the imperfect demonstrator writes in that episode, until it is done or has answered wrongly."""
        episode = self.episode(seed, level)
        rng = random.Random(f"reckoning/demonstrator/{level}/{seed}")
        messages = episode.reset()
        while True:
            action, mistake = self._act(episode, rng)
            step = episode.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.terminated:
                break
        success = bool(step.success)
        return MistakenDemonstration(messages, level, episode.kind, seed, success, mistake=mistake)

    def _act(self, episode: ReckoningEpisode, rng: random.Random) -> tuple[str, str]:
        """One turn of the demonstrator, and why its answer is wrong ("" = it is right)."""
        start, numbers = episode.starts[episode.asked], episode.questions[episode.asked]
        tilt = 1 + self.habit if start % 2 == 0 else 1 - self.habit
        if rng.random() < self.direct * tilt:
            answer = int(episode.next_target)
            if rng.random() < self.guess:
                return f"{ANSWER_WORD} {answer}", ""
            return f"{ANSWER_WORD} {rng.choice([other for other in range(TOP + 1) if other != answer])}", "no_thought"
        values = [start]
        for number in numbers:
            start = _apply(start, number)
            if rng.random() < self.slip or not 0 <= start <= TOP:  # an earlier slip may have led out of the range
                start = _off_by_one(start, rng)
            values.append(start)
        mistake = "" if str(start) == episode.next_target else "slip"
        return f"{' '.join(map(str, values))}\n{ANSWER_WORD} {start}", mistake


def _off_by_one(value: int, rng: random.Random) -> int:
    """A neighbour of the value within the register's range."""
    return min(TOP, value - 1) if value >= TOP or (value > 0 and rng.random() < 0.5) else max(0, value + 1)
