"""Discrete-event simulation (SimPy) of a policy stage on rollout workers, synchronous or asynchronous.

Times of the parts are settings (`ClusterRates`); what follows is who waits for whom: the schedule is that of
rl_core/rollout_workers (`team.py`: tasks, one after the other; `stream.py`: tickets ahead of the trainer, the bound of
staleness, groups that are played again).
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
MAX_STALE_RESTARTS = 2  # as rl_core.rollout_workers.async_worker_group.MAX_STALE_PLAYS, which a test holds: importing it would import torch


def count_warm_up_iterations(bound: int) -> int:
    """Iterations at the beginning that tell nothing of the later ones, where so much staleness is allowed.

    bound + 1 batches begin at once, and the shortest of their groups are learned from first. The longest follow later:
    a group that becomes too old twice is waited for in the iteration 2 * (bound + 1) after its beginning, or sooner.
    """
    return 2 + 4 * bound


@dataclass
class SimulatedRun:
    """Result of a simulation. Times in seconds since its start."""

    layout: ClusterLayout
    end_seconds: list[float] = field(default_factory=list)  # of each iteration
    learned_groups: list[list[int]] = field(
        default_factory=list
    )  # numbers of the groups that each iteration learned from
    tokens_by_staleness: list[dict[int, float]] = field(
        default_factory=list
    )  # sampled tokens by staleness, of each iteration
    max_staleness_seen: list[int] = field(
        default_factory=list
    )  # largest staleness of each iteration, prompts included
    stale_groups: int = 0  # became too old, and were played again
    dropped_rollouts: int = 0
    worker_share: float = 0.0  # of the time after the warm-up, in which workers computed
    trainer_share: float = 0.0

    @property
    def warm_up(self) -> int:
        """Iterations at the beginning that are not counted."""
        return min(count_warm_up_iterations(self.layout.max_staleness), len(self.end_seconds) - 1)

    @property
    def iteration_s(self) -> float:
        """Mean length of an iteration after the warm-up."""
        first = self.warm_up
        begin = self.end_seconds[first - 1] if first else 0.0
        return (self.end_seconds[-1] - begin) / (len(self.end_seconds) - first)

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts that are learned from in a second, after the warm-up."""
        return self.layout.prompts * self.layout.group_size / self.iteration_s

    @property
    def staleness(self) -> float:
        """Mean staleness of a token, after the warm-up."""
        counted = self.tokens_by_staleness[self.warm_up :]
        tokens = sum(count for ages in counted for count in ages.values())
        return sum(age * count for ages in counted for age, count in ages.items()) / tokens


def require_simpy() -> None:
    """Raises: SettingsError where SimPy is not installed."""
    if importlib.util.find_spec("simpy") is None:
        raise SettingsError(
            "--simulate: needs the package simpy: pip install 'posttrain[plan]' -c constraints.txt"
        )


def simulate_run(
    layout: ClusterLayout,
    rates: ClusterRates,
    sizes: RolloutSizeDistributions | None = None,
    *,
    iterations: int = 20,
    seed: int = 0,
) -> SimulatedRun:
    """Simulate a run of so many iterations.

    Args:
        sizes: of the rollouts; None = as `rates` says.
        seed: of the sizes; a group's are the same in every layout.
    Raises: SettingsError where SimPy is not installed.
    """
    require_simpy()
    if iterations < 1:
        raise SettingsError(f"iterations: {iterations} must be at least 1")
    simpy = importlib.import_module("simpy")
    env = simpy.Environment()
    trainer = _SimulatedTrainer(
        env, layout, sizes or RolloutSizeDistributions.from_rates(rates), iterations, seed
    )
    cores = simpy.Resource(env, layout.cores) if layout.cores is not None else None
    world = SimulatedWorld(env, layout, rates, cores, trainer.receive_group)
    trainer.create_workers(world)
    env.run(
        until=env.process(
            trainer.train_asynchronously()
            if layout.max_staleness
            else trainer.train_synchronously()
        )
    )
    return trainer.build_result()


