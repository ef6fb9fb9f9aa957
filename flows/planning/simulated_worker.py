"""A rollout worker in simulated time: an engine that decodes sequences side by side, and takes weights between steps.

n sequences that are decoded at once take step_seconds + n * row_seconds a token. Between two events (a turn ends, a
tool answers, weights arrive) n does not change, so time goes on from event to event, not from token to token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flows.planning.cluster_layout import ClusterLayout
from rl_core.settings.cluster_rates import ClusterRates

if TYPE_CHECKING:
    import simpy

__all__ = ["BusyTime", "SimulatedGroup", "SimulatedSequence", "SimulatedWorker", "SimulatedWorld"]

SLICE_S = 0.01  # of a core that processes share
_TINY = 1e-9


@dataclass(slots=True)
class SimulatedSequence:
    """One episode: tokens of its actions, seconds of the tools between them."""

    group: SimulatedGroup
    tokens: list[float]
    tools: list[float]
    turn: int = 0
    before: float = 0.0  # tokens of earlier turns
    mark: float = 0.0  # of the engine, when this turn began
    version_starts: list[tuple[float, int]] = field(default_factory=list)  # (tokens before it, version)

    def restart(self) -> None:
        """Back to the beginning."""
        self.turn, self.before, self.version_starts = 0, 0.0, []

    def tokens_by_version(self) -> Iterator[tuple[int, float]]:
        """(version, tokens) of each part."""
        ends = [*(start for start, _ in self.version_starts[1:]), sum(self.tokens)]
        for (start, version), end in zip(self.version_starts, ends, strict=True):
            yield version, end - start


@dataclass(slots=True)
class SimulatedGroup:
    """The rollouts of one prompt."""

    number: int
    plays: int = 0  # times that it was given up as too old
    slow: int | None = None  # number of the worker that was too slow for it then
    sequences: list[SimulatedSequence] = field(default_factory=list)
    left: int = 0  # sequences that have not ended
    oldest: int = 0  # version that one of its sequences was begun with; known when it has ended

    @property
    def num_tokens(self) -> float:
        """Sampled tokens of all its sequences."""
        return sum(sum(sequence.tokens) for sequence in self.sequences)


@dataclass
class BusyTime:
    """Seconds in which a process computed; on a shared core, as many as it would have taken alone."""

    spent: float = 0.0
    since: float | None = None  # when it began what it computes now

    def add(self, seconds: float) -> None:
        """It has computed for so long, however the clock rounds."""
        self.spent, self.since = self.spent + seconds, None

    def until(self, now: float) -> float:
        """Seconds up to now."""
        return self.spent if self.since is None else self.spent + now - self.since


@dataclass
class SimulatedWorld:
    """Time, cores and settings that all processes share."""

    env: simpy.Environment
    layout: ClusterLayout
    rates: ClusterRates
    cores: simpy.Resource | None
    finish: Callable[[SimulatedGroup], None]  # is given every finished group
    dropped: int = 0  # rollouts begun anew

    def compute(self, seconds: float, busy: BusyTime) -> Iterator[Any]:
        """Compute for so long."""
        if seconds <= 0:
            return
        if self.cores is not None:
            yield from self.compute_in_slices(seconds, busy, lambda: False)
            return
        busy.since = self.env.now
        yield self.env.timeout(seconds)
        busy.add(seconds)

    def compute_in_slices(
        self, seconds: float, busy: BusyTime, has_news: Callable[[], bool]
    ) -> Generator[Any, Any, float]:
        """Compute on a core that is shared, for so long or until there is news; returns the seconds computed."""
        assert self.cores is not None
        left = seconds
        while left > _TINY:
            with self.cores.request() as request:
                yield request
                part = min(left, SLICE_S)
                computing = self.cores.count + len(self.cores.queue)
                yield self.env.timeout(part * self.layout.slowdown(computing))
            left -= part
            busy.add(part)
            if has_news():
                break
        return seconds - left if left > _TINY else seconds


class SimulatedWorker:
    """Plays groups in runs of its engine, and loads weights that arrive."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.tickets: deque[SimulatedGroup] = deque()
        self.updates: deque[int] = deque()  # versions on their way
        self.version = -1
        self.at_once = 1  # groups of a run
        self.busy = BusyTime()
        self._news = self._next_news()  # tickets or weights
        self._alarm: simpy.Event | None = None  # ends a wait, where no news does
        self._woken = world.env.event()
        self._ties = itertools.count()

    def begin(self, groups: list[SimulatedGroup], at_once: int) -> None:
        """Queue groups."""
        self.tickets += groups
        self.at_once = at_once
        self._notify()

    def send(self, version: int) -> None:
        """Queue new weights."""
        self.updates.append(version)
        self._notify()

    def _next_news(self) -> simpy.Event:
        news = self.world.env.event()
        news.callbacks.append(self._wake)
        return news

    def _notify(self) -> None:
        if not self._news.triggered:
            self._news.succeed()

    def _wake(self, event: simpy.Event) -> None:
        if not self._woken.triggered and (event is self._alarm or event is self._news):
            self._woken.succeed()

    def _sleep(self, alarm: simpy.Event) -> simpy.Event:
        """An event: the alarm went off, or there is news. As simpy's condition `alarm | news`, of fewer parts."""
        self._alarm, self._woken = alarm, self.world.env.event()
        alarm.callbacks.append(self._wake)
        if self._news.processed:
            self._woken.succeed()
        return self._woken

    def _decode(self, seconds: float) -> Generator[Any, Any, float]:
        """Decode for so long, or until there is news; returns the seconds of it."""
        env = self.world.env
        if seconds <= 0:
            return 0.0
        if self.world.cores is not None:
            return (yield from self.world.compute_in_slices(seconds, self.busy, lambda: self._news.triggered))
        self.busy.since = began = env.now
        done = env.timeout(seconds)
        yield self._sleep(done)
        worked: float = seconds if done.processed else min(seconds, env.now - began)  # however the clock rounds
        self.busy.add(worked)
        return worked

    def work(self) -> Iterator[Any]:
        """The process of an asynchronous worker."""
        while True:
            while not self.tickets and not self.updates:
                yield self._news
                self._news = self._next_news()
            if self.updates:
                yield from self.load()
            if self.tickets:
                yield from self.play([self.tickets.popleft() for _ in range(min(self.at_once, len(self.tickets)))])

    def load(self) -> Iterator[Any]:
        """Take all weights that have arrived."""
        while self.updates:
            version = self.updates.popleft()
            yield from self.world.compute(self.world.rates.load_seconds, self.busy)
            self.version = version

    def play(self, groups: list[SimulatedGroup]) -> Iterator[Any]:
        """One run of the engine, to the end of every sequence."""
        run = _EngineRun(self, groups)
        while run.is_open:
            yield from self._step(run)

    def _step(self, run: _EngineRun) -> Iterator[Any]:
        """To the next event of a run."""
        world, rates = self.world, self.world.rates
        if self._news.triggered:
            self._news = self._next_news()
        if self.updates:
            yield from self.load()
            world.dropped += run.note_version(self.version, drop=world.layout.partial == "drop")
        if self.tickets and world.layout.refill and world.layout.max_staleness:
            run.refill(self.tickets)
        until = run.awaits(world.env.now)
        if until is not None:
            yield self._sleep(world.env.timeout(until - world.env.now))
            return
        if joined := run.join(world.env.now, self.version):
            yield from world.compute(rates.join_seconds + joined * rates.turn_seconds, self.busy)
        step = rates.step_seconds + rates.row_seconds * len(run.active)
        seconds = (run.active[0][0] - run.mark) * step
        if run.is_ready and run.waiting:
            seconds = min(seconds, max(0.0, run.waiting[0][0] - world.env.now))
        worked = yield from self._decode(seconds)
        run.mark += worked / step
        for group in run.end_turns(world.env.now):
            world.finish(group)


