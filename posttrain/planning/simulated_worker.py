"""Rollout worker in simulated time: an engine that decodes sequences concurrently and loads weights between steps.

Decoding n sequences together takes step_seconds + n * row_seconds per token. Between two events (a turn ends, a tool
answers, weights arrive) n does not change, so time advances from event to event, not from token to token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.planning.simulation_inputs import ClusterLayout
from rl_core.settings.planning import ClusterRates

if TYPE_CHECKING:
    import simpy

CORE_SLICE_SECONDS = 0.01  # of a shared core
_TINY = 1e-9


@dataclass(slots=True)
class SimulatedSequence:
    """Episode: tokens of its actions, and seconds of the tools between them."""

    group: SimulatedGroup
    tokens: list[float]
    tools: list[float]
    turn: int = 0
    before: float = 0.0  # tokens of earlier turns
    mark: float = 0.0  # of the engine, at the start of this turn
    # (tokens before it, version)
    version_starts: list[tuple[float, int]] = field(default_factory=list)

    def restart_sequence(self) -> None:
        """Restart the sequence from its beginning."""
        self.turn, self.before, self.version_starts = 0, 0.0, []

    def iter_version_tokens(self) -> Iterator[tuple[int, float]]:
        """Yield (version, tokens) of each part."""
        ends = [*(start for start, _ in self.version_starts[1:]), sum(self.tokens)]
        for (start, version), end in zip(self.version_starts, ends, strict=True):
            yield version, end - start


@dataclass(slots=True)
class SimulatedGroup:
    """Rollouts of one prompt."""

    number: int
    num_restarts: int = 0  # because it became too old
    slow_worker: int | None = None  # number of the worker that was then too slow for it
    sequences: list[SimulatedSequence] = field(default_factory=list)
    num_unfinished: int = 0  # sequences
    oldest: int = 0  # oldest initial version of its sequences; known when it has ended

    @property
    def num_tokens(self) -> float:
        """Sampled tokens of all its sequences."""
        return sum(sum(sequence.tokens) for sequence in self.sequences)


@dataclass
class BusyTime:
    """Seconds in which a process computed; on a shared core, as many as it would have taken alone."""

    spent: float = 0.0
    since: float | None = None  # start of the current computation

    def add_seconds(self, seconds: float) -> None:
        """Add a finished computation, independent of how the clock rounds."""
        self.spent, self.since = self.spent + seconds, None

    def total_until(self, now: float) -> float:
        """Return the seconds up to now."""
        return self.spent if self.since is None else self.spent + now - self.since


@dataclass
class SimulatedWorld:
    """Time, cores and settings shared by all processes."""

    env: simpy.Environment
    layout: ClusterLayout
    rates: ClusterRates
    cores: simpy.Resource | None
    on_group_finished: Callable[[SimulatedGroup], None]  # called with every finished group
    num_dropped_rollouts: int = 0  # restarted rollouts

    def compute_for(self, seconds: float, busy: BusyTime) -> Iterator[Any]:
        """Compute for this long."""
        if seconds <= 0:
            return
        if self.cores is not None:
            yield from self.compute_in_slices(seconds, busy, lambda: False)
            return
        busy.since = self.env.now
        yield self.env.timeout(seconds)
        busy.add_seconds(seconds)

    def compute_in_slices(
        self, seconds: float, busy: BusyTime, is_interrupted: Callable[[], bool]
    ) -> Generator[Any, Any, float]:
        """Compute on a shared core for this long or until interrupted; return the seconds computed."""
        assert self.cores is not None
        left = seconds
        while left > _TINY:
            with self.cores.request() as request:
                yield request
                part = min(left, CORE_SLICE_SECONDS)
                computing = self.cores.count + len(self.cores.queue)
                yield self.env.timeout(part * self.layout.compute_slowdown(computing))
            left -= part
            busy.add_seconds(part)
            if is_interrupted():
                break
        return seconds - left if left > _TINY else seconds


class SimulatedWorker:
    """Worker that plays groups in runs of its engine, and loads arriving weights."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.queued_groups: deque[SimulatedGroup] = deque()
        self.pending_versions: deque[int] = deque()  # versions not loaded yet
        self.version = -1
        self.groups_per_run = 1
        self.busy = BusyTime()
        self._wakeup = self._create_wakeup()  # groups or weights arrived
        self._alarm: simpy.Event | None = None  # ends a sleep without a wakeup
        self._woken = world.env.event()
        self._ties = itertools.count()

    def enqueue_groups(self, groups: list[SimulatedGroup], groups_per_run: int) -> None:
        """Queue groups."""
        self.queued_groups += groups
        self.groups_per_run = groups_per_run
        self._trigger_wakeup()

    def enqueue_weights(self, version: int) -> None:
        """Queue new weights."""
        self.pending_versions.append(version)
        self._trigger_wakeup()

    def _create_wakeup(self) -> simpy.Event:
        wakeup = self.world.env.event()
        wakeup.callbacks.append(self._end_sleep)
        return wakeup

    def _trigger_wakeup(self) -> None:
        if not self._wakeup.triggered:
            self._wakeup.succeed()

    def _end_sleep(self, event: simpy.Event) -> None:
        if not self._woken.triggered and (event is self._alarm or event is self._wakeup):
            self._woken.succeed()

    def _sleep_until(self, alarm: simpy.Event) -> simpy.Event:
        """Return an event that fires at the alarm or at a wakeup.

        It is like SimPy's condition `alarm | wakeup`, with fewer parts.
        """
        self._alarm, self._woken = alarm, self.world.env.event()
        alarm.callbacks.append(self._end_sleep)
        if self._wakeup.processed:
            self._woken.succeed()
        return self._woken

    def _decode_for(self, seconds: float) -> Generator[Any, Any, float]:
        """Decode for this long, or until a wakeup; return the seconds spent."""
        env = self.world.env
        if seconds <= 0:
            return 0.0
        if self.world.cores is not None:
            slices = self.world.compute_in_slices(
                seconds, self.busy, lambda: self._wakeup.triggered
            )
            return (yield from slices)
        self.busy.since = start = env.now
        done = env.timeout(seconds)
        yield self._sleep_until(done)
        # Independent of how the clock rounds.
        worked: float = seconds if done.processed else min(seconds, env.now - start)
        self.busy.add_seconds(worked)
        return worked

    def run_worker(self) -> Iterator[Any]:
        """Run the process of an asynchronous worker."""
        while True:
            while not self.queued_groups and not self.pending_versions:
                yield self._wakeup
                self._wakeup = self._create_wakeup()
            if self.pending_versions:
                yield from self.load_pending_weights()
            if self.queued_groups:
                count = min(self.groups_per_run, len(self.queued_groups))
                groups = [self.queued_groups.popleft() for _ in range(count)]
                yield from self.play_groups(groups)

    def load_pending_weights(self) -> Iterator[Any]:
        """Load all weights that have arrived."""
        while self.pending_versions:
            version = self.pending_versions.popleft()
            yield from self.world.compute_for(self.world.rates.load_seconds, self.busy)
            self.version = version

    def play_groups(self, groups: list[SimulatedGroup]) -> Iterator[Any]:
        """Run the engine until every sequence has ended."""
        run = _EngineRun(self, groups)
        while run.is_open:
            yield from self._advance_run(run)

    def _advance_run(self, run: _EngineRun) -> Iterator[Any]:
        """Advance to the next event of a run."""
        world, rates = self.world, self.world.rates
        if self._wakeup.triggered:
            self._wakeup = self._create_wakeup()
        if self.pending_versions:
            yield from self.load_pending_weights()
            world.num_dropped_rollouts += run.apply_weight_version(
                self.version, drop=world.layout.partial == "drop"
            )
        if self.queued_groups and world.layout.refill and world.layout.max_staleness:
            run.enqueue_groups(self.queued_groups)
        until = run.compute_idle_end(world.env.now)
        if until is not None:
            yield self._sleep_until(world.env.timeout(until - world.env.now))
            return
        joined = run.join_sequences(world.env.now, self.version)
        if joined:
            seconds = rates.join_seconds + joined * rates.turn_seconds
            yield from world.compute_for(seconds, self.busy)
        step = rates.step_seconds + rates.row_seconds * len(run.active)
        seconds = (run.active[0][0] - run.mark) * step
        if run.is_ready and run.waiting_for_tools:
            seconds = min(seconds, max(0.0, run.waiting_for_tools[0][0] - world.env.now))
        worked = yield from self._decode_for(seconds)
        run.mark += worked / step
        for group in run.end_turns(world.env.now):
            world.on_group_finished(group)


