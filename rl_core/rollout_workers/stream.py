"""Asynchronous rollouts: tickets ahead of the trainer, weights behind its back, and nothing older than the bound.

A version of the weights has the number of the iteration that learns with it. A group may be learned from in iteration i
if none of its tokens is older than version i - max_staleness; one that has become too old is played again, and one that
became so twice is waited for.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.environments.failed_episodes import EpisodeFailures
from rl_core.models.trainable_weights import trainable_weights
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.rollout_workers.heartbeats import HUNG_S, SILENT
from rl_core.rollout_workers.live_worker import WorkerProgress
from rl_core.rollout_workers.sampler_probe import ProbeAnswer
from rl_core.rollout_workers.team import _LOOK_S, RolloutTeam, _WorkerSeat
from rl_core.rollout_workers.tickets import FinishedTicket, Ticket, oldest_version, token_versions
from rl_core.rollout_workers.weights import digests
from rl_core.rollouts.collect import settle_failures
from rl_core.settings import SamplingSettings
from rl_core.storage.single_files import append_bytes, truncate_file
from rl_core.timing import span
from rl_core.types import RolloutGroup

__all__ = ["Draw", "RolloutStream"]

logger = logging.getLogger(__name__)

Draw = Callable[[int], Ticket]  # the ticket of a number
PATIENCE = 2  # times that a group may become too old before an iteration waits for it
COLLECT_S = 5.0  # for a worker to wait for something finished, until it answers that there is nothing


@dataclass
class RolloutStream(RolloutTeam):
    """A team whose workers play while the trainer updates. Tickets are drawn in order of their numbers, each once."""

    schedule: Path | None = None  # file of what each iteration learned from, for a replay
    stale_groups: int = 0  # since the beginning: became too old, and were played again
    dropped_rollouts: int = 0  # since the beginning: begun anew because of new weights
    iteration: int = -1
    _is_cut: bool = False  # the schedule of an interrupted run ends before this one's first iteration
    _part: int = -1  # times that this iteration has taken groups before
    _steps: dict[int, int] = field(default_factory=dict)  # optimizer steps behind each version
    _next: int = 0
    _queue: deque[Ticket] = field(default_factory=deque)  # drawn, with no worker
    _playing: dict[int, tuple[Ticket, _WorkerSeat]] = field(default_factory=dict)
    _finished: list[FinishedTicket] = field(default_factory=list)
    _versions: dict[int, tuple[str, list[ProbeAnswer]]] = field(default_factory=dict)
    _players: dict[int, int] = field(default_factory=dict)  # number of a group that was played -> its worker's
    _staleness: dict[str, float] = field(default_factory=dict)

    def take(
        self,
        iteration: int,
        count: int,
        *,
        ahead: int,
        draw: Draw,
        sampling: SamplingSettings,
        failures: EpisodeFailures,
        policy_version: int,
    ) -> list[RolloutGroup]:
        """The next groups to learn from, as many as asked for, in the order in which they were finished.

        Args:
            iteration: that learns from them, with the weights as they are now.
            ahead: groups of an iteration: so many times (max_staleness + 1) are under way or wait, at most.
            draw: makes the ticket of a number, once.
            policy_version: optimizer steps behind the present weights.
        Raises: as `RolloutTeam.play`.
        """
        self._part = self._part + 1 if self.iteration == iteration else 0
        self.iteration = iteration
        self._steps[iteration] = policy_version
        self._publish(iteration, sampling)
        for seat in self._seats:
            seat.losses = 0
        taken: list[FinishedTicket] = []
        wait_s = 0.0
        while len(taken) < count:
            self._draw_ahead(ahead, len(taken), draw)
            self._hand_out(ahead, sampling)
            self._collect(wait_s)
            found = self._ripe(count - len(taken))
            taken += found
            wait_s = 0.0 if found else _LOOK_S
        failed = [episode for finished in taken for episode in finished.failed]
        for finished in taken:
            for rollout in finished.group.rollouts:
                oldest = min(version for _, version in rollout.version_starts)
                rollout.trajectory.policy_version = self._steps.get(oldest, 0)
            self._players.pop(finished.ticket.number, None)
        self._note(taken)
        settle_failures(failed, sum(finished.ticket.group_size for finished in taken), failures)
        return [finished.group for finished in taken]

    # Weights

    def _publish(self, iteration: int, sampling: SamplingSettings) -> None:
        """Send the present weights as the version of this iteration, once; workers take them when they can."""
        if self._update is not None and self._update.number == iteration:
            return
        with span("weight_sync"):
            update = self._next_update(digests(trainable_weights(self.parts.model)), iteration, sampling)
            for number in [number for number in self._versions if number < iteration - 64]:
                del self._versions[number], self._steps[number]
            if not self._seats:
                self._start_all()
                return
            shared = self.cluster.share(update)
            calls = [(seat, self.cluster.call(seat.worker, "send", shared, self._probe)) for seat in self._seats]
            self._ask_own()
            self._await(calls)

    def _ask_own(self) -> None:
        super()._ask_own()
        assert self._update is not None
        self._versions[self._update.number] = (self._update.digest, self._answers)

    @property
    def _bound(self) -> int:
        return self.settings.max_staleness

    def _expected(self, number: int) -> tuple[str, list[ProbeAnswer]]:
        return self._versions[number]

    # Tickets

    def _draw_ahead(self, ahead: int, taken: int, draw: Draw) -> None:
        """Draw tickets up to the bound: back-pressure in one direction; `_ripe` waits in the other."""
        while len(self._queue) + len(self._playing) + len(self._finished) + taken < ahead * (self._bound + 1):
            self._queue.append(draw(self._next))
            self._next += 1

    def _hand_out(self, ahead: int, sampling: SamplingSettings) -> None:
        """Give tickets to the workers, evenly; a slow one keeps those that it has, and gets no more.

        A group that became too old goes to another worker than the one that was too slow for it, where there is room;
        one that an iteration will wait for does so beyond the even share.
        """
        most = math.ceil(ahead * (self._bound + 1) / len(self._seats))
        loads = {seat.number: 0 for seat in self._seats}
        for _, seat in self._playing.values():
            loads[seat.number] += 1
        given: dict[int, list[Ticket]] = {seat.number: [] for seat in self._seats}
        while self._queue:
            ticket = self._queue[0]
            slow = self._players.get(ticket.number) if ticket.plays and len(loads) > 1 else None
            room = [number for number, load in loads.items() if load < most]
            others = [number for number in (loads if ticket.plays >= PATIENCE else room) if number != slow]
            if not (others or room):
                break
            number = min(others or room, key=lambda number: (loads[number], number))
            given[number].append(self._queue.popleft())
            loads[number] += 1
        calls = []
        for seat in self._seats:
            if tickets := given[seat.number]:
                self._playing |= {ticket.number: (ticket, seat) for ticket in tickets}
                call = self.cluster.call(seat.worker, "begin", tickets, sampling, most, self.settings.partial)
                calls.append((seat, call))
        self._await(calls)

    def _collect(self, wait_s: float) -> None:
        """Take everything that workers have finished, waiting so long for the first of it.

        Each worker has one call that waits for it, also while the trainer updates: a finished group is told at once,
        and nothing is asked for in vain.
        """
        for seat in self._seats:
            if seat.collecting is None:
                seat.collecting = self.cluster.call_beside(seat.worker, "collect", COLLECT_S)
        waiting = {seat.collecting: seat for seat in self._seats}
        while waiting and (ended := self.cluster.wait(list(waiting), wait_s)):
            wait_s = 0.0
            for call in ended:
                seat = waiting.pop(call)
                seat.collecting = None
                try:
                    self._receive(seat, self._value(call))
                except WorkerLost as lost:
                    self._lose(seat, str(lost))
        for number in self._heartbeats.silent((seat.number, seat.worker) for seat in self._seats):
            self._lose(self._seats[number], SILENT)

    def _receive(self, seat: _WorkerSeat, progress: WorkerProgress) -> None:
        """Verify the weights that a worker has played with, and take its groups."""
        for report in progress.transfers:
            self._verify(seat, report)
        self.dropped_rollouts += progress.dropped
        for finished in progress.finished:
            if self._playing.pop(finished.ticket.number, None) is not None:  # never twice
                self._players[finished.ticket.number] = seat.number
                self._finished.append(finished)

    def _ripe(self, count: int) -> list[FinishedTicket]:
        """Finished groups that are young enough, at most so many; too old ones are queued again."""
        fresh: list[FinishedTicket] = []
        for finished in self._finished:
            if oldest_version(finished.group.rollouts, self.iteration) >= self.iteration - self._bound:
                fresh.append(finished)
                continue
            self.stale_groups += 1
            ticket = finished.ticket
            again = Ticket(
                ticket.number, ticket.request, ticket.group_size, ticket.temperature, ticket.seed, ticket.plays + 1
            )
            self._queue.appendleft(again)
        awaited = [
            ticket for ticket in [*self._queue, *(t for t, _ in self._playing.values())] if ticket.plays >= PATIENCE
        ]
        if awaited:
            self._finished = fresh
            return []
        fresh.sort(key=lambda finished: -finished.ticket.plays)
        self._finished = fresh[count:]
        return fresh[:count]

    # Workers

    def _await(self, calls: Sequence[tuple[_WorkerSeat, Any]]) -> None:
        """Wait for calls of methods that return at once (the playing has a thread of its own); replace lost workers."""
        end = time.monotonic() + HUNG_S
        for seat, call in calls:
            try:
                while not self.cluster.wait([call], _LOOK_S):
                    if time.monotonic() > end:
                        raise WorkerLost(SILENT)
                self._value(call)
            except WorkerLost as lost:
                self._lose(seat, str(lost))

    def _lose(self, seat: _WorkerSeat, how: str) -> None:
        """Queue again what a lost worker played, and put another into its place."""
        mine = sorted(number for number, (_, other) in self._playing.items() if other is seat)
        for number in reversed(mine):
            self._queue.appendleft(self._playing.pop(number)[0])
        self.replayed_groups += len(mine)
        self._replace(seat, how, f"{len(mine)} groups are played again")

    def _note(self, taken: list[FinishedTicket]) -> None:
        """Staleness of what is learned from, and its line in the schedule."""
        ages = [
            self.iteration - version
            for finished in taken for rollout in finished.group.rollouts for version in token_versions(rollout)
        ]  # fmt: skip
        self._staleness = {
            "policy/staleness_mean": sum(ages) / max(1, len(ages)), "policy/staleness_max": float(max(ages, default=0)),
        }  # fmt: skip
        if self.schedule is None:
            return
        groups = [
            {
                **finished.ticket.to_json(),
                "rollouts": {r.trajectory.sample: r.version_starts for r in finished.group.rollouts},
            }
            for finished in taken
        ]
        if not self._is_cut:
            _cut_schedule(self.schedule, self.iteration)
            self._is_cut = True
        line = json.dumps({"iteration": self.iteration, "part": self._part, "groups": groups})
        append_bytes(self.schedule, line.encode() + b"\n", synced=True)  # before the checkpoint that follows

    def metrics(self) -> dict[str, float]:
        """Those of every team, the age of what was learned from, and the state of the queue."""
        return super().metrics() | self._staleness | {
            "perf/stale_groups": float(self.stale_groups),
            "perf/dropped_rollouts": float(self.dropped_rollouts),
            "perf/queued_groups": float(len(self._queue) + len(self._playing) + len(self._finished)),
        }  # fmt: skip

    def close(self) -> None:
        """As of every team; what was under way is queued again."""
        self._queue = deque(self._open())
        self._playing, self._finished, self._versions = {}, [], {}
        super().close()

    # Checkpoint

    def _open(self) -> list[Ticket]:
        """Tickets that were drawn and not learned from, by their numbers."""
        tickets = [*self._queue, *(ticket for ticket, _ in self._playing.values())]
        return sorted([*tickets, *(finished.ticket for finished in self._finished)], key=lambda ticket: ticket.number)

    def state_dict(self) -> dict[str, Any]:
        """Tickets that were drawn and not learned from: a resumed run plays each of them."""
        return {"next": self._next, "open": [ticket.to_json() for ticket in self._open()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; workers are started anew."""
        self._next = int(state["next"])
        self._queue = deque(Ticket.from_json(row) for row in state["open"])
        self._playing, self._finished = {}, []


def _cut_schedule(path: Path, iteration: int) -> None:
    """Cut what an interrupted run noted from this iteration on, and a last line that its end tore."""
    if not path.is_file():
        return
    place = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _iteration_of(line) >= iteration:
                break
            place += len(line)
    truncate_file(path, place)


def _iteration_of(line: bytes) -> float:
    """Iteration of a schedule's line; of a damaged one before all: it stays, and `read_schedule` names it."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return -math.inf
