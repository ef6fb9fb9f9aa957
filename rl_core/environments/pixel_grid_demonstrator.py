"""Imperfect demonstrator of `pixel_grid`: its actions and mistakes per kind of question.

After a tool call it mostly reads its answer off the observation, so the right answer is within reach of a policy that
imitates it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rl_core.environments.demonstrator import choose_mistake
from rl_core.environments.pixel_grid_questions import COLOURS, Cell, Grid, Line, Question
from rl_core.types import ToolCall

__all__ = ["MISTAKES", "DemonstrationPlan", "is_tempting", "plan"]

# Mistakes by kind of question, the main one first. None is a correct look followed by a wrong comparison: from
# contradictory comparisons a small policy learns none at all, and RL has nothing to build on.
MISTAKES: dict[str, tuple[str, ...]] = {
    "colour": ("transposed", "too_far", "no_look", "wrong_attribute"),
    "digit": ("transposed", "too_far", "no_look", "wrong_attribute"),
    "count": ("wrong_line", "too_far", "no_look", "miscounted"),
    "last": ("wrong_line", "too_far", "no_look", "wrong_attribute"),
    "larger": ("transposed", "one_side", "no_look"),
    "most": ("wrong_line", "one_side", "no_look"),
    "pointer": ("stopped_early", "wrong_line", "no_look", "wrong_attribute"),
}


@dataclass(frozen=True, slots=True)
class DemonstrationPlan:
    """Calls, answer and mistake of the demonstrator in one episode."""

    calls: list[ToolCall]
    answer: str
    mistake: str  # "" = none


def plan(grid: Grid, question: Question, rng: random.Random, *, skill: float, habit: float) -> DemonstrationPlan:
    """Random plan for a question."""
    mistakes = MISTAKES[question.kind]
    mistake = choose_mistake(rng, mistakes, skill=skill, habit=habit, tempting=is_tempting(question))
    if mistake == mistakes[0] and not _can_be_made(mistake, question):
        mistake = mistakes[1]
    calls, answer = _PLANNERS[question.kind](grid, question, mistake, rng)
    return DemonstrationPlan(calls, answer, mistake)


def is_tempting(question: Question) -> bool:
    """True if a question invites the main mistake of its kind (half of all do).

    Questions about one line do if it is a column, since the demonstrator reads along rows; others do if their first
    number is even.
    """
    if len(question.lines) == 1:
        return question.lines[0][0] == "column"
    first = question.cells[0][0] if question.cells else question.lines[0][1]
    return first % 2 == 0


def _can_be_made(mistake: str, question: Question) -> bool:
    """False for a transposed cell on the diagonal, and for a row mistaken for a column (only the reverse is made).

    With swaps in both directions a policy would learn no link between the word in the question and the word in the
    call, and RL would have nothing to build on.
    """
    if mistake == "transposed":
        row, column = question.cells[0]
        return row != column
    return mistake != "wrong_line" or question.kind == "most" or question.lines[0][0] == "column"


def _zoom(cell: Cell) -> ToolCall:
    return ToolCall("zoom", {"row": cell[0], "column": cell[1]})


def _count(colour: str, line: Line) -> ToolCall:
    return ToolCall("count", {"colour": colour, "line": line[0], "number": line[1]})


def _scan(line: Line) -> ToolCall:
    return ToolCall("scan", {"line": line[0], "number": line[1]})


def _next(grid: Grid, number: int) -> int:
    """Next index, or the previous one at the edge."""
    return number + 1 if number < grid.size else number - 1


def _other_line(line: Line) -> Line:
    return ("column" if line[0] == "row" else "row"), line[1]


def _plan_cell(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    wants_colour = question.kind == "colour"
    if mistake == "no_look":
        return [], rng.choice(COLOURS) if wants_colour else str(rng.randrange(10))
    row, column = question.cells[0]
    cell = {"transposed": (column, row), "too_far": (row, _next(grid, column))}.get(mistake, (row, column))
    colour, digit = grid.cell(*cell)
    return [_zoom(cell)], colour if wants_colour != (mistake == "wrong_attribute") else str(digit)


def _plan_count(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    line, colour = question.lines[0], question.colour
    if mistake == "no_look":
        return [], str(rng.randint(0, 4))
    if mistake == "miscounted":  # scans the line and counts by itself, off by one
        return [_scan(line)], str(abs(grid.count(colour, *line) + rng.choice((-1, 1))))
    line = {"wrong_line": _other_line(line), "too_far": (line[0], _next(grid, line[1]))}.get(mistake, line)
    return [_count(colour, line)], str(grid.count(colour, *line))


def _plan_last(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    line = question.lines[0]
    if mistake == "no_look":
        return [], rng.choice(COLOURS)
    line = {"wrong_line": _other_line(line), "too_far": (line[0], _next(grid, line[1]))}.get(mistake, line)
    colour, digit = grid.line(*line)[-1]
    return [_scan(line)], str(digit) if mistake == "wrong_attribute" else colour


def _plan_larger(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    if mistake == "no_look":
        return [], str(rng.randrange(10))
    first, second = question.cells
    if mistake == "transposed":
        first = first[1], first[0]
    digits = [grid.cell(*first)[1], grid.cell(*second)[1]]
    if mistake == "one_side":
        return [_zoom(first)], str(digits[0])
    return [_zoom(first), _zoom(second)], str(max(digits))


def _plan_most(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    if mistake == "no_look":
        return [], str(rng.randint(0, 4))
    colour, (first, second) = question.colour, question.lines
    if mistake == "wrong_line":
        first = _other_line(first)
    counts = [grid.count(colour, *line) for line in (first, second)]
    if mistake == "one_side":
        return [_count(colour, first)], str(counts[0])
    return [_count(colour, first), _count(colour, second)], str(max(counts))


def _plan_pointer(grid: Grid, question: Question, mistake: str, rng: random.Random) -> tuple[list[ToolCall], str]:
    row, column = cell = question.cells[0]
    if mistake == "no_look":
        return [], rng.choice(COLOURS)
    colour, digit = grid.cell(*cell)
    if mistake == "stopped_early":
        return [_zoom(cell)], colour
    pointed = (digit, column) if mistake == "wrong_line" else (row, digit)
    colour, digit = grid.cell(*pointed)
    return [_zoom(cell), _zoom(pointed)], str(digit) if mistake == "wrong_attribute" else colour


_PLANNERS: dict[str, Callable[[Grid, Question, str, random.Random], tuple[list[ToolCall], str]]] = {
    "colour": _plan_cell,
    "digit": _plan_cell,
    "count": _plan_count,
    "last": _plan_last,
    "larger": _plan_larger,
    "most": _plan_most,
    "pointer": _plan_pointer,
}
