"""Figure of a run: stages, data flow between them, and results.

Pillow draws it with Matplotlib's fonts: importing Matplotlib itself would take a tenth of a fully cached run.
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

_COLUMN_PIXELS = 270  # width
_TITLE_PIXELS = 40  # height
_BOX_PIXELS = (208, 134)  # width, height
_OVERSAMPLING = 2  # the figure is drawn larger and then scaled down
_COLOURS = {"ran": "#d7e8f7", "cached": "#eeeeee"}
_BOX_COLOUR, _ARROW_COLOUR = "#37607f", "#6b7f8f"

_Point = tuple[float, float]


def draw_pipeline_figure(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the stages in `rows` (from `build_result_rows`) and write a PNG; return its path."""
    from PIL import Image, ImageDraw

    present = {row["stage"]: row for row in rows if row["stage"] in list_stage_names()}
    positions = _compute_box_positions(present)
    size, centres = _compute_pixel_layout(positions)
    picture = Image.new("RGB", (size[0] * _OVERSAMPLING, size[1] * _OVERSAMPLING), "white")
    draw = ImageDraw.Draw(picture)
    _draw_text(draw, (6, _TITLE_PIXELS / 2), title, 20, anchor="lm")
    uses_reward_model = present.get("policy", {}).get("uses_reward_model", True)
    for start, end in _list_arrows(positions, uses_reward_model=uses_reward_model):
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
    """Return width and height of the figure, and the centre of each box, in pixels from the upper left."""
    columns = max(2.0, 1.0 + max((x for x, _ in positions.values()), default=0.0))
    heights = [y for _, y in positions.values()]
    bottom, top = min(heights, default=0.5), max(heights, default=0.5)
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
    title, size = _fit_box_title(name)
    _draw_text(draw, (centre[0], centre[1] - 36), title, size, bold=True)
    _draw_text(draw, (centre[0], centre[1] + 18), lines, 14)


def _fit_box_title(name: str) -> tuple[str, int]:
    """Fit a name into a box; return it with its size in pixels. Long names are made smaller, then cut."""
    max_pixels = _OVERSAMPLING * (_BOX_PIXELS[0] - 12)

    def fits(text: str, size: int) -> bool:
        return _load_font(size * _OVERSAMPLING, bold=True).getlength(text) <= max_pixels

    min_size = 11
    size = next((size for size in range(18, min_size, -1) if fits(name, size)), min_size)
    if fits(name, size):
        return name, size
    lengths = range(len(name), 0, -1)
    length = next((length for length in lengths if fits(f"{name[:length]}…", size)), 0)
    return f"{name[:length]}…", size


def _draw_arrow(draw: ImageDraw.ImageDraw, start: _Point, end: _Point) -> None:
    """Draw an arrow from the edge of one box to that of the other."""
    run, rise = end[0] - start[0], end[1] - start[1]
    length = math.hypot(run, rise)
    direction = (run / length, rise / length)
    # From the centre of a box to its edge.
    edge_distance = min(
        _BOX_PIXELS[axis] / 2 / abs(direction[axis]) for axis in (0, 1) if direction[axis]
    )

    def locate(distance: float, offset: float = 0.0) -> _Point:
        x, y = start[0] + direction[0] * distance, start[1] + direction[1] * distance
        return _OVERSAMPLING * (x - direction[1] * offset), _OVERSAMPLING * (
            y + direction[0] * offset
        )

    tip = length - edge_distance - 4
    draw.line(
        (locate(edge_distance), locate(tip - 10)), fill=_ARROW_COLOUR, width=2 * _OVERSAMPLING
    )
    draw.polygon((locate(tip), locate(tip - 13, 6), locate(tip - 13, -6)), fill=_ARROW_COLOUR)


def _draw_text(
    draw: ImageDraw.ImageDraw,
    position: _Point,
    text: str,
    size: int,
    *,
    bold: bool = False,
    anchor: str = "mm",
) -> None:
    """Draw text of a size in pixels; `anchor` is Pillow's, for the position within the text."""
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
    """Load DejaVu Sans from Matplotlib, or Pillow's default font without it."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    try:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        return ImageFont.truetype(folder / "mpl-data/fonts/ttf" / name, size)
    except OSError:
        return ImageFont.load_default(size)


def _compute_box_positions(present: Collection[str]) -> dict[str, tuple[float, float]]:
    """Return the box positions: policies above, the reward model below and between, results on the right."""
    positions: dict[str, tuple[float, float]] = {}
    column = 0.0
    if "prepare_data" in present:
        positions["prepare_data"], column = (column, 0.5), column + 1.0
    for name in list_policy_stages():  # each starts from the one before it
        if name == "policy" and "reward_model" in present:
            has_policy = any(
                y == 1.0 for _, y in positions.values()
            )  # without one it would cover the data
            positions["reward_model"] = (column - 0.45 if has_policy else column, 0.0)
            column += 0.3
        if name in present:
            positions[name], column = (column, 1.0), column + 1.0
    if "reward_model" in positions:  # without a policy the next box would cover it
        column = max(column, positions["reward_model"][0] + 1.0)
    if "evaluate" in present:
        positions["evaluate"], column = (column, 0.5), column + 1.0
    if "suites" in present:  # below the evaluation
        positions["suites"] = (column - 1.0 if "evaluate" in present else column, -0.5)
    if "analyze" in present:
        positions["analyze"] = (column, 1.0)
    if "export" in present:
        positions["export"] = (column, 0.0)
        column += "promote" in present
    if "promote" in present:
        positions["promote"] = (column, 0.0)
    remaining = [name for name in present if name not in positions]
    return positions | {name: (column + 1.0 + index, 0.5) for index, name in enumerate(remaining)}


def _list_arrows(
    present: Collection[str], *, uses_reward_model: bool = True
) -> list[tuple[str, str]]:
    """List the edges (from, to) as in `run_dag` of tasks/pipeline/dag.py; data only to stages without a predecessor.

    Args:
        uses_reward_model: the policy's reward uses the reward model; otherwise only the analysis does.
    """
    trunk = [name for name in list_policy_stages() if name in present]
    arrows = list(itertools.pairwise(trunk))
    if "prepare_data" in present:
        arrows += [("prepare_data", name) for name in (*trunk[:1], "reward_model")]
    order = list_stage_names().index
    earlier = [name for name in trunk if order(name) < order("reward_model")]
    arrows += [(name, "reward_model") for name in earlier[-1:]]
    user = "policy" if uses_reward_model and "policy" in present else "analyze"
    arrows += [("reward_model", user), ("evaluate", "analyze"), ("evaluate", "export")]
    arrows.append(("export" if "export" in present else "evaluate", "promote"))
    arrows += [(name, "gguf") for name in (["promote"] if "promote" in present else trunk[-1:])]
    for judge in ("evaluate", "suites"):
        arrows += [(name, judge) for name in trunk[-1:] or ["prepare_data"]]
    arrows.append(("suites", "promote"))
    return [arrow for arrow in arrows if set(arrow) <= set(present)]


def _format_box_text(row: Mapping[str, Any]) -> str:
    """Format two short lines: result and duration."""
    result = ""
    if row.get("success") is not None:
        result = f"success {row['success']:.1%}"
    elif row.get("accuracy") is not None:
        result = f"ranks {row['accuracy']:.1%}"
    duration = "cached" if row["cached"] else f"{row['seconds']:.1f} s"
    return f"{result}\n{duration}" if result else duration
