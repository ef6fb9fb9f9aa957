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

from flows.planning.cluster_layout import ClusterLayout, RolloutSizes
from flows.planning.simulated_worker import BusyTime, SimulatedGroup, SimulatedSequence, SimulatedWorker, SimulatedWorld
from rl_core.errors import SettingsError
from rl_core.settings.cluster_rates import ClusterRates

__all__ = ["SimulatedRun", "check_simpy", "simulate", "warm_up_of"]

_TINY = 1e-12
PATIENCE = 2  # as rl_core.rollout_workers.stream.PATIENCE, which a test holds: importing it would import torch


def warm_up_of(bound: int) -> int:
    """Iterations at the beginning that tell nothing of the later ones, where so much staleness is allowed.

    bound + 1 batches begin at once, and the shortest of their groups are learned from first. The longest follow later:
    a group that becomes too old twice is waited for in the iteration 2 * (bound + 1) after its beginning, or sooner.
    """
    return 2 + 4 * bound


@dataclass
class SimulatedRun:
    """Result of a simulation. Times in seconds since its start."""

    layout: ClusterLayout
    ends: list[float] = field(default_factory=list)  # of each iteration
    learned: list[list[int]] = field(default_factory=list)  # numbers of the groups that each iteration learned from
    ages: list[dict[int, float]] = field(default_factory=list)  # sampled tokens by staleness, of each iteration
    oldest: list[int] = field(default_factory=list)  # largest staleness of each iteration, prompts included
    stale_groups: int = 0  # became too old, and were played again
    dropped_rollouts: int = 0
    worker_share: float = 0.0  # of the time after the warm-up, in which workers computed
    trainer_share: float = 0.0

    @property
    def warm_up(self) -> int:
        """Iterations at the beginning that are not counted."""
        return min(warm_up_of(self.layout.max_staleness), len(self.ends) - 1)

    @property
    def iteration_s(self) -> float:
        """Mean length of an iteration after the warm-up."""
        first = self.warm_up
        begin = self.ends[first - 1] if first else 0.0
        return (self.ends[-1] - begin) / (len(self.ends) - first)

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts that are learned from in a second, after the warm-up."""
        return self.layout.prompts * self.layout.group_size / self.iteration_s

    @property
    def staleness(self) -> float:
        """Mean staleness of a token, after the warm-up."""
        counted = self.ages[self.warm_up :]
        tokens = sum(count for ages in counted for count in ages.values())
        return sum(age * count for ages in counted for age, count in ages.items()) / tokens


def check_simpy() -> None:
    """Raises: SettingsError where SimPy is not installed."""
    if importlib.util.find_spec("simpy") is None:
        raise SettingsError("--simulate: needs the package simpy: pip install 'posttrain[plan]' -c constraints.txt")


def simulate(
    layout: ClusterLayout,
    rates: ClusterRates,
    sizes: RolloutSizes | None = None,
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
    check_simpy()
    if iterations < 1:
        raise SettingsError(f"iterations: {iterations} must be at least 1")
    simpy = importlib.import_module("simpy")
    env = simpy.Environment()
    trainer = _SimulatedTrainer(env, layout, sizes or RolloutSizes.of(rates), iterations, seed)
    cores = simpy.Resource(env, layout.cores) if layout.cores is not None else None
    world = SimulatedWorld(env, layout, rates, cores, trainer.receive)
    trainer.employ(world)
    env.run(until=env.process(trainer.train_late() if layout.max_staleness else trainer.train_in_turns()))
    return trainer.result()


class _SimulatedTrainer:
    """The trainer's process, and its side of the workers."""

    def __init__(self, env: Any, layout: ClusterLayout, sizes: RolloutSizes, iterations: int, seed: int) -> None:
        self.env, self.layout, self.sizes, self.iterations, self.seed = env, layout, sizes, iterations, seed
        self.run = SimulatedRun(layout)
        self.iteration = 0
        self._next = 0
        self._queue: deque[SimulatedGroup] = deque()
        self._playing: dict[int, int] = {}  # number of a group -> its worker's
        self._loads = [0] * layout.workers  # groups that each worker has
        self._awaited = 0  # groups under way that became too old so often that an iteration waits for them
        self._finished: list[SimulatedGroup] = []
        self._fresh = 0  # of these, from the beginning: known to be young enough in this iteration
        self._arrived = env.event()
        self._busy = BusyTime()
        self._before = (0.0, 0.0, 0.0)  # seconds of the warm-up: all, those of busy workers, of a busy trainer

    def employ(self, world: SimulatedWorld) -> None:
        """Make the workers."""
        self.world = world
        self.workers = [SimulatedWorker(world) for _ in range(self.layout.workers)]

    def receive(self, group: SimulatedGroup) -> None:
        """Take a finished group."""
        if group.number in self._playing:
            group.slow = self._playing.pop(group.number)
            self._loads[group.slow] -= 1
        self._awaited -= group.plays >= PATIENCE
        self._finished.append(group)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def result(self) -> SimulatedRun:
        """The run, with the shares of time."""
        total, workers, trainer = (now - then for now, then in zip(self._spent(), self._before, strict=True))
        self.run.worker_share = workers / max(total * len(self.workers), _TINY)
        self.run.trainer_share = trainer / max(total, _TINY)
        self.run.dropped_rollouts = self.world.dropped
        return self.run

    def _spent(self) -> tuple[float, float, float]:
        now = self.env.now
        return now, sum(worker.busy.until(now) for worker in self.workers), self._busy.until(now)

    # Synchronous: rollouts and updates take turns

    def train_in_turns(self) -> Iterator[Any]:
        """As RolloutTeam: weights to everybody, tasks to whoever is free, then the update."""
        layout, rates = self.layout, self.world.rates
        for iteration in range(self.iterations):
            self.iteration = iteration
            yield from self.world.compute(rates.publish_seconds, self._busy)
            for worker in self.workers:
                worker.send(self.iteration)
            loads = [self.env.process(worker.load()) for worker in self.workers]
            yield from self.world.compute(rates.verify_seconds, self._busy)
            yield self.env.all_of(loads)
            self._finished = []
            groups = [self._draw() for _ in range(layout.prompts)]
            tasks = deque(_cut(groups, layout.workers, layout.tasks_each))
            yield self.env.all_of([self.env.process(self._serve(worker, tasks)) for worker in self.workers])
            taken = sorted(self._finished, key=lambda group: group.number)
            if layout.shares_gpus:
                yield self.env.timeout(rates.switch_seconds)
            yield from self._update(taken)
            if layout.shares_gpus:
                yield self.env.timeout(rates.switch_seconds)

    def _serve(self, worker: SimulatedWorker, tasks: deque[list[SimulatedGroup]]) -> Iterator[Any]:
        rates = self.world.rates
        while tasks:
            groups = tasks.popleft()
            yield from worker.play(groups)
            transport = BusyTime()  # counted nowhere
            yield from self.world.compute(rates.call_seconds + len(groups) * rates.group_seconds, transport)

    # Asynchronous: tickets ahead of the trainer

    def train_late(self) -> Iterator[Any]:
        """As RolloutStream: new weights go out, and the next groups that are young enough are learned from."""
        layout, rates = self.layout, self.world.rates
        for worker in self.workers:
            self.env.process(worker.work())
        for iteration in range(self.iterations):
            self.iteration, self._fresh = iteration, 0
            yield from self.world.compute(rates.publish_seconds, self._busy)
            for worker in self.workers:
                worker.send(self.iteration)
            yield from self.world.compute(rates.verify_seconds, self._busy)
            taken: list[SimulatedGroup] = []
            while len(taken) < layout.prompts:
                self._draw_ahead(len(taken))
                self._hand_out()
                stale = self.run.stale_groups
                found = self._ripe(layout.prompts - len(taken))
                taken += found
                yield from self.world.compute(len(found) * rates.group_seconds, self._busy)
                if not found and stale == self.run.stale_groups:
                    yield self._arrived
                    self._arrived = self.env.event()
            yield from self._update(taken)

    def _draw(self, again: SimulatedGroup | None = None) -> SimulatedGroup:
        """The next group, or one that became too old, from its beginning."""
        number = self._next if again is None else again.number
        if again is None:
            self._next += 1
        tokens, tools = self.sizes.draw(self.seed, number, self.layout.group_size)
        group = SimulatedGroup(number, left=self.layout.group_size)
        if again is not None:
            group.plays, group.slow = again.plays + 1, again.slow if self.layout.workers > 1 else None
        group.sequences = [
            SimulatedSequence(group, row, waits) for row, waits in zip(tokens.tolist(), tools.tolist(), strict=True)
        ]
        return group

    def _draw_ahead(self, taken: int) -> None:
        most = self.layout.most_groups
        while len(self._queue) + len(self._playing) + len(self._finished) + taken < most:
            self._queue.append(self._draw())

    def _hand_out(self) -> None:
        """Groups to the workers with the fewest, up to an even share of what may be under way; see `RolloutStream`."""
        layout = self.layout
        most = math.ceil(layout.most_groups / layout.workers)
        at_once = math.ceil(layout.prompts / layout.workers)
        by_load = [(load, number) for number, load in enumerate(self._loads)] if self._queue else []
        heapq.heapify(by_load)
        given: dict[int, list[SimulatedGroup]] = {}
        while self._queue:
            group = self._queue[0]
            slow = heapq.heappop(by_load) if by_load[0][1] == group.slow else None
            if slow is not None and slow[0] < most <= by_load[0][0] and group.plays < PATIENCE:
                heapq.heappush(by_load, slow)  # it alone has room
                slow = None
            load, number = by_load[0]
            is_given = load < most or group.plays >= PATIENCE
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
            self.workers[number].begin(groups, at_once)

    def _ripe(self, count: int) -> list[SimulatedGroup]:
        """Finished groups that are young enough, at most so many; too old ones are queued again."""
        finished = self._finished
        arrived = finished[self._fresh :]
        del finished[self._fresh :]
        for group in arrived:
            if group.oldest >= self.iteration - self.layout.max_staleness:
                finished.append(group)
            else:
                self.run.stale_groups += 1
                again = self._draw(again=group)
                self._awaited += again.plays >= PATIENCE
                self._queue.appendleft(again)
        self._fresh = len(finished)
        if self._awaited:
            return []
        finished.sort(key=lambda group: -group.plays)
        taken = finished[:count]
        del finished[:count]
        self._fresh = len(finished)
        return taken

    # Both

    def _update(self, taken: list[SimulatedGroup]) -> Iterator[Any]:
        """Learn from groups, and note their ages."""
        rates = self.world.rates
        ages: dict[int, float] = {}
        for group in taken:
            for sequence in group.sequences:
                for version, tokens in sequence.tokens_by_version():
                    ages[self.iteration - version] = ages.get(self.iteration - version, 0.0) + tokens
        self.run.ages.append(ages)
        self.run.oldest.append(max(self.iteration - group.oldest for group in taken))
        self.run.learned.append([group.number for group in taken])
        tokens = sum(group.num_tokens for group in taken)
        for group in taken:
            group.sequences = []  # they name their group: freed at once, not by the garbage collector
        seconds = rates.update_seconds + tokens * rates.token_seconds / self.layout.trainers
        yield from self.world.compute(seconds, self._busy)
        self.run.ends.append(self.env.now)
        if len(self.run.ends) == min(warm_up_of(self.layout.max_staleness), self.iterations - 1):
            self._before = self._spent()


def _cut(groups: list[SimulatedGroup], workers: int, each: int) -> list[list[SimulatedGroup]]:
    """Tasks of a collection, as in rl_core/rollout_workers/team.py."""
    tasks = min(len(groups), workers * each if workers > 1 else 1)
    edges = [len(groups) * place // tasks for place in range(tasks + 1)]
    return [groups[begin:end] for begin, end in pairwise(edges)]
