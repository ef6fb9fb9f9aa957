"""Images of hidden grids for display: RGB rendering and a PNG encoder, using only numpy and zlib."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from rl_core.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from rl_core.environments.pixel_grid_questions import Grid

__all__ = ["RGB", "draw_grid", "to_png"]

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


def draw_grid(grid: Grid, scale: int = 4) -> np.ndarray:
    """uint8 [height, width, 3]: cells of 8 x 8 dots, separated by grey lines of one dot, `scale` pixels per dot."""
    if scale < 1:
        raise DataError(f"scale {scale} must be at least 1")
    import numpy as np  # where a picture is drawn, so that checking a configuration does without

    dots = np.empty((9 * grid.size + 1, 9 * grid.size + 1, 3), dtype=np.uint8)
    dots[:] = GAP
    for row, (colours, digits) in enumerate(zip(grid.colours, grid.digits, strict=True)):
        for column, (colour, digit) in enumerate(zip(colours, digits, strict=True)):
            top, left = 9 * row + 1, 9 * column + 1
            cell = dots[top : top + 8, left : left + 8]
            cell[:] = RGB[colour]
            ink = (0, 0, 0) if sum(RGB[colour]) > 380 else (255, 255, 255)
            glyph = np.array([[bits >> shift & 1 for shift in (2, 1, 0)] for bits in _FONT[digit]], dtype=bool)
            cell[2:7, 3:6][glyph] = ink
    return dots.repeat(scale, axis=0).repeat(scale, axis=1)


def to_png(image: np.ndarray) -> bytes:
    """PNG encoding of a uint8 [height, width, 3] array (8-bit RGB, no filter).

    Raises: DataError for any other array.
    Source: PNG specification, third edition, sections 5 and 11.
    """
    import numpy as np

    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise DataError(f"a picture must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row starts with its filter type, 0 = none
    rows[:, 1:] = image.reshape(height, 3 * width)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