class _SimulatedTrainer:
    """The trainer's process, and its side of the workers."""

    def __init__(
        self,
        env: Any,
        layout: ClusterLayout,
        sizes: RolloutSizeDistributions,
        iterations: int,
        seed: int,
    ) -> None:
        self.env, self.layout, self.sizes, self.iterations, self.seed = (
            env,
            layout,
            sizes,
            iterations,
            seed,
        )
        self.run = SimulatedRun(layout)
        self.iteration = 0
        self._next_number = 0
        self._queue: deque[SimulatedGroup] = deque()
        self._playing: dict[int, int] = {}  # number of a group -> its worker's
        self._loads = [0] * layout.workers  # groups that each worker has
        self._num_awaited_groups = (
            0  # groups under way that became too old so often that an iteration waits for them
        )
        self._finished: list[SimulatedGroup] = []
        self._num_checked_groups = (
            0  # of these, from the beginning: known to be young enough in this iteration
        )
        self._arrived = env.event()
        self._busy = BusyTime()
        self._warm_up_seconds = (
            0.0,
            0.0,
            0.0,
        )  # seconds of the warm-up: all, those of busy workers, of a busy trainer

    def create_workers(self, world: SimulatedWorld) -> None:
        """Make the workers."""
        self.world = world
        self.workers = [SimulatedWorker(world) for _ in range(self.layout.workers)]

    def receive_group(self, group: SimulatedGroup) -> None:
        """Take a finished group."""
        if group.number in self._playing:
            group.slow_worker = self._playing.pop(group.number)
            self._loads[group.slow_worker] -= 1
        self._num_awaited_groups -= group.num_restarts >= MAX_STALE_RESTARTS
        self._finished.append(group)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def build_result(self) -> SimulatedRun:
        """The run, with the shares of time."""
        total, workers, trainer = (
            now - then
            for now, then in zip(self._sum_busy_seconds(), self._warm_up_seconds, strict=True)
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

    # Synchronous: rollouts and updates take turns

    def train_synchronously(self) -> Iterator[Any]:
        """As RolloutTeam: weights to everybody, tasks to whoever is free, then the update."""
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
            transport = BusyTime()  # counted nowhere
            yield from self.world.compute_for(
                rates.call_seconds + len(groups) * rates.group_seconds, transport
            )

    # Asynchronous: tickets ahead of the trainer

    def train_asynchronously(self) -> Iterator[Any]:
        """As RolloutStream: new weights go out, and the next groups that are young enough are learned from."""
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
                stale = self.run.stale_groups
                found = self._take_fresh_groups(layout.prompts - len(taken))
                taken += found
                yield from self.world.compute_for(len(found) * rates.group_seconds, self._busy)
                if not found and stale == self.run.stale_groups:
                    yield self._arrived
                    self._arrived = self.env.event()
            yield from self._update_policy(taken)

    def _draw_group(self, again: SimulatedGroup | None = None) -> SimulatedGroup:
        """The next group, or one that became too old, from its beginning."""
        number = self._next_number if again is None else again.number
        if again is None:
            self._next_number += 1
        tokens, tools = self.sizes.draw_group(self.seed, number, self.layout.group_size)
        group = SimulatedGroup(number, num_unfinished=self.layout.group_size)
        if again is not None:
            group.num_restarts, group.slow_worker = (
                again.num_restarts + 1,
                again.slow_worker if self.layout.workers > 1 else None,
            )
        group.sequences = [
            SimulatedSequence(group, row, waits)
            for row, waits in zip(tokens.tolist(), tools.tolist(), strict=True)
        ]
        return group

    def _fill_queue(self, taken: int) -> None:
        most = self.layout.max_groups_in_flight
        while len(self._queue) + len(self._playing) + len(self._finished) + taken < most:
            self._queue.append(self._draw_group())

    def _dispatch_groups(self) -> None:
        """Groups to the workers with the fewest, up to an even share of what may be under way; see `AsyncWorkerGroup`."""
        layout = self.layout
        most = math.ceil(layout.max_groups_in_flight / layout.workers)
        at_once = math.ceil(layout.prompts / layout.workers)
        by_load = [(load, number) for number, load in enumerate(self._loads)] if self._queue else []
        heapq.heapify(by_load)
        given: dict[int, list[SimulatedGroup]] = {}
        while self._queue:
            group = self._queue[0]
            slow = heapq.heappop(by_load) if by_load[0][1] == group.slow_worker else None
            if (
                slow is not None
                and slow[0] < most <= by_load[0][0]
                and group.num_restarts < MAX_STALE_RESTARTS
            ):
                heapq.heappush(by_load, slow)  # it alone has room
                slow = None
            load, number = by_load[0]
            is_given = load < most or group.num_restarts >= MAX_STALE_RESTARTS
            if is_given:
                heapq.heapreplace(by_load, (load + 1, number))
                given.setdefault(number, []).append(self._queue.popleft())
                self._playing[group.number] = number
                self._loads[number] += 1
            if slow is not None:
                heapq.heappush(by_load, slow)
            if not is_given:
                break
        for number, groups in given.items():
            self.workers[number].enqueue_groups(groups, at_once)

    def _take_fresh_groups(self, count: int) -> list[SimulatedGroup]:
        """Finished groups that are young enough, at most so many; too old ones are queued again."""
        finished = self._finished
        arrived = finished[self._num_checked_groups :]
        del finished[self._num_checked_groups :]
        for group in arrived:
            if group.oldest >= self.iteration - self.layout.max_staleness:
                finished.append(group)
            else:
                self.run.stale_groups += 1
                again = self._draw_group(again=group)
                self._num_awaited_groups += again.num_restarts >= MAX_STALE_RESTARTS
                self._queue.appendleft(again)
        self._num_checked_groups = len(finished)
        if self._num_awaited_groups:
            return []
        finished.sort(key=lambda group: -group.num_restarts)
        taken = finished[:count]
        del finished[:count]
        self._num_checked_groups = len(finished)
        return taken

    # Both

    def _update_policy(self, taken: list[SimulatedGroup]) -> Iterator[Any]:
        """Learn from groups, and note their ages."""
        rates = self.world.rates
        ages: dict[int, float] = {}
        for group in taken:
            for sequence in group.sequences:
                for version, tokens in sequence.iter_version_tokens():
                    ages[self.iteration - version] = (
                        ages.get(self.iteration - version, 0.0) + tokens
                    )
        self.run.tokens_by_staleness.append(ages)
        self.run.max_staleness_seen.append(max(self.iteration - group.oldest for group in taken))
        self.run.learned_groups.append([group.number for group in taken])
        tokens = sum(group.num_tokens for group in taken)
        for group in taken:
            group.sequences = []  # they name their group: freed at once, not by the garbage collector
        seconds = rates.update_seconds + tokens * rates.token_seconds / self.layout.trainers
        yield from self.world.compute_for(seconds, self._busy)
        self.run.end_seconds.append(self.env.now)
        if len(self.run.end_seconds) == min(
            count_warm_up_iterations(self.layout.max_staleness), self.iterations - 1
        ):
            self._warm_up_seconds = self._sum_busy_seconds()


def _split_into_tasks(
    groups: list[SimulatedGroup], workers: int, each: int
) -> list[list[SimulatedGroup]]:
    """Tasks of a collection, as in rl_core/rollout_workers/worker_group.py."""
    tasks = min(len(groups), workers * each if workers > 1 else 1)
    edges = [len(groups) * place // tasks for place in range(tasks + 1)]
    return [groups[begin:end] for begin, end in pairwise(edges)]
