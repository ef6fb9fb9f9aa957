"""Figure of a run: stages, data flow between them, and results."""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.storage.single_files import replacing
from tasks.stage_registry import names, policy_stages

__all__ = ["draw_pipeline"]

_WIDTH, _HEIGHT = 0.74, 0.56
_COLOURS = {"ran": "#d7e8f7", "cached": "#eeeeee"}


def draw_pipeline(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the stages in `rows` (see `flows.runtime.summary.result_rows`) and write a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    present = {row["stage"]: row for row in rows if row["stage"] in names()}
    places = _places(present)
    width = max(2.0, 1.0 + max((x for x, _ in places.values()), default=0.0))
    bottom, top = (f((y for _, y in places.values()), default=0.5) for f in (min, max))  # no empty rows
    figure = Figure(figsize=(2.08 * width, 1.7 + 1.9 * (top - bottom)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.5, width - 0.5), ylim=(bottom - 0.45, top + 0.45))
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11)
    boxes: dict[str, Any] = {}
    for name, row in present.items():
        x, y = places[name]
        box = FancyBboxPatch(
            (x - _WIDTH / 2, y - _HEIGHT / 2), _WIDTH, _HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.06",
            facecolor=_COLOURS["cached" if row["cached"] else "ran"], edgecolor="#37607f", linewidth=1.2, zorder=2,
        )  # fmt: skip
        boxes[name] = axes.add_patch(box)
        axes.text(x, y + 0.16, name.replace("_", " "), ha="center", va="center", fontsize=10, weight="bold", zorder=3)
        axes.text(x, y - 0.08, _lines(row), ha="center", va="center", fontsize=8, linespacing=1.35, zorder=3)
    for start, end in _arrows(boxes, uses_reward_model=present.get("policy", {}).get("uses_reward_model", True)):
        arrow = FancyArrowPatch(
            places[start], places[end], patchA=boxes[start], patchB=boxes[end], shrinkA=0, shrinkB=2,
            arrowstyle="-|>", mutation_scale=13, color="#6b7f8f", linewidth=1.2, zorder=1,
        )  # fmt: skip
        axes.add_patch(arrow)
    picture = io.BytesIO()
    figure.savefig(picture)
    with replacing(path, binary=True) as file:
        file.write(picture.getvalue())
    return path


def _places(present: Collection[str]) -> dict[str, tuple[float, float]]:
    """Box positions: policies above, the reward model below and between, results on the right."""
    places: dict[str, tuple[float, float]] = {}
    column = 0.0
    if "prepare_data" in present:
        places["prepare_data"], column = (column, 0.5), column + 1.0
    for name in policy_stages():  # each starts from the one before it
        if name == "policy" and "reward_model" in present:
            places["reward_model"] = (column - 0.45 if column else 0.0, 0.0)
            column += 0.3
        if name in present:
            places[name], column = (column, 1.0), column + 1.0
    if "evaluate" in present:
        places["evaluate"], column = (column, 0.5), column + 1.0
    if "analyze" in present:
        places["analyze"] = (column, 1.0)
    for name in ("export", "promote"):
        if name in present:
            places[name], column = (column, 0.0), column + (name == "export" and "promote" in present)
    others = [name for name in present if name not in places]
    return places | {name: (column + 1.0 + index, 0.5) for index, name in enumerate(others)}


def _arrows(present: Collection[str], *, uses_reward_model: bool = True) -> list[tuple[str, str]]:
    """Edges (from, to) as in `run_dag` of tasks/pipeline/dag.py; data only to stages without a predecessor.

    uses_reward_model: True if the policy's reward uses the reward model; else only the analysis does.
    """
    trunk = [name for name in policy_stages() if name in present]
    arrows = list(itertools.pairwise(trunk))
    if "prepare_data" in present:
        arrows += [("prepare_data", name) for name in (*trunk[:1], "reward_model")]
    before = [name for name in trunk if names().index(name) < names().index("reward_model")]
    arrows += [(name, "reward_model") for name in before[-1:]]
    asks = "policy" if uses_reward_model and "policy" in present else "analyze"
    arrows += [("reward_model", asks), ("evaluate", "analyze"), ("evaluate", "export")]
    arrows.append(("export" if "export" in present else "evaluate", "promote"))
    arrows += [(name, "evaluate") for name in trunk[-1:] or ["prepare_data"]]
    return [arrow for arrow in arrows if set(arrow) <= set(present)]


def _lines(row: Mapping[str, Any]) -> str:
    """Two short lines: result and duration."""
    first = ""
    if row.get("success") is not None:
        first = f"success {row['success']:.1%}"
    elif row.get("accuracy") is not None:
        first = f"ranks {row['accuracy']:.1%}"
    took = "cached" if row["cached"] else f"{row['seconds']:.1f} s"
    return f"{first}\n{took}" if first else took
