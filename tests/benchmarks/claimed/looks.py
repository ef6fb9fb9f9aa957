"""`Looks`: questions about the cells of a hidden grid; only a chain of right answers is rewarded.

    user    2 3
    policy  look 2 3
    tool    7
    policy  answer 7
    user    4 1                  and so on; the first wrong answer ends the episode

A level is the number of questions. A policy that is right in a third of its answers is rewarded for twelve of them in
one episode of 500,000: at that level alone it has nothing to learn from.
"""

from __future__ import annotations

import random
from pathlib import Path

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    MistakenDemonstration,
    is_same_text,
    read_answer,
)
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import ToolMisuse
from rl_core.types import Message

SIDE = 4


class Chain(Episode):
    """Questions about one grid; 1 for all of them answered, else 0."""

    def __init__(self, seed: int, level: str) -> None:
        super().__init__(seed, level)
        rng = random.Random(f"looks/{level}/{seed}")
        self.grid = [[str(rng.randrange(10)) for _ in range(SIDE)] for _ in range(SIDE)]
        self.cells = [(rng.randrange(SIDE), rng.randrange(SIDE)) for _ in range(int(level))]
        self.index = 0
        self.hidden = self.grid
        self.kind, self.prompt = f"{level} questions", self._build_question()
        self.target = " ".join(self.grid[row][column] for row, column in self.cells)
        self._tools = TOOLS.bind(self)

    @property
    def next_target(self) -> str:
        """Digit of the pending question."""
        row, column = self.cells[self.index]
        return self.grid[row][column]

    def reset(self) -> list[Message]:
        """Return the first question."""
        return [Message(role="user", content=self.prompt)]

    def look(self, row: int, column: int) -> str:
        """Return the digit of a cell (tool)."""
        if not (1 <= row <= SIDE and 1 <= column <= SIDE):
            raise ValueError("outside")
        return self.grid[row - 1][column - 1]

    def act(self, text: str) -> Step:
        """Take a look or an answer."""
        try:
            call = self._tools.parse(text)
        except ToolMisuse:
            return Step(terminated=True, success=False, is_error=True)
        if call is not None:
            observation, is_error = self._tools.run(call)
            return Step(
                [Message(role="tool", content=observation)], tool_call=call, is_error=is_error
            )
        answer = read_answer(text)
        right = answer is not None and is_same_text(answer, self.next_target)
        last = self.index == len(self.cells) - 1
        if not right or last:
            return Step(
                reward=float(right),
                terminated=True,
                answer=answer,
                success=right,
                is_error=answer is None,
            )
        self.index += 1
        return Step([Message(role="user", content=self._build_question())], answer=answer)

    def _build_question(self) -> str:
        row, column = self.cells[self.index]
        return f"{row + 1} {column + 1}"


TOOLS = Toolset([Tool("look", "digit of one cell", {"row": int, "column": int}, Chain.look)])


class Looks(Environment):
    """Chains of 1 to 12 questions, with a demonstrator that is often wrong."""

    name = "looks"
    levels = ("1", "2", "3", "4", "6", "8", "12")
    blocking = False
    heldout_share = 0.0

    def __init__(self, data: Path | None = None, *, skill: float = 0.15) -> None:
        """`skill`: share of the questions that a demonstration answers right."""
        super().__init__(data)
        self.skill = skill

    @property
    def tools(self) -> Toolset:
        """One tool."""
        return TOOLS

    def episode(self, seed: int, level: str) -> Chain:
        """Make the episode of a level and seed."""
        self.check_level(level)
        return Chain(seed, level)

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Looks and answers up to the end or the first mistake."""
        episode = self.episode(seed, level)
        rng = random.Random(f"looks/demonstrator/{level}/{seed}")
        messages = episode.reset()
        while True:
            row, column = episode.cells[episode.index]
            mistake = (
                ""
                if rng.random() < self.skill
                else rng.choice(("no_look", "other_cell", "misread"))
            )
            if mistake == "other_cell":
                column = (column + 1) % SIDE
            digit = episode.grid[row][column]
            actions = [f"look {row + 1} {column + 1}", f"{ANSWER_WORD} {digit}"]
            if mistake in ("no_look", "misread"):
                actions[1] = f"{ANSWER_WORD} {rng.randrange(10)}"
            for action in actions[mistake == "no_look" :]:
                step = episode.step(action)
                messages += [Message(role="assistant", content=action), *step.messages]
            if step.terminated:
                success = bool(step.success)
                return MistakenDemonstration(
                    messages, level, episode.kind, seed, success, mistake=mistake
                )
