"""Figure of a run: stages, data flow between them, and results.

Drawn by Pillow with Matplotlib's fonts: importing Matplotlib itself would be a tenth of a run of which everything is
cached.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.storage.atomic_files import replace_file
from tasks.stage_registry import list_policy_stages, list_stage_names

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont


_COLUMN_PIXELS, _TITLE_PIXELS = 270, 40  # pixels: width of a column, height of the title
_BOX_PIXELS = (208, 134)  # pixels
_OVERSAMPLING = 2  # drawn so many times as large, and then scaled down
_COLOURS = {"ran": "#d7e8f7", "cached": "#eeeeee"}
_BOX_COLOUR, _ARROW_COLOUR = "#37607f", "#6b7f8f"

_Point = tuple[float, float]


def draw_pipeline_figure(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the stages in `rows` (see `flows.runtime.run_summary.build_result_rows`) and write a PNG; returns its path."""
    from PIL import Image, ImageDraw

    present = {row["stage"]: row for row in rows if row["stage"] in list_stage_names()}
    places = _compute_box_positions(present)
    size, centres = _compute_pixel_layout(places)
    picture = Image.new("RGB", (size[0] * _OVERSAMPLING, size[1] * _OVERSAMPLING), "white")
    draw = ImageDraw.Draw(picture)
    _draw_text(draw, (6, _TITLE_PIXELS / 2), title, 20, anchor="lm")
    for start, end in _list_arrows(
        places, uses_reward_model=present.get("policy", {}).get("uses_reward_model", True)
    ):
        _draw_arrow(draw, centres[start], centres[end])
    for name, row in present.items():
        _draw_box(
            draw, centres[name], name.replace("_", " "), _format_box_text(row), cached=row["cached"]
        )
    encoded = io.BytesIO()
    picture.resize(size, Image.Resampling.BOX).save(encoded, "PNG")
    with replace_file(path, binary=True) as file:
        file.write(encoded.getvalue())
    return path


def _compute_pixel_layout(
    positions: Mapping[str, _Point],
) -> tuple[tuple[int, int], dict[str, _Point]]:
    """Width and height of the figure, and the centre of each box, in pixels from the upper left; no empty rows."""
    columns = max(2.0, 1.0 + max((x for x, _ in positions.values()), default=0.0))
    bottom, top = (f((y for _, y in positions.values()), default=0.5) for f in (min, max))
    row = 216 if top > bottom else 208
    height = _TITLE_PIXELS + row * (top - bottom + 0.9)
    centres = {
        name: (_COLUMN_PIXELS * (x + 0.5), _TITLE_PIXELS + row * (top + 0.45 - y))
        for name, (x, y) in positions.items()
    }
    return (round(_COLUMN_PIXELS * columns), round(height)), centres


def _draw_box(
    draw: ImageDraw.ImageDraw, centre: _Point, name: str, lines: str, *, cached: bool
) -> None:
    x, y = (_OVERSAMPLING * value for value in centre)
    half_width, half_height = (_OVERSAMPLING * side / 2 for side in _BOX_PIXELS)
    draw.rounded_rectangle(
        (x - half_width, y - half_height, x + half_width, y + half_height),
        16 * _OVERSAMPLING,
        fill=_COLOURS["cached" if cached else "ran"],
        outline=_BOX_COLOUR,
        width=2 * _OVERSAMPLING,
    )
    shown, size = _fit_box_title(name)
    _draw_text(draw, (centre[0], centre[1] - 36), shown, size, bold=True)
    _draw_text(draw, (centre[0], centre[1] + 18), lines, 14)


def _fit_box_title(name: str) -> tuple[str, int]:
    """A name that a box has room for, and its size in pixels: smaller where it is long, then cut."""
    room = _OVERSAMPLING * (_BOX_PIXELS[0] - 12)

    def has_room(text: str, size: int) -> bool:
        return _load_font(size * _OVERSAMPLING, bold=True).getlength(text) <= room

    least = 11
    size = next((size for size in range(18, least, -1) if has_room(name, size)), least)
    most = next(
        (count for count in range(len(name), 0, -1) if has_room(f"{name[:count]}…", size)), 0
    )
    return (name if has_room(name, size) else f"{name[:most]}…"), size


