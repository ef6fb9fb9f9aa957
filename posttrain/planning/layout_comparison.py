"""Comparison of simulated layouts, as a table and as records: workers next to a trainer, or shares of some GPUs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.runtime.terminal import UNLIMITED_COLUMNS, detect_terminal_columns
from posttrain.planning.policy_stage_simulation import SimulatedRun, simulate_run
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.errors import SettingsError
from rl_core.settings.planning import ClusterRates

ReportProgress = Callable[[str], None]
ROLLOUT_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the GPUs that play rollouts
_MAX_STALE_SHARE = 0.02  # of the groups: not worth mentioning
_NEARLY_BEST_SHARE = 0.95  # of the best speed-up: preferred if it needs less staleness
_TABLE_COLUMNS = (
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


@dataclass(frozen=True)
class ComparedLayout:
    """Simulated layout next to the synchronous one with the same means."""

    run: SimulatedRun
    baseline: SimulatedRun

    @property
    def speed_up(self) -> float:
        """Rollouts per second that are learned from, relative to the baseline."""
        return self.run.rollouts_per_second / self.baseline.rollouts_per_second


def split_gpus(gpus: int, share: float) -> tuple[int, int]:
    """Split GPUs into (workers, trainers), at least one each. Raises: SettingsError for a single GPU."""
    if gpus < 2:
        raise SettingsError(f"--gpus: {gpus}: rollouts next to updates need at least 2")
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
    """Simulate every share of the GPUs with every staleness bound, next to all GPUs taking turns.

    In the synchronous baseline all GPUs do rollouts, then the update; all tasks of a phase start together, so its
    layout leaves no GPU idle. If switching takes long and one rollout is much longer than the others, separate GPUs in
    turns (bound 0) may come out a few hundredths faster.
    """
    splits = dict.fromkeys(split_gpus(gpus, share) for share in shares)
    baseline = layout.with_changes(
        workers=gpus, trainers=gpus, max_staleness=0, shares_gpus=True, tasks_each=1
    )
    layouts = [baseline]
    for workers, trainers in splits:
        for bound in staleness:
            candidate = layout.with_changes(
                workers=workers, trainers=trainers, max_staleness=bound, shares_gpus=False
            )
            layouts.append(candidate if bound else candidate.with_changes(tasks_each=1))
    return _simulate_layouts(baseline, layouts, rates, sizes, iterations, seed, progress)


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
    """Simulate every number of workers with every bound, next to the synchronous run of the fewest workers."""
    baseline = layout.with_changes(workers=min(workers), max_staleness=0)
    layouts = [
        layout.with_changes(workers=count, max_staleness=bound)
        for count in workers
        for bound in staleness
    ]
    return _simulate_layouts(baseline, layouts, rates, sizes, iterations, seed, progress)


def _simulate_layouts(
    baseline: ClusterLayout,
    layouts: Sequence[ClusterLayout],
    rates: ClusterRates,
    sizes: RolloutSizeDistributions | None,
    iterations: int,
    seed: int,
    progress: ReportProgress | None,
) -> list[ComparedLayout]:
    """Simulate every layout, next to the baseline.

    Args:
        progress: called before each simulation.
    """
    runs: dict[ClusterLayout, SimulatedRun] = {}
    distinct = list(dict.fromkeys([baseline, *layouts]))
    for number, layout in enumerate(distinct, 1):
        if progress is not None:
            progress(
                f"layout {number} of {len(distinct)}: {layout.workers} workers, "
                f"max_staleness {layout.max_staleness}"
            )
        runs[layout] = simulate_run(layout, rates, sizes, iterations=iterations, seed=seed)
    return [ComparedLayout(runs[layout], runs[baseline]) for layout in layouts]


def build_layout_rows(layouts: Sequence[ComparedLayout]) -> list[dict[str, Any]]:
    """Build one record per layout, in the order of the simulations."""
    return [
        {
            "workers": compared.run.layout.workers,
            "trainers": compared.run.layout.trainers,
            "shares_gpus": compared.run.layout.shares_gpus,
            "max_staleness": compared.run.layout.max_staleness,
            "iteration_seconds": compared.run.iteration_s,
            "rollouts_per_second": compared.run.rollouts_per_second,
            "speed_up": compared.speed_up,
            "staleness": compared.run.staleness,
            "stale_groups": compared.run.stale_groups,
            "worker_busy": compared.run.worker_share,
            "trainer_busy": compared.run.trainer_share,
        }
        for compared in layouts
    ]


def format_layout_table(
    layouts: Sequence[ComparedLayout], title: str, width: int | None = None
) -> str:
    """Format the layouts as a table, followed by remarks about the fastest."""
    table = Table(pad_edge=False, title=title)
    for name in _TABLE_COLUMNS:
        table.add_column(name, justify="right")
    for compared in layouts:
        run, layout = compared.run, compared.run.layout
        table.add_row(
            str(layout.workers),
            "the same" if layout.shares_gpus else str(layout.trainers),
            str(layout.max_staleness),
            f"{run.iteration_s:.4g}",
            f"{run.rollouts_per_second:.4g}",
            f"{compared.speed_up:.2f}",
            f"{run.staleness:.2f}",
            f"{run.worker_share:.0%}",
            f"{run.trainer_share:.0%}",
        )
    columns = width or detect_terminal_columns() or UNLIMITED_COLUMNS
    text = io.StringIO()
    Console(file=text, width=columns, no_color=True).print(table)
    return "\n".join([text.getvalue().rstrip(), *_list_remarks(layouts)])


def _list_remarks(layouts: Sequence[ComparedLayout]) -> list[str]:
    best = max(layouts, key=lambda compared: compared.speed_up)
    remarks = [
        f"fastest: {_describe_layout(best)} times the synchronous baseline. How well the policy learns at that "
        "staleness is not simulated"
    ]
    near = [
        compared for compared in layouts if compared.speed_up >= _NEARLY_BEST_SHARE * best.speed_up
    ]
    fresher = min(near, key=lambda compared: (_read_staleness_bound(compared), -compared.speed_up))
    if _read_staleness_bound(fresher) < _read_staleness_bound(best):
        remarks.append(f"nearly as fast with less staleness: {_describe_layout(fresher)} times")
    num_learned = sum(len(groups) for groups in best.run.learned_groups)
    if best.run.stale_groups > _MAX_STALE_SHARE * num_learned:
        stale = format_count(best.run.stale_groups, "group")
        remarks.append(
            f"of the fastest {stale} became too old and were played again, besides {num_learned} learned from: a "
            "larger bound or a lower limit of tokens plays fewer of them twice"
        )
    crowded = [
        compared.run.layout
        for compared in layouts
        if compared.run.layout.workers > compared.run.layout.max_groups_in_flight
    ]
    if crowded:
        layout = min(crowded, key=lambda layout: layout.max_groups_in_flight)
        groups = format_count(layout.max_groups_in_flight, "group")
        verb = "is" if layout.max_groups_in_flight == 1 else "are"
        remarks.append(
            f"{groups} of rollouts in flight, at max_staleness {layout.max_staleness}, {verb} all that "
            f"{layout.workers} workers share: one worker plays a group, the others wait"
        )
    return remarks


def _read_staleness_bound(compared: ComparedLayout) -> int:
    return compared.run.layout.max_staleness


def _describe_layout(compared: ComparedLayout) -> str:
    layout = compared.run.layout
    trainers = "which also train"
    if not layout.shares_gpus:
        trainers = format_count(layout.trainers, "trainer")
    schedule = f"max_staleness {layout.max_staleness}" if layout.max_staleness else "synchronous"
    return (
        f"{format_count(layout.workers, 'worker')}, {trainers}, {schedule}: {compared.speed_up:.2f}"
    )


def format_count(count: int, noun: str) -> str:
    """Format the number and the noun, as "1 worker" or "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
