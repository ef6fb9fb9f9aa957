"""Hidden images of `pixel_grid` and the questions about them, with rendering for display by numpy and zlib alone.

An image is a square grid; every cell has a colour and a digit. Rows and columns count from 1, row first.
The answer is drawn first and the image built to match it, so that no answer is likely without a tool call.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import DataError

if TYPE_CHECKING:
    import numpy as np

COLOURS = ("red", "green", "blue", "yellow", "white", "black")
LINE_TYPES = ("row", "column")
MAX_PLANTED = 4  # a counted colour appears 0 to 4 times in its line

GridCell = tuple[int, int]  # row, column
GridLine = tuple[str, int]  # 'row' or 'column', its number
RGB = {
    "red": (214, 59, 51),
    "green": (58, 148, 74),
    "blue": (49, 98, 186),
    "yellow": (240, 200, 66),
    "white": (245, 245, 245),
    "black": (28, 28, 30),
}
GAP = (120, 120, 120)

# Digits of 3 x 5 dots: one number per row from the top, its bits from left to right.
_FONT = {
    0: (7, 5, 5, 5, 7),
    1: (2, 6, 2, 2, 7),
    2: (7, 1, 7, 4, 7),
    3: (7, 1, 7, 1, 7),
    4: (5, 5, 7, 1, 1),
    5: (7, 4, 7, 1, 7),
    6: (7, 4, 7, 5, 7),
    7: (7, 1, 2, 2, 2),
    8: (7, 5, 7, 5, 7),
    9: (7, 5, 7, 1, 7),
}


@dataclass(slots=True)
class PixelGridImage:
    """Hidden image: colours and digits of a square grid."""

    colours: list[list[str]]  # [size][size]
    digits: list[list[int]]  # [size][size], 0 to 9

    @property
    def size(self) -> int:
        """Cells per side."""
        return len(self.colours)

    def validate_line_number(self, name: str, number: int) -> int:
        """Return a valid row or column number. Raises: ValueError, whose text is shown to the policy."""
        if name not in LINE_TYPES:
            raise ValueError(f"{name} is neither row nor column")
        if not 1 <= number <= self.size:
            raise ValueError(f"{name} {number} is outside 1 to {self.size}")
        return number

    def read_cell(self, row: int, column: int) -> tuple[str, int]:
        """Return the colour and digit of one cell."""
        row = self.validate_line_number("row", row)
        column = self.validate_line_number("column", column)
        return self.colours[row - 1][column - 1], self.digits[row - 1][column - 1]

    def read_line_cells(self, name: str, number: int) -> list[tuple[str, int]]:
        """Return the cells of a row from left to right, or of a column from top to bottom."""
        self.validate_line_number(name, number)
        return [self.read_cell(*cell) for cell in self.list_line_coordinates(name, number)]

    def list_line_coordinates(self, name: str, number: int) -> list[GridCell]:
        """List the coordinates of the cells of a line."""
        steps = range(1, self.size + 1)
        return (
            [(number, step) for step in steps]
            if name == "row"
            else [(step, number) for step in steps]
        )

    def count_colour(self, colour: str, name: str, number: int) -> int:
        """Count the cells of a colour in a line."""
        if colour not in COLOURS:
            raise ValueError(f"{colour} is no colour; colours: {' '.join(COLOURS)}")
        cells = self.read_line_cells(name, number)
        return sum(cell_colour == colour for cell_colour, _ in cells)

    def paint_cell(
        self, cell: GridCell, colour: str | None = None, digit: int | None = None
    ) -> None:
        """Set the colour or digit of one cell during image construction."""
        row, column = cell
        if colour is not None:
            self.colours[row - 1][column - 1] = colour
        if digit is not None:
            self.digits[row - 1][column - 1] = digit


@dataclass(frozen=True, slots=True)
class GridQuestion:
    """A question about a grid, with the cells, lines and colour it refers to."""

    kind: str
    prompt: str
    target: str
    cells: tuple[GridCell, ...] = ()  # the cells that the prompt names
    lines: tuple[GridLine, ...] = ()  # the lines that the prompt names
    colour: str = ""  # the colour that the prompt names


def draw_question(
    rng: random.Random, size: int, kinds: tuple[str, ...]
) -> tuple[PixelGridImage, GridQuestion]:
    """Draw a random image and a question about it of one of `kinds`."""
    grid = PixelGridImage(
        colours=[rng.choices(COLOURS, k=size) for _ in range(size)],
        digits=[rng.choices(range(10), k=size) for _ in range(size)],
    )
    return grid, QUESTION_BUILDERS[rng.choice(kinds)](grid, rng)


def _sample_cell(grid: PixelGridImage, rng: random.Random) -> GridCell:
    return rng.randint(1, grid.size), rng.randint(1, grid.size)


def _format_cell(cell: GridCell) -> str:
    return f"row {cell[0]} column {cell[1]}"


def _plant_colour(
    grid: PixelGridImage, rng: random.Random, colour: str, cells: list[GridCell], count: int
) -> None:
    """Recolour `cells` so that exactly `count` of them have the colour."""
    planted = set(rng.sample(cells, count))
    others = [other for other in COLOURS if other != colour]
    for cell in cells:
        grid.paint_cell(cell, colour if cell in planted else rng.choice(others))


def _build_colour_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    cell = _sample_cell(grid, rng)
    return GridQuestion(
        "colour", f"colour at {_format_cell(cell)}?", grid.read_cell(*cell)[0], cells=(cell,)
    )


def _build_digit_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    cell = _sample_cell(grid, rng)
    return GridQuestion(
        "digit", f"digit at {_format_cell(cell)}?", str(grid.read_cell(*cell)[1]), cells=(cell,)
    )


def _build_count_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    """Build a question for the count of a colour in a line; needs the counting tool."""
    name, number = line = rng.choice(LINE_TYPES), rng.randint(1, grid.size)
    colour, count = rng.choice(COLOURS), rng.randint(0, MAX_PLANTED)
    _plant_colour(grid, rng, colour, grid.list_line_coordinates(*line), count)
    return GridQuestion(
        "count", f"how many {colour} in {name} {number}?", str(count), lines=(line,), colour=colour
    )


def _build_last_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    """Build a question for the last colour of a line; needs the scanning tool."""
    name, number = line = rng.choice(LINE_TYPES), rng.randint(1, grid.size)
    return GridQuestion(
        "last",
        f"last colour in {name} {number}?",
        grid.read_line_cells(*line)[-1][0],
        lines=(line,),
    )


def _build_larger_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    """Build a question for the larger digit of two cells; needs two calls."""
    first = second = _sample_cell(grid, rng)
    while second == first:
        second = _sample_cell(grid, rng)
    digits = rng.sample(range(10), 2)
    grid.paint_cell(first, digit=digits[0])
    grid.paint_cell(second, digit=digits[1])
    prompt = f"larger digit at {_format_cell(first)} or {_format_cell(second)}?"
    return GridQuestion("larger", prompt, str(max(digits)), cells=(first, second))


def _build_most_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    """Build a question for the larger of two counts, one of a row and one of a column; needs two calls."""
    row, column = _sample_cell(grid, rng)
    colour, high = rng.choice(COLOURS), rng.randint(1, MAX_PLANTED)
    counts = [high, rng.randint(0, high)]
    rng.shuffle(counts)
    for (name, number), count in zip((("row", row), ("column", column)), counts, strict=True):
        # The crossing cell lies in both lines; it keeps another colour so that both counts can be planted.
        coordinates = grid.list_line_coordinates(name, number)
        cells = [cell for cell in coordinates if cell != (row, column)]
        _plant_colour(grid, rng, colour, cells, count)
    grid.paint_cell((row, column), rng.choice([other for other in COLOURS if other != colour]))
    prompt = f"most {colour} in row {row} or column {column}?"
    return GridQuestion(
        "most", prompt, str(high), lines=(("row", row), ("column", column)), colour=colour
    )


def _build_pointer_question(grid: PixelGridImage, rng: random.Random) -> GridQuestion:
    """Build a question for the colour of the cell in the same row whose column a cell's digit names.

    The second call depends on the first.
    """
    row, column = cell = _sample_cell(grid, rng)
    pointed = rng.choice([other for other in range(1, grid.size + 1) if other != column])
    grid.paint_cell(cell, digit=pointed)
    target = grid.read_cell(row, pointed)[0]
    grid.paint_cell(cell, colour=rng.choice([other for other in COLOURS if other != target]))
    return GridQuestion(
        "pointer", f"colour where {_format_cell(cell)} points?", target, cells=(cell,)
    )


QUESTION_BUILDERS: dict[str, Callable[[PixelGridImage, random.Random], GridQuestion]] = {
    "colour": _build_colour_question,
    "digit": _build_digit_question,
    "count": _build_count_question,
    "last": _build_last_question,
    "larger": _build_larger_question,
    "most": _build_most_question,
    "pointer": _build_pointer_question,
}


def render_grid(grid: PixelGridImage, scale: int = 4) -> np.ndarray:
    """Render uint8 [height, width, 3]: cells of 8 x 8 dots between grey lines of one dot, `scale` pixels per dot."""
    if scale < 1:
        raise DataError(f"scale {scale} must be at least 1")
    import numpy as np  # imported here so that checking a configuration does not need it

    dots = np.empty((9 * grid.size + 1, 9 * grid.size + 1, 3), dtype=np.uint8)
    dots[:] = GAP
    for row, (colours, digits) in enumerate(zip(grid.colours, grid.digits, strict=True)):
        for column, (colour, digit) in enumerate(zip(colours, digits, strict=True)):
            top, left = 9 * row + 1, 9 * column + 1
            cell = dots[top : top + 8, left : left + 8]
            cell[:] = RGB[colour]
            ink = (0, 0, 0) if sum(RGB[colour]) > 380 else (255, 255, 255)
            glyph = np.array(
                [[bits >> shift & 1 for shift in (2, 1, 0)] for bits in _FONT[digit]], dtype=bool
            )
            cell[2:7, 3:6][glyph] = ink
    return dots.repeat(scale, axis=0).repeat(scale, axis=1)


def encode_png(image: np.ndarray) -> bytes:
    """Encode a uint8 [height, width, 3] array as PNG (8-bit RGB, no filter).

    Raises: DataError for any other array.
    Source: PNG specification, third edition, sections 5 and 11.
    """
    import numpy as np

    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise DataError(
            f"a picture must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}"
        )
    height, width, _ = image.shape
    # Each row starts with its filter type, 0 = none.
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)
    rows[:, 1:] = image.reshape(height, 3 * width)

    def build_chunk(kind: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = (
        build_chunk(b"IHDR", header),
        build_chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
        build_chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