class _EngineRun:
    """Sequences of one run: queued, decoded, and waiting for their tools."""

    def __init__(self, worker: SimulatedWorker, groups: list[SimulatedGroup]) -> None:
        layout = worker.world.layout
        self.slots = layout.slots
        self.is_ready = layout.max_staleness > 0 or layout.rejoin == "ready"
        self.queue = deque(sequence for group in groups for sequence in group.sequences)
        self.active: list[tuple[float, int, SimulatedSequence]] = []  # by the mark at which the turn ends
        self.waiting: list[tuple[float, int, SimulatedSequence]] = []  # by the time at which the tool answers
        self.mark = 0.0  # tokens that a sequence decoded from the beginning would have
        self._ties = worker._ties

    @property
    def is_open(self) -> bool:
        """False = every sequence has ended."""
        return bool(self.queue or self.active or self.waiting)

    @property
    def _free(self) -> int:
        return self.slots - len(self.active) - len(self.waiting)

    def refill(self, tickets: deque[SimulatedGroup]) -> None:
        """Take all groups that the worker has: as `LiveWorker`, which takes as many as the trainer hands out."""
        while tickets:
            self.queue += tickets.popleft().sequences

    def awaits(self, now: float) -> float | None:
        """Time until which nothing can be decoded; None = something can."""
        if self.active or (self.queue and self._free):
            return None
        until = self.waiting[0][0] if self.is_ready else max(at for at, _, _ in self.waiting)
        return until if until > now + _TINY else None

    def join(self, now: float, version: int) -> int:
        """Begin queued sequences in free slots, go on with those whose tools have answered; returns their number."""
        joined = 0
        if self.queue:
            for _ in range(min(len(self.queue), self._free)):
                sequence = self.queue.popleft()
                sequence.version_starts = [(0.0, version)]
                self._decode(sequence)
                joined += 1
        if self.is_ready or not self.active:
            while self.waiting and self.waiting[0][0] <= now + _TINY:
                self._decode(heapq.heappop(self.waiting)[2])
                joined += 1
        return joined

    def _decode(self, sequence: SimulatedSequence) -> None:
        sequence.mark = self.mark
        heapq.heappush(self.active, (self.mark + sequence.tokens[sequence.turn], next(self._ties), sequence))

    def end_turns(self, now: float) -> Iterator[SimulatedGroup]:
        """Turns that end at this mark; yields the groups that end with them."""
        active, limit = self.active, self.mark + _TINY
        while active and active[0][0] <= limit:
            sequence = heapq.heappop(active)[2]
            sequence.before += sequence.tokens[sequence.turn]
            if sequence.turn + 1 < len(sequence.tokens):
                heapq.heappush(self.waiting, (now + sequence.tools[sequence.turn], next(self._ties), sequence))
                sequence.turn += 1
                continue
            group = sequence.group
            group.left -= 1
            if not group.left:
                group.oldest = min(one.version_starts[0][1] for one in group.sequences)
                yield group

    def note_version(self, version: int, *, drop: bool) -> int:
        """New weights: sequences that have begun go on under them, or begin anew; returns the number of the latter."""
        if drop:
            begun = [*self.active, *self.waiting]
            self.active, self.waiting = [], []
            for _, _, sequence in begun:
                sequence.restart()
                self.queue.append(sequence)
            return len(begun)
        for _, _, sequence in self.active:
            _note(sequence, sequence.before + self.mark - sequence.mark, version)
        for _, _, sequence in self.waiting:
            _note(sequence, sequence.before, version)
        return 0


def _note(sequence: SimulatedSequence, sampled: float, version: int) -> None:
    """As `rl_core.inference.versioned_run.note_version`: a version that sampled nothing is forgotten, but the first."""
    starts = sequence.version_starts
    if starts[-1][0] == sampled and (sampled or len(starts) > 1):
        starts.pop()
    starts.append((sampled, version))
