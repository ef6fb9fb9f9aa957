"""The hidden image of `pixel_grid` and the questions about it.

An image is a square grid; every cell has a colour and a digit. Rows and columns count from 1, row first.
The answer is drawn first and the image built to match it, so that no answer is likely without a tool call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLOURS", "KINDS", "LINES", "Cell", "Grid", "Line", "Question", "draw"]

COLOURS = ("red", "green", "blue", "yellow", "white", "black")
LINES = ("row", "column")
MAX_PLANTED = 4  # a counted colour appears 0 to 4 times in its line

Cell = tuple[int, int]  # row, column
Line = tuple[str, int]  # 'row' or 'column', its number


@dataclass(slots=True)
class Grid:
    """Hidden image: colours and digits of a square grid."""

    colours: list[list[str]]  # [size][size]
    digits: list[list[int]]  # [size][size], 0 to 9

    @property
    def size(self) -> int:
        """Cells per side."""
        return len(self.colours)

    def check(self, name: str, number: int) -> int:
        """Validated row or column number. Raises: ValueError, whose text is shown to the policy."""
        if name not in LINES:
            raise ValueError(f"{name} is neither row nor column")
        if not 1 <= number <= self.size:
            raise ValueError(f"{name} {number} is outside 1 to {self.size}")
        return number

    def cell(self, row: int, column: int) -> tuple[str, int]:
        """Colour and digit of one cell."""
        r, c = self.check("row", row) - 1, self.check("column", column) - 1
        return self.colours[r][c], self.digits[r][c]

    def line(self, name: str, number: int) -> list[tuple[str, int]]:
        """Cells of a row from left to right, or of a column from top to bottom."""
        self.check(name, number)
        return [self.cell(*place) for place in self.places(name, number)]

    def places(self, name: str, number: int) -> list[Cell]:
        """Coordinates of the cells of a line."""
        steps = range(1, self.size + 1)
        return [(number, step) for step in steps] if name == "row" else [(step, number) for step in steps]

    def count(self, colour: str, name: str, number: int) -> int:
        """Number of cells of a colour in a line."""
        if colour not in COLOURS:
            raise ValueError(f"{colour} is no colour; colours: {' '.join(COLOURS)}")
        return sum(found == colour for found, _ in self.line(name, number))

    def paint(self, place: Cell, colour: str | None = None, digit: int | None = None) -> None:
        """Recolour one cell during image construction."""
        row, column = place
        if colour is not None:
            self.colours[row - 1][column - 1] = colour
        if digit is not None:
            self.digits[row - 1][column - 1] = digit


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a grid, with the cells, lines and colour it refers to."""

    kind: str
    prompt: str
    target: str
    cells: tuple[Cell, ...] = ()  # the cells that the prompt names
    lines: tuple[Line, ...] = ()  # the lines that the prompt names
    colour: str = ""  # the colour that the prompt names


def draw(rng: random.Random, size: int, kinds: tuple[str, ...]) -> tuple[Grid, Question]:
    """Random image and a question about it of one of `kinds`."""
    grid = Grid(
        colours=[rng.choices(COLOURS, k=size) for _ in range(size)],
        digits=[rng.choices(range(10), k=size) for _ in range(size)],
    )
    return grid, KINDS[rng.choice(kinds)](grid, rng)


def _cell(grid: Grid, rng: random.Random) -> Cell:
    return rng.randint(1, grid.size), rng.randint(1, grid.size)


def _named(cell: Cell) -> str:
    return f"row {cell[0]} column {cell[1]}"


def _plant(grid: Grid, rng: random.Random, colour: str, places: list[Cell], count: int) -> None:
    """Recolour `places` so that exactly `count` of them have the colour."""
    chosen = set(rng.sample(places, count))
    others = [other for other in COLOURS if other != colour]
    for place in places:
        grid.paint(place, colour if place in chosen else rng.choice(others))


def _ask_colour(grid: Grid, rng: random.Random) -> Question:
    cell = _cell(grid, rng)
    return Question("colour", f"colour at {_named(cell)}?", grid.cell(*cell)[0], cells=(cell,))


def _ask_digit(grid: Grid, rng: random.Random) -> Question:
    cell = _cell(grid, rng)
    return Question("digit", f"digit at {_named(cell)}?", str(grid.cell(*cell)[1]), cells=(cell,))


def _ask_count(grid: Grid, rng: random.Random) -> Question:
    """Count of a colour in a line; needs the counting tool."""
    name, number = line = rng.choice(LINES), rng.randint(1, grid.size)
    colour, count = rng.choice(COLOURS), rng.randint(0, MAX_PLANTED)
    _plant(grid, rng, colour, grid.places(*line), count)
    return Question("count", f"how many {colour} in {name} {number}?", str(count), lines=(line,), colour=colour)


def _ask_last(grid: Grid, rng: random.Random) -> Question:
    """Last colour of a line; needs the scanning tool."""
    name, number = line = rng.choice(LINES), rng.randint(1, grid.size)
    return Question("last", f"last colour in {name} {number}?", grid.line(*line)[-1][0], lines=(line,))


def _ask_larger(grid: Grid, rng: random.Random) -> Question:
    """Larger digit of two cells; needs two calls."""
    first = second = _cell(grid, rng)
    while second == first:
        second = _cell(grid, rng)
    digits = rng.sample(range(10), 2)
    grid.paint(first, digit=digits[0])
    grid.paint(second, digit=digits[1])
    prompt = f"larger digit at {_named(first)} or {_named(second)}?"
    return Question("larger", prompt, str(max(digits)), cells=(first, second))


def _ask_most(grid: Grid, rng: random.Random) -> Question:
    """Larger of two counts, one of a row and one of a column; needs two calls."""
    row, column = _cell(grid, rng)
    colour, high = rng.choice(COLOURS), rng.randint(1, MAX_PLANTED)
    counts = [high, rng.randint(0, high)]
    rng.shuffle(counts)
    for (name, number), count in zip((("row", row), ("column", column)), counts, strict=True):
        # The crossing cell lies in both lines; it keeps another colour so that both counts can be planted.
        _plant(grid, rng, colour, [place for place in grid.places(name, number) if place != (row, column)], count)
    grid.paint((row, column), rng.choice([other for other in COLOURS if other != colour]))
    prompt = f"most {colour} in row {row} or column {column}?"
    return Question("most", prompt, str(high), lines=(("row", row), ("column", column)), colour=colour)


def _ask_pointer(grid: Grid, rng: random.Random) -> Question:
    """Colour of the cell in the same row whose column a cell's digit names; the second call depends on the first."""
    row, column = cell = _cell(grid, rng)
    pointed = rng.choice([other for other in range(1, grid.size + 1) if other != column])
    grid.paint(cell, digit=pointed)
    target = grid.cell(row, pointed)[0]
    grid.paint(cell, colour=rng.choice([other for other in COLOURS if other != target]))
    return Question("pointer", f"colour where {_named(cell)} points?", target, cells=(cell,))


KINDS: dict[str, Callable[[Grid, random.Random], Question]] = {
    "colour": _ask_colour,
    "digit": _ask_digit,
    "count": _ask_count,
    "last": _ask_last,
    "larger": _ask_larger,
    "most": _ask_most,
    "pointer": _ask_pointer,
}