def _draw_arrow(draw: ImageDraw.ImageDraw, start: _Point, end: _Point) -> None:
    """A line from the edge of one box to that of the other, its head before it."""
    run, rise = end[0] - start[0], end[1] - start[1]
    length = math.hypot(run, rise)
    along = (run / length, rise / length)
    inside = min(
        _BOX_PIXELS[axis] / 2 / abs(along[axis]) for axis in (0, 1) if along[axis]
    )  # from a centre to the edge

    def at(distance: float, aside: float = 0.0) -> _Point:
        x, y = start[0] + along[0] * distance, start[1] + along[1] * distance
        return _OVERSAMPLING * (x - along[1] * aside), _OVERSAMPLING * (y + along[0] * aside)

    tip = length - inside - 4
    draw.line((at(inside), at(tip - 10)), fill=_ARROW_COLOUR, width=2 * _OVERSAMPLING)
    draw.polygon((at(tip), at(tip - 13, 6), at(tip - 13, -6)), fill=_ARROW_COLOUR)


def _draw_text(
    draw: ImageDraw.ImageDraw,
    position: _Point,
    text: str,
    size: int,
    *,
    bold: bool = False,
    anchor: str = "mm",
) -> None:
    """Text of a size in pixels; `anchor`: Pillow's, of the place within the text."""
    x, y = (_OVERSAMPLING * value for value in position)
    draw.multiline_text(
        (x, y),
        text,
        "black",
        _load_font(size * _OVERSAMPLING, bold),
        anchor=anchor,
        spacing=5 * _OVERSAMPLING,
        align="center",
    )


@functools.cache
def _load_font(size: int, bold: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """DejaVu Sans as Matplotlib brings it; Pillow's own font where it does not."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    try:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        return ImageFont.truetype(folder / "mpl-data/fonts/ttf" / name, size)
    except OSError:
        return ImageFont.load_default(size)


def _compute_box_positions(present: Collection[str]) -> dict[str, tuple[float, float]]:
    """Box positions: policies above, the reward model below and between, results on the right."""
    places: dict[str, tuple[float, float]] = {}
    column = 0.0
    if "prepare_data" in present:
        places["prepare_data"], column = (column, 0.5), column + 1.0
    for name in list_policy_stages():  # each starts from the one before it
        if name == "policy" and "reward_model" in present:
            above = any(y == 1.0 for _, y in places.values())  # else it would cover the data's box
            places["reward_model"] = (column - 0.45 if above else column, 0.0)
            column += 0.3
        if name in present:
            places[name], column = (column, 1.0), column + 1.0
    if "reward_model" in places:  # without a policy the next box would cover it
        column = max(column, places["reward_model"][0] + 1.0)
    if "evaluate" in present:
        places["evaluate"], column = (column, 0.5), column + 1.0
    if "analyze" in present:
        places["analyze"] = (column, 1.0)
    for name in ("export", "promote"):
        if name in present:
            places[name], column = (
                (column, 0.0),
                column + (name == "export" and "promote" in present),
            )
    others = [name for name in present if name not in places]
    return places | {name: (column + 1.0 + index, 0.5) for index, name in enumerate(others)}


def _list_arrows(
    present: Collection[str], *, uses_reward_model: bool = True
) -> list[tuple[str, str]]:
    """Edges (from, to) as in `run_dag` of tasks/pipeline/dag.py; data only to stages without a predecessor.

    uses_reward_model: True if the policy's reward uses the reward model; else only the analysis does.
    """
    trunk = [name for name in list_policy_stages() if name in present]
    arrows = list(itertools.pairwise(trunk))
    if "prepare_data" in present:
        arrows += [("prepare_data", name) for name in (*trunk[:1], "reward_model")]
    before = [
        name
        for name in trunk
        if list_stage_names().index(name) < list_stage_names().index("reward_model")
    ]
    arrows += [(name, "reward_model") for name in before[-1:]]
    asks = "policy" if uses_reward_model and "policy" in present else "analyze"
    arrows += [("reward_model", asks), ("evaluate", "analyze"), ("evaluate", "export")]
    arrows.append(("export" if "export" in present else "evaluate", "promote"))
    arrows += [(name, "evaluate") for name in trunk[-1:] or ["prepare_data"]]
    return [arrow for arrow in arrows if set(arrow) <= set(present)]


def _format_box_text(row: Mapping[str, Any]) -> str:
    """Two short lines: result and duration."""
    first = ""
    if row.get("success") is not None:
        first = f"success {row['success']:.1%}"
    elif row.get("accuracy") is not None:
        first = f"ranks {row['accuracy']:.1%}"
    took = "cached" if row["cached"] else f"{row['seconds']:.1f} s"
    return f"{first}\n{took}" if first else took
