"""`pixel_grid`: questions about a hidden image, with tools that reveal parts of it.

    user    colour at row 2 column 3?
    policy  zoom 2 3
    tool    5 red
    policy  answer red

Levels differ in grid size, in the tool a question needs, and in the number of tool calls.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.environments.demonstrator import DemonstratedQuestions, MistakenDemonstration
from rl_core.environments.pixel_grid_demonstrator import plan
from rl_core.environments.pixel_grid_questions import COLOURS, Cell, Grid, Line, Question, draw
from rl_core.environments.pixel_grid_render import draw_grid
from rl_core.environments.tool_question import ANSWER_WORD, Costs, QuestionEpisode
from rl_core.environments.tools import CallFormat, Tool, Toolset
from rl_core.types import ToolCall

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PixelGrid", "PixelGridEpisode"]

# level: (cells per side, kinds of question). Sides are even so that half of all lines have an even number, on which the
# demonstrator's mistakes depend.
LEVELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "easy": (4, ("colour", "digit")),  # one call, on the named cell
    "medium": (6, ("count", "last")),  # one call, of the right one of three tools
    "hard": (6, ("larger", "most", "pointer")),  # two calls
}
SKILL = {"easy": 0.35, "medium": 0.35, "hard": 0.4}


class PixelGridEpisode(QuestionEpisode):
    """One image and one question; `grid` and `question` are for analysis, the policy never sees them."""

    def __init__(self, seed: int, level: str, grid: Grid, question: Question, **arguments: Any) -> None:
        super().__init__(seed, level, kind=question.kind, prompt=question.prompt, target=question.target, **arguments)
        self.grid, self.question = grid, question
        self.hidden = [grid.colours, grid.digits]
        self._seen: set[Cell] = set()  # cells revealed by a call
        self._counted: set[tuple[str, Line]] = set()  # colour and line of each count

    def observe(self, call: ToolCall) -> None:
        """Record the cells and counts revealed by a call."""
        named = call.arguments
        if call.name == "zoom":
            self._seen.add((named["row"], named["column"]))
        elif call.name == "scan":
            self._seen.update(self.grid.places(named["line"], named["number"]))
        else:
            self._counted.add((named["colour"], (named["line"], named["number"])))

    def grounded(self) -> bool:
        """True if the calls revealed everything the question depends on."""
        question = self.question
        if question.kind in ("count", "most"):
            return all(
                (question.colour, line) in self._counted or self._seen.issuperset(self.grid.places(*line))
                for line in question.lines
            )
        needed = set(question.cells)
        if question.kind == "last":
            needed = {self.grid.places(*question.lines[0])[-1]}
        elif question.kind == "pointer":
            row, column = question.cells[0]
            needed.add((row, self.grid.cell(row, column)[1]))
        return needed <= self._seen

    def image(self) -> np.ndarray:
        """Hidden image for display, uint8 [height, width, 3]."""
        return draw_grid(self.grid)


class PixelGrid(DemonstratedQuestions):
    """Questions about a hidden grid of coloured cells with digits."""

    name = "pixel_grid"
    levels = tuple(LEVELS)

    def __init__(
        self,
        data: Path | None = None,
        *,
        instructions: bool = False,
        call_format: CallFormat = "line",
        look_cost: float = 0.0,
        misuse_cost: float = 0.0,
        unsupported_reward: float = 1.0,
        skill: dict[str, float] | None = None,
        habit: float = 0.25,
    ) -> None:
        """`instructions`: start with a system message describing the tools, for models not trained on them.

        `call_format`: call syntax of demonstrations and instructions. `look_cost`, `misuse_cost`: cost per call and
        per misuse. `unsupported_reward`: reward of a right answer not supported by the calls. `skill`: share of right
        demonstrations by level. `habit`: correlation of mistakes with the question, 0 to 1.
        """
        super().__init__(
            data,
            Toolset([_ZOOM, _SCAN, _COUNT]),
            costs=Costs(look=look_cost, misuse=misuse_cost, unsupported=unsupported_reward),
            call_format=call_format,
            instructions=_ENDING if instructions else None,
            skill={**SKILL, **(skill or {})},
            habit=habit,
        )
        if instructions:
            self._system = _HIDDEN + self._system

    def episode(self, seed: int, level: str) -> PixelGridEpisode:
        """Episode for a level and seed."""
        self.check_level(level)
        size, kinds = LEVELS[level]
        grid, question = draw(random.Random(f"pixel_grid/{level}/{seed}"), size, kinds)
        tools = self._tools.bind(grid)
        return PixelGridEpisode(seed, level, grid, question, tools=tools, system=self._system, costs=self._costs)

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Actions of the imperfect demonstrator."""
        episode = self.episode(seed, level)
        rng = random.Random(f"pixel_grid/demonstrator/{level}/{seed}")
        planned = plan(episode.grid, episode.question, rng, skill=self.skill[level], habit=self.habit)
        return self._act_out(episode, planned.calls, planned.answer, planned.mistake)


def _zoom(grid: Grid, row: int, column: int) -> str:
    colour, digit = grid.cell(row, column)
    return f"{digit} {colour}"


def _scan(grid: Grid, line: str, number: int) -> str:
    return ", ".join(f"{digit} {colour}" for colour, digit in grid.line(line, number))


def _count(grid: Grid, colour: str, line: str, number: int) -> str:
    return str(grid.count(colour, line, number))


_ZOOM = Tool("zoom", "digit and colour of one cell", {"row": int, "column": int}, _zoom)
_SCAN = Tool("scan", "all cells of one line (row or column) in order", {"line": str, "number": int}, _scan)
_COUNT = Tool(
    "count",
    "how many cells of a colour one line (row or column) has",
    {"colour": str, "line": str, "number": int},
    _count,
)

_HIDDEN = (
    f"An image is hidden: a square grid of cells, each with a colour ({', '.join(COLOURS)}) and a digit. Rows and "
    f"columns count from 1. A cell points to the column of its own row that its digit names.\n"
)
_ENDING = f"When you know the answer, end with the line '{ANSWER_WORD} X': a colour or a number."
