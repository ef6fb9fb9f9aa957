"""A run as a picture: its stages, what they hand to each other, and what came out of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["HANDED_OVER", "draw_pipeline"]

# (from, to), as `_run_stages` in flows/post_training.py passes it.
HANDED_OVER = (
    ("prepare_data", "sft"),
    ("prepare_data", "reward_model"),
    ("sft", "reward_model"),
    ("sft", "policy"),
    ("sft", "thoughts"),  # where no policy stage stands between them
    ("reward_model", "policy"),
    ("policy", "evaluate"),
    ("policy", "thoughts"),
    ("thoughts", "evaluate"),
    ("evaluate", "analyze"),
    ("evaluate", "promote"),
)

_PLACES = {  # column, row
    "prepare_data": (0, 0.5),
    "sft": (1, 1),
    "reward_model": (1.55, 0),
    "policy": (2.3, 1),
    "thoughts": (2.75, 0),
    "evaluate": (3.5, 0.5),
    "analyze": (4.45, 1),
    "promote": (4.45, 0),
}
_WIDTH, _HEIGHT = 0.74, 0.56
_COLOURS = {"ran": "#d7e8f7", "cached": "#eeeeee"}


def draw_pipeline(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the stages in `rows` (see `flows.summary.result_rows`) and write a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.5, 4.95), ylim=(-0.45, 1.45))
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11)
    present = {row["stage"]: row for row in rows if row["stage"] in _PLACES}
    boxes: dict[str, Any] = {}
    for name, row in present.items():
        x, y = _PLACES[name]
        box = FancyBboxPatch(
            (x - _WIDTH / 2, y - _HEIGHT / 2), _WIDTH, _HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.06",
            facecolor=_COLOURS["cached" if row["cached"] else "ran"], edgecolor="#37607f", linewidth=1.2, zorder=2,
        )  # fmt: skip
        boxes[name] = axes.add_patch(box)
        axes.text(x, y + 0.16, name.replace("_", " "), ha="center", va="center", fontsize=10, weight="bold", zorder=3)
        axes.text(x, y - 0.08, _lines(row), ha="center", va="center", fontsize=8, linespacing=1.35, zorder=3)
    for start, end in HANDED_OVER:
        if (start, end) == ("sft", "thoughts") and "policy" in boxes:
            continue
        if start in boxes and end in boxes:
            arrow = FancyArrowPatch(
                _PLACES[start], _PLACES[end], patchA=boxes[start], patchB=boxes[end], shrinkA=0, shrinkB=2,
                arrowstyle="-|>", mutation_scale=13, color="#6b7f8f", linewidth=1.2, zorder=1,
            )  # fmt: skip
            axes.add_patch(arrow)
    figure.savefig(path)
    return path


def _lines(row: Mapping[str, Any]) -> str:
    """Two short lines: what came out, and what it took."""
    first = ""
    if row.get("success") is not None:
        first = f"success {row['success']:.1%}"
    elif row.get("accuracy") is not None:
        first = f"ranks {row['accuracy']:.1%}"
    took = "cached" if row["cached"] else f"{row['seconds']:.1f} s"
    return f"{first}\n{took}" if first else took