class _EngineRun:
    """Sequences of one run: queued, decoded, or waiting for their tools."""

    def __init__(self, worker: SimulatedWorker, groups: list[SimulatedGroup]) -> None:
        layout = worker.world.layout
        self.slots = layout.slots
        self.is_ready = layout.max_staleness > 0 or layout.rejoin == "ready"
        self.queued_sequences = deque(sequence for group in groups for sequence in group.sequences)
        # Heaps, by the mark at which the turn ends and by the time at which the tool answers.
        self.active: list[tuple[float, int, SimulatedSequence]] = []
        self.waiting_for_tools: list[tuple[float, int, SimulatedSequence]] = []
        self.mark = 0.0  # tokens of a sequence decoded since the start of the run
        self._ties = worker._ties

    @property
    def is_open(self) -> bool:
        """True if a sequence has not ended."""
        return bool(self.queued_sequences or self.active or self.waiting_for_tools)

    @property
    def _num_free_slots(self) -> int:
        return self.slots - len(self.active) - len(self.waiting_for_tools)

    def enqueue_groups(self, groups: deque[SimulatedGroup]) -> None:
        """Take all groups of the worker, as `AsyncRolloutWorker` takes as many as the trainer dispatches."""
        while groups:
            self.queued_sequences += groups.popleft().sequences

    def compute_idle_end(self, now: float) -> float | None:
        """Return the time until which nothing can be decoded; None if something can."""
        if self.active or (self.queued_sequences and self._num_free_slots):
            return None
        until = self.waiting_for_tools[0][0]
        if not self.is_ready:
            until = max(answered_at for answered_at, _, _ in self.waiting_for_tools)
        return until if until > now + _TINY else None

    def join_sequences(self, now: float, version: int) -> int:
        """Start queued sequences in free slots, resume those whose tools have answered; return their number."""
        joined = 0
        if self.queued_sequences:
            for _ in range(min(len(self.queued_sequences), self._num_free_slots)):
                sequence = self.queued_sequences.popleft()
                sequence.version_starts = [(0.0, version)]
                self._start_decoding(sequence)
                joined += 1
        if self.is_ready or not self.active:
            while self.waiting_for_tools and self.waiting_for_tools[0][0] <= now + _TINY:
                self._start_decoding(heapq.heappop(self.waiting_for_tools)[2])
                joined += 1
        return joined

    def _start_decoding(self, sequence: SimulatedSequence) -> None:
        sequence.mark = self.mark
        heapq.heappush(
            self.active, (self.mark + sequence.tokens[sequence.turn], next(self._ties), sequence)
        )

    def end_turns(self, now: float) -> Iterator[SimulatedGroup]:
        """End the turns at this mark; yield the groups that end with them."""
        active, limit = self.active, self.mark + _TINY
        while active and active[0][0] <= limit:
            sequence = heapq.heappop(active)[2]
            sequence.before += sequence.tokens[sequence.turn]
            if sequence.turn + 1 < len(sequence.tokens):
                heapq.heappush(
                    self.waiting_for_tools,
                    (now + sequence.tools[sequence.turn], next(self._ties), sequence),
                )
                sequence.turn += 1
                continue
            group = sequence.group
            group.num_unfinished -= 1
            if not group.num_unfinished:
                group.oldest = min(member.version_starts[0][1] for member in group.sequences)
                yield group

    def apply_weight_version(self, version: int, *, drop: bool) -> int:
        """Apply new weights: started sequences continue with them, or restart; return the number of restarts."""
        if drop:
            started = [*self.active, *self.waiting_for_tools]
            self.active, self.waiting_for_tools = [], []
            for _, _, sequence in started:
                sequence.restart_sequence()
                self.queued_sequences.append(sequence)
            return len(started)
        for _, _, sequence in self.active:
            _record_version_start(sequence, sequence.before + self.mark - sequence.mark, version)
        for _, _, sequence in self.waiting_for_tools:
            _record_version_start(sequence, sequence.before, version)
        return 0


def _record_version_start(sequence: SimulatedSequence, sampled: float, version: int) -> None:
    """Record the start of a version, as `rl_core.inference.versioned_run.record_version` does.

    A version that sampled nothing is dropped, unless it is the first.
    """
    starts = sequence.version_starts
    if starts[-1][0] == sampled and (sampled or len(starts) > 1):
        starts.pop()
    starts.append((sampled, version))
