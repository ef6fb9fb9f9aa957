"""A comparison of simulated layouts as text for the terminal, and as plain values."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.planning.cluster_study import ComparedLayout

__all__ = ["plan_rows", "plan_table"]


def plan_rows(found: Sequence[ComparedLayout]) -> list[dict[str, Any]]:
    """One row a layout, in the order in which they were simulated."""
    return [
        {
            "workers": one.run.layout.workers,
            "trainers": one.run.layout.trainers,
            "shares_gpus": one.run.layout.shares_gpus,
            "max_staleness": one.run.layout.max_staleness,
            "iteration_seconds": one.run.iteration_s,
            "rollouts_per_second": one.run.rollouts_per_second,
            "speed_up": one.speed_up,
            "staleness": one.run.staleness,
            "stale_groups": one.run.stale_groups,
            "worker_busy": one.run.worker_share,
            "trainer_busy": one.run.trainer_share,
        }
        for one in found
    ]


def plan_table(found: Sequence[ComparedLayout], title: str, width: int | None = None) -> str:
    """The layouts as a table, and a line about the fastest."""
    table = Table(pad_edge=False, title=title)
    names = ("workers", "trainers", "bound", "s/iteration", "rollouts/s", "speed-up", "staleness", "busy", "of trainer")
    for name in names:
        table.add_column(name, justify="right")
    for one in found:
        run, layout = one.run, one.run.layout
        trainers = "the same" if layout.shares_gpus else str(layout.trainers)
        table.add_row(
            str(layout.workers), trainers, str(layout.max_staleness), f"{run.iteration_s:.4g}",
            f"{run.rollouts_per_second:.4g}", f"{one.speed_up:.2f}", f"{run.staleness:.2f}",
            f"{run.worker_share:.0%}", f"{run.trainer_share:.0%}",
        )  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=width or 100, no_color=True).print(table)
    best = max(found, key=lambda one: one.speed_up)
    layout = best.run.layout
    trainers = "which train, too" if layout.shares_gpus else f"{layout.trainers} trainers"
    how = "synchronous" if not layout.max_staleness else f"max_staleness {layout.max_staleness}"
    lines = [
        out.getvalue().rstrip(),
        f"fastest: {layout.workers} workers, {trainers}, {how}: {best.speed_up:.2f} times the "
        "synchronous baseline. Simulated: learning at that staleness is another question",
    ]
    return "\n".join(lines)
