"""Comparison of layouts by simulation: workers beside a trainer, or shares of a number of GPUs.

A comparison of simulated layouts as text for the terminal, and as plain values.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.planning.simulation import SimulatedRun, simulate_run
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.errors import SettingsError
from rl_core.settings.planning import ClusterRates

ReportProgress = Callable[[str], None]
ROLLOUT_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the GPUs that play rollouts


@dataclass(frozen=True)
class ComparedLayout:
    """A simulated layout beside the synchronous one with the same means."""

    run: SimulatedRun
    baseline: SimulatedRun

    @property
    def speed_up(self) -> float:
        """Rollouts learned from in a second, over the baseline's."""
        return self.run.rollouts_per_second / self.baseline.rollouts_per_second


def split_gpus(gpus: int, share: float) -> tuple[int, int]:
    """(workers, trainers) of so many GPUs, at least one each. Raises: SettingsError for a single GPU."""
    if gpus < 2:
        raise SettingsError(f"--gpus: {gpus}: rollouts beside updates need at least 2")
    workers = min(gpus - 1, max(1, round(gpus * share)))
    return workers, gpus - workers


def compare_gpu_shares(
    layout: ClusterLayout,
    rates: ClusterRates,
    gpus: int,
    *,
    staleness: Sequence[int],
    shares: Sequence[float] = ROLLOUT_SHARES,
    sizes: RolloutSizeDistributions | None = None,
    iterations: int = 12,
    seed: int = 0,
    progress: ReportProgress | None = None,
) -> list[ComparedLayout]:
    """Every share of the GPUs with every bound, beside all GPUs in turns: rollouts on all of them, then the update.

    The synchronous baseline leaves no GPU idle by its layout: all of them do both in turns, the tasks of each all at
    once. Where their change takes long and one rollout longer than the others, separate GPUs in turns (bound 0) may
    come out a few hundredths ahead of it.
    """
    splits = dict.fromkeys(split_gpus(gpus, share) for share in shares)
    together = layout.with_changes(
        workers=gpus, trainers=gpus, max_staleness=0, shares_gpus=True, tasks_each=1
    )
    layouts = [together]
    for workers, trainers in splits:
        for bound in staleness:
            one = layout.with_changes(
                workers=workers, trainers=trainers, max_staleness=bound, shares_gpus=False
            )
            layouts.append(one if bound else one.with_changes(tasks_each=1))
    return _simulate_layouts(together, layouts, rates, sizes, iterations, seed, progress)


def compare_worker_counts(
    layout: ClusterLayout,
    rates: ClusterRates,
    workers: Sequence[int],
    *,
    staleness: Sequence[int],
    sizes: RolloutSizeDistributions | None = None,
    iterations: int = 12,
    seed: int = 0,
    progress: ReportProgress | None = None,
) -> list[ComparedLayout]:
    """Every number of workers with every bound, beside the synchronous run of the fewest workers."""
    first = layout.with_changes(workers=min(workers), max_staleness=0)
    layouts = [
        layout.with_changes(workers=count, max_staleness=bound)
        for count in workers
        for bound in staleness
    ]
    return _simulate_layouts(first, layouts, rates, sizes, iterations, seed, progress)


def _simulate_layouts(
    baseline: ClusterLayout,
    layouts: Sequence[ClusterLayout],
    rates: ClusterRates,
    sizes: RolloutSizeDistributions | None,
    iterations: int,
    seed: int,
    progress: ReportProgress | None,
) -> list[ComparedLayout]:
    """Every layout simulated, beside the first one. Args: progress: told before each simulation."""
    runs: dict[ClusterLayout, SimulatedRun] = {}
    every = list(dict.fromkeys([baseline, *layouts]))
    for number, one in enumerate(every, 1):
        if progress is not None:
            progress(
                f"layout {number} of {len(every)}: {one.workers} workers, max_staleness {one.max_staleness}"
            )
        runs[one] = simulate_run(one, rates, sizes, iterations=iterations, seed=seed)
    return [ComparedLayout(runs[one], runs[baseline]) for one in layouts]


_MAX_STALE_SHARE = 0.02  # of the groups: played again without a word
_NEARLY_BEST_SHARE = 0.95  # of the best speed-up: as good, where it needs less staleness


def build_layout_rows(layouts: Sequence[ComparedLayout]) -> list[dict[str, Any]]:
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
        for one in layouts
    ]


def format_layout_table(
    layouts: Sequence[ComparedLayout], title: str, width: int | None = None
) -> str:
    """The layouts as a table, and a line about the fastest."""
    table = Table(pad_edge=False, title=title)
    names = (
        "workers",
        "trainers",
        "bound",
        "s/iteration",
        "rollouts/s",
        "speed-up",
        "staleness",
        "busy",
        "of trainer",
    )
    for name in names:
        table.add_column(name, justify="right")
    for one in layouts:
        run, layout = one.run, one.run.layout
        trainers = "the same" if layout.shares_gpus else str(layout.trainers)
        table.add_row(
            str(layout.workers),
            trainers,
            str(layout.max_staleness),
            f"{run.iteration_s:.4g}",
            f"{run.rollouts_per_second:.4g}",
            f"{one.speed_up:.2f}",
            f"{run.staleness:.2f}",
            f"{run.worker_share:.0%}",
            f"{run.trainer_share:.0%}",
        )
    out = io.StringIO()
    Console(file=out, width=width or 100, no_color=True).print(table)
    best = max(layouts, key=lambda one: one.speed_up)
    lines = [
        out.getvalue().rstrip(),
        f"fastest: {_describe_layout(best)} times the synchronous baseline. Simulated: learning at that staleness is another "
        "question",
    ]
    near = [one for one in layouts if one.speed_up >= _NEARLY_BEST_SHARE * best.speed_up]
    if (
        calmer := min(near, key=lambda one: (_read_staleness_bound(one), -one.speed_up))
    ) and _read_staleness_bound(calmer) < _read_staleness_bound(best):
        lines.append(f"nearly as fast with less staleness: {_describe_layout(calmer)} times")
    if best.run.stale_groups > _MAX_STALE_SHARE * (
        learned := sum(len(groups) for groups in best.run.learned_groups)
    ):
        lines.append(
            f"of the fastest {format_count(best.run.stale_groups, 'group')} became too old and were played again, beside "
            f"{learned} learned from: a larger bound or a lower limit of tokens plays fewer of them twice"
        )
    if crowded := [
        one for one in layouts if one.run.layout.workers > one.run.layout.max_groups_in_flight
    ]:
        least = min(crowded, key=lambda one: one.run.layout.max_groups_in_flight).run.layout
        verb = "is" if least.max_groups_in_flight == 1 else "are"
        lines.append(
            f"{format_count(least.max_groups_in_flight, 'group')} of rollouts at once, at max_staleness {least.max_staleness}, "
            f"{verb} all that {least.workers} workers share: a group is played by one of them, the others wait"
        )
    return "\n".join(lines)


def _read_staleness_bound(one: ComparedLayout) -> int:
    return one.run.layout.max_staleness


def _describe_layout(one: ComparedLayout) -> str:
    layout = one.run.layout
    trainers = (
        "which train, too" if layout.shares_gpus else format_count(layout.trainers, "trainer")
    )
    how = f"max_staleness {layout.max_staleness}" if layout.max_staleness else "synchronous"
    return f"{format_count(layout.workers, 'worker')}, {trainers}, {how}: {one.speed_up:.2f}"


def format_count(count: int, noun: str) -> str:
    """The number and the noun, as "1 worker" or "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
