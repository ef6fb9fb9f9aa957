"""A comparison of simulated layouts as text for the terminal, and as plain values."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.planning.cluster_study import ComparedLayout

__all__ = ["counted", "plan_rows", "plan_table"]

_FEW = 0.02  # of the groups: played again without a word
_NEAR = 0.95  # of the best speed-up: as good, where it needs less staleness


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
    lines = [
        out.getvalue().rstrip(),
        f"fastest: {_words(best)} times the synchronous baseline. Simulated: learning at that staleness is another "
        "question",
    ]
    near = [one for one in found if one.speed_up >= _NEAR * best.speed_up]
    if (calmer := min(near, key=lambda one: (_bound(one), -one.speed_up))) and _bound(calmer) < _bound(best):
        lines.append(f"nearly as fast with less staleness: {_words(calmer)} times")
    if best.run.stale_groups > _FEW * (learned := sum(len(groups) for groups in best.run.learned)):
        lines.append(
            f"of the fastest {counted(best.run.stale_groups, 'group')} became too old and were played again, beside "
            f"{learned} learned from: a larger bound or a lower limit of tokens plays fewer of them twice"
        )
    if crowded := [one for one in found if one.run.layout.workers > one.run.layout.most_groups]:
        least = min(crowded, key=lambda one: one.run.layout.most_groups).run.layout
        verb = "is" if least.most_groups == 1 else "are"
        lines.append(
            f"{counted(least.most_groups, 'group')} of rollouts at once, at max_staleness {least.max_staleness}, "
            f"{verb} all that {least.workers} workers share: a group is played by one of them, the others wait"
        )
    return "\n".join(lines)


def _bound(one: ComparedLayout) -> int:
    return one.run.layout.max_staleness


def _words(one: ComparedLayout) -> str:
    layout = one.run.layout
    trainers = "which train, too" if layout.shares_gpus else counted(layout.trainers, "trainer")
    how = f"max_staleness {layout.max_staleness}" if layout.max_staleness else "synchronous"
    return f"{counted(layout.workers, 'worker')}, {trainers}, {how}: {one.speed_up:.2f}"


def counted(count: int, noun: str) -> str:
    """The number and the noun, as "1 worker" or "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
