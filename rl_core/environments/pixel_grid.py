"""`pixel_grid`: questions about a hidden image, with tools that reveal parts of it, and an imperfect demonstrator.

    user    colour at row 2 column 3?
    policy  zoom 2 3
    tool    5 red
    policy  answer red

Levels differ in grid size, in the tool a question needs, and in the number of tool calls. After a tool call the
demonstrator mostly reads its answer off the observation, so a policy that imitates it can reach the right answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.data.images import IMAGE_MARKER, encode_data_url
from rl_core.environments.pixel_grid_questions import (
    COLOURS,
    GridCell,
    GridLine,
    GridQuestion,
    PixelGridImage,
    draw_question,
    encode_png,
    render_grid,
)
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    DemonstratedQuestionEnvironment,
    MistakenDemonstration,
    QuestionCosts,
    QuestionEpisode,
    choose_mistake,
)
from rl_core.environments.tools import CallFormat, Tool, Toolset
from rl_core.errors import SettingsError
from rl_core.types import Message, ToolCall

if TYPE_CHECKING:
    import numpy as np

# level: (cells per side, kinds of question). Sides are even so that half of all lines have an even number, on which the
# demonstrator's mistakes depend.
LEVELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "easy": (4, ("colour", "digit")),  # one call, on the named cell
    "medium": (6, ("count", "last")),  # one call, of the right one of three tools
    "hard": (6, ("larger", "most", "pointer")),  # two calls
}
SKILL = {"easy": 0.35, "medium": 0.35, "hard": 0.4}

# The same with `observe: image`: smaller grids, for small image encoders. One cell asks what is in the picture, four
# also where, which a small encoder from scratch does not learn in a few hundred steps.
IMAGE_LEVELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "easy": (1, ("colour",)),
    "medium": (1, ("colour", "digit")),
    "hard": (2, ("colour", "digit")),
}
IMAGE_SCALE = 3  # pixels per dot

_IMAGE_INSTRUCTIONS = (
    f"An image is hidden: a square grid of cells, each with a colour ({', '.join(COLOURS)}) and a digit. Rows and "
    f"columns count from 1. A cell points to the column of its own row that its digit names.\n"
)
_ANSWER_INSTRUCTIONS = (
    f"When you know the answer, end with the line '{ANSWER_WORD} X': a colour or a number."
)

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


def plan_demonstration(
    grid: PixelGridImage, question: GridQuestion, rng: random.Random, *, skill: float, habit: float
) -> DemonstrationPlan:
    """Draw a random plan for a question."""
    mistakes = MISTAKES[question.kind]
    mistake = choose_mistake(
        rng, mistakes, skill=skill, habit=habit, tempting=is_tempting_question(question)
    )
    if mistake == mistakes[0] and not _can_make_mistake(mistake, question):
        mistake = mistakes[1]
    if grid.size == 1 and mistake in ("transposed", "too_far"):  # there is no other cell
        mistake = "no_look"
    calls, answer = _PLANNERS[question.kind](grid, question, mistake, rng)
    return DemonstrationPlan(calls, answer, mistake)


def is_tempting_question(question: GridQuestion) -> bool:
    """Return whether a question invites the main mistake of its kind (half of all do).

    Questions about one line do if it is a column, since the demonstrator reads along rows; others do if their first
    number is even.
    """
    if len(question.lines) == 1:
        return question.lines[0][0] == "column"
    first = question.cells[0][0] if question.cells else question.lines[0][1]
    return first % 2 == 0


def _can_make_mistake(mistake: str, question: GridQuestion) -> bool:
    """Return False for a transposed cell on the diagonal, and for a row mistaken for a column (only the reverse is
    made).

    With swaps in both directions a policy would learn no link between the word in the question and the word in the
    call, and RL would have nothing to build on.
    """
    if mistake == "transposed":
        row, column = question.cells[0]
        return row != column
    return mistake != "wrong_line" or question.kind == "most" or question.lines[0][0] == "column"


def _build_zoom_call(cell: GridCell) -> ToolCall:
    return ToolCall("zoom", {"row": cell[0], "column": cell[1]})


def _build_count_call(colour: str, line: GridLine) -> ToolCall:
    return ToolCall("count", {"colour": colour, "line": line[0], "number": line[1]})


def _build_scan_call(line: GridLine) -> ToolCall:
    return ToolCall("scan", {"line": line[0], "number": line[1]})


def _shift_index(grid: PixelGridImage, number: int) -> int:
    """Return the next index, or the previous one at the edge."""
    return number + 1 if number < grid.size else number - 1


def _swap_line_type(line: GridLine) -> GridLine:
    return ("column" if line[0] == "row" else "row"), line[1]


def _plan_cell(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    wants_colour = question.kind == "colour"
    if mistake == "no_look":
        return [], rng.choice(COLOURS) if wants_colour else str(rng.randrange(10))
    row, column = question.cells[0]
    cell = {"transposed": (column, row), "too_far": (row, _shift_index(grid, column))}.get(
        mistake, (row, column)
    )
    colour, digit = grid.read_cell(*cell)
    answers_colour = wants_colour != (mistake == "wrong_attribute")
    return [_build_zoom_call(cell)], colour if answers_colour else str(digit)


def _plan_count(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    line, colour = question.lines[0], question.colour
    if mistake == "no_look":
        return [], str(rng.randint(0, 4))
    if mistake == "miscounted":  # scans the line and counts without the tool, off by one
        count = grid.count_colour(colour, *line) + rng.choice((-1, 1))
        return [_build_scan_call(line)], str(abs(count))
    line = {
        "wrong_line": _swap_line_type(line),
        "too_far": (line[0], _shift_index(grid, line[1])),
    }.get(mistake, line)
    return [_build_count_call(colour, line)], str(grid.count_colour(colour, *line))


def _plan_last(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    line = question.lines[0]
    if mistake == "no_look":
        return [], rng.choice(COLOURS)
    line = {
        "wrong_line": _swap_line_type(line),
        "too_far": (line[0], _shift_index(grid, line[1])),
    }.get(mistake, line)
    colour, digit = grid.read_line_cells(*line)[-1]
    return [_build_scan_call(line)], str(digit) if mistake == "wrong_attribute" else colour


def _plan_larger(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    if mistake == "no_look":
        return [], str(rng.randrange(10))
    first, second = question.cells
    if mistake == "transposed":
        first = first[1], first[0]
    digits = [grid.read_cell(*first)[1], grid.read_cell(*second)[1]]
    if mistake == "one_side":
        return [_build_zoom_call(first)], str(digits[0])
    return [_build_zoom_call(first), _build_zoom_call(second)], str(max(digits))


def _plan_most(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    if mistake == "no_look":
        return [], str(rng.randint(0, 4))
    colour, (first, second) = question.colour, question.lines
    if mistake == "wrong_line":
        first = _swap_line_type(first)
    counts = [grid.count_colour(colour, *line) for line in (first, second)]
    if mistake == "one_side":
        return [_build_count_call(colour, first)], str(counts[0])
    return [_build_count_call(colour, first), _build_count_call(colour, second)], str(max(counts))


def _plan_pointer(
    grid: PixelGridImage, question: GridQuestion, mistake: str, rng: random.Random
) -> tuple[list[ToolCall], str]:
    row, column = cell = question.cells[0]
    if mistake == "no_look":
        return [], rng.choice(COLOURS)
    colour, digit = grid.read_cell(*cell)
    if mistake == "stopped_early":
        return [_build_zoom_call(cell)], colour
    pointed = (digit, column) if mistake == "wrong_line" else (row, digit)
    colour, digit = grid.read_cell(*pointed)
    answer = str(digit) if mistake == "wrong_attribute" else colour
    return [_build_zoom_call(cell), _build_zoom_call(pointed)], answer


_PLANNERS: dict[
    str, Callable[[PixelGridImage, GridQuestion, str, random.Random], tuple[list[ToolCall], str]]
] = {
    "colour": _plan_cell,
    "digit": _plan_cell,
    "count": _plan_count,
    "last": _plan_last,
    "larger": _plan_larger,
    "most": _plan_most,
    "pointer": _plan_pointer,
}


class PixelGridEpisode(QuestionEpisode):
    """One image and one question; `grid` and `question` are for analysis, the policy never sees them."""

    def __init__(
        self,
        seed: int,
        level: str,
        grid: PixelGridImage,
        question: GridQuestion,
        *,
        shows_image: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(
            seed,
            level,
            kind=question.kind,
            prompt=question.prompt,
            target=question.target,
            **arguments,
        )
        self.grid, self.question = grid, question
        self.hidden = [grid.colours, grid.digits]
        self._shows_image = shows_image
        self._seen: set[GridCell] = set()  # cells revealed by a call
        self._counted: set[tuple[str, GridLine]] = set()  # colour and line of each count

    def reset(self) -> list[Message]:
        """Return the question, behind the picture of the grid if the policy sees it."""
        messages = super().reset()
        if self._shows_image:
            question = messages[-1]
            question["content"] = f"{IMAGE_MARKER}{question['content']}"
            question["images"] = [encode_data_url(encode_png(self.image()))]
        return messages

    def observe_call(self, call: ToolCall) -> None:
        """Record the cells and counts revealed by a call."""
        arguments = call.arguments
        if call.name == "zoom":
            self._seen.add((arguments["row"], arguments["column"]))
        elif call.name == "scan":
            self._seen.update(
                self.grid.list_line_coordinates(arguments["line"], arguments["number"])
            )
        else:
            self._counted.add((arguments["colour"], (arguments["line"], arguments["number"])))

    def is_answer_grounded(self) -> bool | None:
        """Return whether the calls revealed everything the question depends on; None = the policy sees the picture."""
        if self._shows_image:
            return None
        question = self.question
        if question.kind in ("count", "most"):
            return all(
                (question.colour, line) in self._counted
                or self._seen.issuperset(self.grid.list_line_coordinates(*line))
                for line in question.lines
            )
        needed = set(question.cells)
        if question.kind == "last":
            needed = {self.grid.list_line_coordinates(*question.lines[0])[-1]}
        elif question.kind == "pointer":
            row, column = question.cells[0]
            needed.add((row, self.grid.read_cell(row, column)[1]))
        return needed <= self._seen

    def image(self) -> np.ndarray:
        """Render the image, uint8 [height, width, 3]."""
        return render_grid(self.grid, IMAGE_SCALE) if self._shows_image else render_grid(self.grid)


class PixelGrid(DemonstratedQuestionEnvironment):
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
        observe: Literal["tools", "image"] = "tools",
    ) -> None:
        """Set up the questions, the costs and the demonstrator.

        Args:
            observe: tools: the image is hidden, and tools reveal parts; image: the policy sees it as a picture and
                answers directly, on smaller grids.
            instructions: start with a system message describing the tools, for models not trained on them.
            call_format: call syntax of demonstrations and instructions.
            look_cost: cost per call.
            misuse_cost: cost per misuse.
            unsupported_reward: reward of a right answer not supported by the calls.
            skill: share of right demonstrations by level.
            habit: correlation of mistakes with the question, 0 to 1.
        """
        if observe not in ("tools", "image"):
            raise SettingsError(f"options.observe: {observe!r} must be tools or image")
        self._shows_image = observe == "image"
        self._questions_by_level = IMAGE_LEVELS if self._shows_image else LEVELS
        if self._shows_image and (look_cost or unsupported_reward != 1):
            raise SettingsError(
                "options.observe: image has no tools, so look_cost and unsupported_reward do nothing; leave them out"
            )
        super().__init__(
            data,
            Toolset([] if self._shows_image else [_ZOOM, _SCAN, _COUNT]),
            costs=QuestionCosts(look=look_cost, misuse=misuse_cost, unsupported=unsupported_reward),
            call_format=call_format,
            instructions=_ANSWER_INSTRUCTIONS if instructions else None,
            skill={**SKILL, **(skill or {})},
            habit=habit,
        )
        if instructions and self._shows_image:
            self._system = _ANSWER_INSTRUCTIONS
        elif instructions:
            self._system = _IMAGE_INSTRUCTIONS + self._system

    def episode(self, seed: int, level: str) -> PixelGridEpisode:
        """Return the episode of a level and seed."""
        self.check_level(level)
        size, kinds = self._questions_by_level[level]
        grid, question = draw_question(random.Random(f"pixel_grid/{level}/{seed}"), size, kinds)
        tools = self._tools.bind(grid)
        return PixelGridEpisode(
            seed,
            level,
            grid,
            question,
            shows_image=self._shows_image,
            tools=tools,
            system=self._system,
            costs=self._costs,
        )

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Return the imperfect demonstrator's episode."""
        episode = self.episode(seed, level)
        rng = random.Random(f"pixel_grid/demonstrator/{level}/{seed}")
        plan = plan_demonstration(
            episode.grid, episode.question, rng, skill=self.skill[level], habit=self.habit
        )
        calls = [] if self._shows_image else plan.calls
        return self._demonstrate_calls(episode, calls, plan.answer, plan.mistake)


def _run_zoom(grid: PixelGridImage, row: int, column: int) -> str:
    colour, digit = grid.read_cell(row, column)
    return f"{digit} {colour}"


def _run_scan(grid: PixelGridImage, line: str, number: int) -> str:
    return ", ".join(f"{digit} {colour}" for colour, digit in grid.read_line_cells(line, number))


def _run_count(grid: PixelGridImage, colour: str, line: str, number: int) -> str:
    return str(grid.count_colour(colour, line, number))


_ZOOM = Tool(
    "zoom", "digit and colour of one cell", {"row": int, "column": int}, _run_zoom, is_visual=True
)
_SCAN = Tool(
    "scan",
    "all cells of one line (row or column) in order",
    {"line": str, "number": int},
    _run_scan,
    is_visual=True,
)
_COUNT = Tool(
    "count",
    "how many cells of a colour one line (row or column) has",
    {"colour": str, "line": str, "number": int},
    _run_count,
    is_visual=True,
)
