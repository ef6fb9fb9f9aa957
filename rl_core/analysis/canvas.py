"""Shared plotting helpers: colours, figures saved on exit, axes with titles and units. matplotlib is imported lazily.

A model has the same colour in every figure of an analysis, by its index.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.storage.atomic_files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe-Ito palette: eight colours distinguishable with any colour vision.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#B8A900")
INK, MUTED, FAINT = "#222831", "#5A6570", "#D9DEE4"


def select_model_color(index: int) -> str:
    """Return the colour of the model with that index."""
    return COLORS[index % len(COLORS)]


def build_shades(color: str, count: int) -> list[str]:
    """`count` shades of one colour, light to dark, for ordered categories (levels) of one model."""
    base = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    mixed = []
    for number in range(count):
        share = (number + 1) / (
            count + 1
        )  # position between near-white, the colour, and near-black
        goal, weight = (255, 1.1 - 2.2 * share) if share < 0.5 else (0, 1.3 * (share - 0.5))
        weight = min(0.75, max(0.0, weight))
        mixed.append(
            "#" + "".join(f"{round(value + (goal - value) * weight):02X}" for value in base)
        )
    return mixed


@contextmanager
def open_canvas(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure that is saved on exit; created without pyplot, hence without global state or a display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9.5,
        "axes.edgecolor": "#8A94A0",
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,  # '$' in tool or model names is literal
    }
    if fallbacks := _list_fallback_fonts():
        style["font.family"] = ["DejaVu Sans", *fallbacks]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        picture = io.BytesIO()
        # A fixed software tag makes the bytes reproducible.
        figure.savefig(picture, dpi=140, metadata={"Software": "posttrain"})
    with replace_file(path, binary=True) as file:
        file.write(picture.getvalue())


def label_axes(axes: Axes, title: str, x_label: str, y_label: str, grid: str) -> None:
    """Set title, axis labels and a grid along one axis."""
    if title:
        axes.set_title(shorten_text(title, 70), loc="left", fontsize=11, fontweight="bold", pad=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(length=0 if grid else 3)


def draw_legend(figure: Figure, axes: Axes, models: int) -> None:
    """Add one legend below the panels, so that it never covers data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        [shorten_text(label, 30) for label in labels],
        loc="outside lower center",
        ncols=min(4, models),
        frameon=False,
        fontsize=9,
    )


def add_headroom(axes: Axes, share: float = 0.1) -> None:
    """Add space above the data for labels."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + share * (high - low))


def shorten_text(text: str, width: int = 24) -> str:
    """Return drawable text: replace lone surrogates and control characters, cap the length.

    Characters that no installed font has are written as in Python, `\\u6570`.
    """
    shown = "".join(
        c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode("utf-8")
    )
    shown = shown if len(shown) <= width else shown[: width - 1] + "…"
    if shown.isascii():
        return shown
    drawable = _collect_drawable_characters()
    return "".join(
        c if ord(c) in drawable else c.encode("ascii", "backslashreplace").decode() for c in shown
    )


# Fonts with letters that matplotlib's own font lacks (Chinese, Japanese, Korean), the commonest first.
_FALLBACK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "Droid Sans Fallback",
    "Arial Unicode MS",
)


@functools.cache
def _list_fallback_fonts() -> tuple[str, ...]:
    """List the installed fonts of _FALLBACK_FONTS."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in _FALLBACK_FONTS if name in installed)


@functools.cache
def _collect_drawable_characters() -> frozenset[int]:
    """Collect the code points that the figures' fonts have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    paths = [findfont(FontProperties(family=f)) for f in ("DejaVu Sans", *_list_fallback_fonts())]
    return frozenset(code for path in paths for code in get_font(path).get_charmap())
