"""Discrete-event simulation (SimPy) of a policy stage on rollout workers, synchronous or asynchronous.

The durations of the parts are settings (`ClusterRates`); the simulation shows who waits for whom. The schedule is that
of rl_core/rollout_workers: `worker_group.py` (tasks, one after another) and `async_worker_group.py` (groups ahead of
the trainer, the staleness bound, groups that are played again).
"""

from __future__ import annotations

import heapq
import importlib
import importlib.util
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from posttrain.planning.simulated_worker import (
    BusyTime,
    SimulatedGroup,
    SimulatedSequence,
    SimulatedWorker,
    SimulatedWorld,
)
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.errors import SettingsError
from rl_core.settings.planning import ClusterRates

_TINY = 1e-12
# Equals rl_core.rollout_workers.async_worker_group.MAX_STALE_PLAYS, which a test checks: its import needs torch.
MAX_STALE_RESTARTS = 2


def count_warm_up_iterations(bound: int) -> int:
    """Return the number of initial iterations that are not representative under this staleness bound.

    bound + 1 batches start together, and the shortest of their groups are learned from first; the longest follow
    later. The number is a rule of thumb: about four times the batches that start together.
    """
    return 2 + 4 * bound


@dataclass
class SimulatedRun:
    """Result of a simulation. Times in seconds since its start."""

    layout: ClusterLayout
    end_seconds: list[float] = field(default_factory=list)  # of each iteration
    # Of each iteration: numbers of its groups, tokens by staleness, largest staleness with prompts.
    learned_groups: list[list[int]] = field(default_factory=list)
    tokens_by_staleness: list[dict[int, float]] = field(default_factory=list)
    max_staleness_seen: list[int] = field(default_factory=list)
    stale_groups: int = 0  # became too old and were played again
    dropped_rollouts: int = 0
    worker_share: float = 0.0  # of the time after the warm-up in which workers computed
    trainer_share: float = 0.0

    @property
    def warm_up(self) -> int:
        """Number of initial iterations that are not counted."""
        return min(count_warm_up_iterations(self.layout.max_staleness), len(self.end_seconds) - 1)

    @property
    def iteration_s(self) -> float:
        """Mean length of an iteration after the warm-up."""
        first = self.warm_up
        begin = self.end_seconds[first - 1] if first else 0.0
        return (self.end_seconds[-1] - begin) / (len(self.end_seconds) - first)

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts learned from per second, after the warm-up."""
        return self.layout.prompts * self.layout.group_size / self.iteration_s

    @property
    def staleness(self) -> float:
        """Mean staleness of a token, after the warm-up."""
        counted = self.tokens_by_staleness[self.warm_up :]
        tokens = sum(count for tokens_by_age in counted for count in tokens_by_age.values())
        return (
            sum(age * count for tokens_by_age in counted for age, count in tokens_by_age.items())
            / tokens
        )


def require_simpy() -> None:
    """Refuse to simulate without SimPy. Raises: SettingsError."""
    if importlib.util.find_spec("simpy") is None:
        raise SettingsError(
            "--simulate: needs the package simpy: python -m posttrain.install --extras plan"
        )


def simulate_run(
    layout: ClusterLayout,
    rates: ClusterRates,
    sizes: RolloutSizeDistributions | None = None,
    *,
    iterations: int = 20,
    seed: int = 0,
) -> SimulatedRun:
    """Simulate a run of this many iterations.

    Args:
        sizes: of the rollouts; None = those of `rates`.
        seed: of the sizes; a group has the same sizes in every layout.
    Raises: SettingsError if SimPy is not installed.
    """
    require_simpy()
    if iterations < 1:
        raise SettingsError(f"iterations: {iterations} must be at least 1")
    simpy = importlib.import_module("simpy")
    env = simpy.Environment()
    sizes = sizes or RolloutSizeDistributions.from_rates(rates)
    trainer = _SimulatedTrainer(env, layout, sizes, iterations, seed)
    cores = simpy.Resource(env, layout.cores) if layout.cores is not None else None
    world = SimulatedWorld(env, layout, rates, cores, trainer.receive_group)
    trainer.create_workers(world)
    train = trainer.train_asynchronously if layout.max_staleness else trainer.train_synchronously
    env.run(until=env.process(train()))
    return trainer.build_result()


class _SimulatedTrainer:
    """Process of the trainer, and its side of the workers."""

    def __init__(
        self,
        env: Any,
        layout: ClusterLayout,
        sizes: RolloutSizeDistributions,
        iterations: int,
        seed: int,
    ) -> None:
        self.env, self.layout, self.sizes = env, layout, sizes
        self.iterations, self.seed = iterations, seed
        self.run = SimulatedRun(layout)
        self.iteration = 0
        self._next_number = 0
        self._queue: deque[SimulatedGroup] = deque()
        self._playing: dict[int, int] = {}  # number of a group: number of its worker
        self._loads = [0] * layout.workers  # groups of each worker
        # Groups in flight that became too old so often that an iteration waits for them.
        self._num_awaited_groups = 0
        self._finished: list[SimulatedGroup] = []
        # Of the finished groups, from the first: known to be fresh enough for this iteration.
        self._num_checked_groups = 0
        self._arrived = env.event()
        self._busy = BusyTime()
        # Of the warm-up: all seconds, those of busy workers, those of a busy trainer.
        self._warm_up_seconds = (0.0, 0.0, 0.0)

    def create_workers(self, world: SimulatedWorld) -> None:
        """Create the workers."""
        self.world = world
        self.workers = [SimulatedWorker(world) for _ in range(self.layout.workers)]

    def receive_group(self, group: SimulatedGroup) -> None:
        """Receive a finished group."""
        if group.number in self._playing:
            group.slow_worker = self._playing.pop(group.number)
            self._loads[group.slow_worker] -= 1
        self._num_awaited_groups -= group.num_restarts >= MAX_STALE_RESTARTS
        self._finished.append(group)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def build_result(self) -> SimulatedRun:
        """Return the run with the shares of time."""
        total, workers, trainer = (
            end - start
            for end, start in zip(self._sum_busy_seconds(), self._warm_up_seconds, strict=True)
        )
        self.run.worker_share = workers / max(total * len(self.workers), _TINY)
        self.run.trainer_share = trainer / max(total, _TINY)
        self.run.dropped_rollouts = self.world.num_dropped_rollouts
        return self.run

    def _sum_busy_seconds(self) -> tuple[float, float, float]:
        now = self.env.now
        return (
            now,
            sum(worker.busy.total_until(now) for worker in self.workers),
            self._busy.total_until(now),
        )

    def train_synchronously(self) -> Iterator[Any]:
        """Train as WorkerGroup does: weights to all workers, tasks to free workers, then the update."""
        layout, rates = self.layout, self.world.rates
        for iteration in range(self.iterations):
            self.iteration = iteration
            yield from self.world.compute_for(rates.publish_seconds, self._busy)
            for worker in self.workers:
                worker.enqueue_weights(self.iteration)
            loads = [self.env.process(worker.load_pending_weights()) for worker in self.workers]
            yield from self.world.compute_for(rates.verify_seconds, self._busy)
            yield self.env.all_of(loads)
            self._finished = []
            groups = [self._draw_group() for _ in range(layout.prompts)]
            tasks = deque(_split_into_tasks(groups, layout.workers, layout.tasks_each))
            yield self.env.all_of(
                [self.env.process(self._serve_tasks(worker, tasks)) for worker in self.workers]
            )
            taken = sorted(self._finished, key=lambda group: group.number)
            if layout.shares_gpus:
                yield self.env.timeout(rates.switch_seconds)
            yield from self._update_policy(taken)
            if layout.shares_gpus:
                yield self.env.timeout(rates.switch_seconds)

    def _serve_tasks(
        self, worker: SimulatedWorker, tasks: deque[list[SimulatedGroup]]
    ) -> Iterator[Any]:
        rates = self.world.rates
        while tasks:
            groups = tasks.popleft()
            yield from worker.play_groups(groups)
            transport = BusyTime()  # not counted
            seconds = rates.call_seconds + len(groups) * rates.group_seconds
            yield from self.world.compute_for(seconds, transport)

    def train_asynchronously(self) -> Iterator[Any]:
        """Train as AsyncWorkerGroup does: send new weights, then learn from the next groups that are fresh enough."""
        layout, rates = self.layout, self.world.rates
        for worker in self.workers:
            self.env.process(worker.run_worker())
        for iteration in range(self.iterations):
            self.iteration, self._num_checked_groups = iteration, 0
            yield from self.world.compute_for(rates.publish_seconds, self._busy)
            for worker in self.workers:
                worker.enqueue_weights(self.iteration)
            yield from self.world.compute_for(rates.verify_seconds, self._busy)
            taken: list[SimulatedGroup] = []
            while len(taken) < layout.prompts:
                self._fill_queue(len(taken))
                self._dispatch_groups()
                num_stale = self.run.stale_groups
                fresh = self._take_fresh_groups(layout.prompts - len(taken))
                taken += fresh
                yield from self.world.compute_for(len(fresh) * rates.group_seconds, self._busy)
                if not fresh and num_stale == self.run.stale_groups:
                    yield self._arrived
                    self._arrived = self.env.event()
            yield from self._update_policy(taken)

    def _draw_group(self, stale: SimulatedGroup | None = None) -> SimulatedGroup:
        """Draw the next group, or restart one that became too old."""
        number = self._next_number if stale is None else stale.number
        if stale is None:
            self._next_number += 1
        tokens, tools = self.sizes.draw_group(self.seed, number, self.layout.group_size)
        group = SimulatedGroup(number, num_unfinished=self.layout.group_size)
        if stale is not None:
            group.num_restarts = stale.num_restarts + 1
            group.slow_worker = stale.slow_worker if self.layout.workers > 1 else None
        group.sequences = [
            SimulatedSequence(group, actions, waits)
            for actions, waits in zip(tokens.tolist(), tools.tolist(), strict=True)
        ]
        return group

    def _fill_queue(self, taken: int) -> None:
        limit = self.layout.max_groups_in_flight
        while len(self._queue) + len(self._playing) + len(self._finished) + taken < limit:
            self._queue.append(self._draw_group())

    def _dispatch_groups(self) -> None:
        """Dispatch groups to the least loaded workers, up to an even share of those in flight."""
        layout = self.layout
        max_load = math.ceil(layout.max_groups_in_flight / layout.workers)
        groups_per_run = math.ceil(layout.prompts / layout.workers)
        by_load = [(load, number) for number, load in enumerate(self._loads)] if self._queue else []
        heapq.heapify(by_load)
        dispatched: dict[int, list[SimulatedGroup]] = {}
        while self._queue:
            group = self._queue[0]
            slow = heapq.heappop(by_load) if by_load[0][1] == group.slow_worker else None
            is_urgent = group.num_restarts >= MAX_STALE_RESTARTS
            if slow is not None and slow[0] < max_load <= by_load[0][0] and not is_urgent:
                heapq.heappush(by_load, slow)  # the only worker with capacity
                slow = None
            load, number = by_load[0]
            is_dispatched = load < max_load or is_urgent
            if is_dispatched:
                heapq.heapreplace(by_load, (load + 1, number))
                dispatched.setdefault(number, []).append(self._queue.popleft())
                self._playing[group.number] = number
                self._loads[number] += 1
            if slow is not None:
                heapq.heappush(by_load, slow)
            if not is_dispatched:
                break
        for number, groups in dispatched.items():
            self.workers[number].enqueue_groups(groups, groups_per_run)

    def _take_fresh_groups(self, count: int) -> list[SimulatedGroup]:
        """Return up to `count` finished groups that are fresh enough; queue too old ones again."""
        finished = self._finished
        arrived = finished[self._num_checked_groups :]
        del finished[self._num_checked_groups :]
        for group in arrived:
            if group.oldest >= self.iteration - self.layout.max_staleness:
                finished.append(group)
            else:
                self.run.stale_groups += 1
                restarted = self._draw_group(stale=group)
                self._num_awaited_groups += restarted.num_restarts >= MAX_STALE_RESTARTS
                self._queue.appendleft(restarted)
        self._num_checked_groups = len(finished)
        if self._num_awaited_groups:
            return []
        finished.sort(key=lambda group: -group.num_restarts)
        taken = finished[:count]
        del finished[:count]
        self._num_checked_groups = len(finished)
        return taken

    def _update_policy(self, taken: list[SimulatedGroup]) -> Iterator[Any]:
        """Learn from groups and record their staleness."""
        rates = self.world.rates
        tokens_by_staleness: dict[int, float] = {}
        for group in taken:
            for sequence in group.sequences:
                for version, tokens in sequence.iter_version_tokens():
                    staleness = self.iteration - version
                    total = tokens_by_staleness.get(staleness, 0.0) + tokens
                    tokens_by_staleness[staleness] = total
        self.run.tokens_by_staleness.append(tokens_by_staleness)
        self.run.max_staleness_seen.append(max(self.iteration - group.oldest for group in taken))
        self.run.learned_groups.append([group.number for group in taken])
        tokens = sum(group.num_tokens for group in taken)
        for group in taken:
            group.sequences = []  # break the reference cycle
        seconds = rates.update_seconds + tokens * rates.token_seconds / self.layout.trainers
        yield from self.world.compute_for(seconds, self._busy)
        self.run.end_seconds.append(self.env.now)
        warm_up = count_warm_up_iterations(self.layout.max_staleness)
        if len(self.run.end_seconds) == min(warm_up, self.iterations - 1):
            self._warm_up_seconds = self._sum_busy_seconds()


def _split_into_tasks(
    groups: list[SimulatedGroup], workers: int, tasks_each: int
) -> list[list[SimulatedGroup]]:
    """Split groups into the tasks of a collection, as rl_core/rollout_workers/worker_group.py does."""
    tasks = min(len(groups), workers * tasks_each if workers > 1 else 1)
    edges = [len(groups) * index // tasks for index in range(tasks + 1)]
    return [groups[begin:end] for begin, end in pairwise(edges)]
