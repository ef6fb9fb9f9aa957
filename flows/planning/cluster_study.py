"""Comparison of layouts by simulation: workers beside a trainer, or shares of a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.planning.cluster_layout import ClusterLayout, RolloutSizes
from flows.planning.simulation import SimulatedRun, simulate
from rl_core.errors import SettingsError
from rl_core.settings.cluster_rates import ClusterRates

__all__ = ["ComparedLayout", "SHARES", "compare_shares", "compare_workers", "split"]

Progress = Callable[[str], None]
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the GPUs that play rollouts


@dataclass(frozen=True)
class ComparedLayout:
    """A simulated layout beside the synchronous one with the same means."""

    run: SimulatedRun
    baseline: SimulatedRun

    @property
    def speed_up(self) -> float:
        """Rollouts learned from in a second, over the baseline's."""
        return self.run.rollouts_per_second / self.baseline.rollouts_per_second


def split(gpus: int, share: float) -> tuple[int, int]:
    """(workers, trainers) of so many GPUs, at least one each. Raises: SettingsError for a single GPU."""
    if gpus < 2:
        raise SettingsError(f"--gpus: {gpus}: rollouts beside updates need at least 2")
    workers = min(gpus - 1, max(1, round(gpus * share)))
    return workers, gpus - workers


def compare_shares(
    layout: ClusterLayout, rates: ClusterRates, gpus: int, *, staleness: Sequence[int],
    shares: Sequence[float] = SHARES, sizes: RolloutSizes | None = None, iterations: int = 12, seed: int = 0,
    progress: Progress | None = None,
) -> list[ComparedLayout]:  # fmt: skip
    """Every share of the GPUs with every bound, beside all GPUs in turns: rollouts on all of them, then the update.

    The synchronous baseline leaves no GPU idle by its layout: all of them do both in turns, the tasks of each all at
    once. Where their change takes long and one rollout longer than the others, separate GPUs in turns (bound 0) may
    come out a few hundredths ahead of it.
    """
    splits = dict.fromkeys(split(gpus, share) for share in shares)
    together = layout.changed(workers=gpus, trainers=gpus, max_staleness=0, shares_gpus=True, tasks_each=1)
    layouts = [together]
    for workers, trainers in splits:
        for bound in staleness:
            one = layout.changed(workers=workers, trainers=trainers, max_staleness=bound, shares_gpus=False)
            layouts.append(one if bound else one.changed(tasks_each=1))
    return _beside(together, layouts, rates, sizes, iterations, seed, progress)


def compare_workers(
    layout: ClusterLayout, rates: ClusterRates, workers: Sequence[int], *, staleness: Sequence[int],
    sizes: RolloutSizes | None = None, iterations: int = 12, seed: int = 0, progress: Progress | None = None,
) -> list[ComparedLayout]:  # fmt: skip
    """Every number of workers with every bound, beside the synchronous run of the fewest workers."""
    first = layout.changed(workers=min(workers), max_staleness=0)
    layouts = [layout.changed(workers=count, max_staleness=bound) for count in workers for bound in staleness]
    return _beside(first, layouts, rates, sizes, iterations, seed, progress)


def _beside(
    first: ClusterLayout, layouts: Sequence[ClusterLayout], rates: ClusterRates, sizes: RolloutSizes | None,
    iterations: int, seed: int, progress: Progress | None,
) -> list[ComparedLayout]:  # fmt: skip
    """Every layout simulated, beside the first one. Args: progress: told before each simulation."""
    runs: dict[ClusterLayout, SimulatedRun] = {}
    every = list(dict.fromkeys([first, *layouts]))
    for number, one in enumerate(every, 1):
        if progress is not None:
            progress(f"layout {number} of {len(every)}: {one.workers} workers, max_staleness {one.max_staleness}")
        runs[one] = simulate(one, rates, sizes, iterations=iterations, seed=seed)
    return [ComparedLayout(runs[one], runs[first]) for one in layouts]
