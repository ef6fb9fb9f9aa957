"""A rollout worker that plays on a thread of its own while tickets and weights arrive."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, cast

import torch

from rl_core.environments.step_pool import StepPool
from rl_core.errors import PosttrainError, WorkerFailed
from rl_core.inference.engine import Engine
from rl_core.inference.versioned_run import LiveRun, VersionedSequence
from rl_core.rollout_workers.sampler_probe import Probe
from rl_core.rollout_workers.tickets import FinishedTicket, Ticket, TicketGroup, VersionedEpisode
from rl_core.rollout_workers.weights import PackedTensor, WeightUpdate
from rl_core.rollout_workers.worker import RolloutWorker, TransferReport, WorkerSpec
from rl_core.settings import SamplingSettings

__all__ = ["WorkerProgress", "LiveWorker"]


@dataclass(slots=True)
class WorkerProgress:
    """Work of a worker since it was asked last."""

    finished: list[FinishedTicket] = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    dropped: int = 0  # rollouts begun anew because of new weights


class _RunEnded(Exception):
    """The worker is to stop in the middle of a run."""


class LiveWorker(RolloutWorker):
    """Plays the tickets that it has, in order; weights that arrive are taken between two steps of the engine."""

    def __init__(self, spec: WorkerSpec, base: Mapping[str, PackedTensor]) -> None:
        super().__init__(spec, base)
        if not isinstance(self.backend, Engine):
            raise WorkerFailed(
                "rollouts.max_staleness: weights change in the middle of a rollout, which the rollout engine does, and "
                "transformers' own forward pass, which samples from this model, does not; set 0"
            )
        self.engine: Engine = self.backend
        self._asked = threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self._updates: deque[tuple[WeightUpdate, Probe]] = deque()
        self._done = WorkerProgress()
        self._error: PosttrainError | None = None
        self._thread: threading.Thread | None = None
        self._is_ended = False
        self._sampling, self._at_once = SamplingSettings(), 1
        self._too_long: list[TicketGroup] = []  # begun, for the next run: the cache of the last one was too short
        self._partial: Literal["keep", "drop"] = "keep"

    # Called by the trainer, on any thread

    def begin(
        self, tickets: Sequence[Ticket], sampling: SamplingSettings, at_once: int, partial: Literal["keep", "drop"]
    ) -> None:
        """Queue tickets, of which so many are played at once: the next one begins when another has ended."""
        with self._asked:
            self._tickets += tickets
            self._sampling, self._at_once, self._partial = sampling, at_once, partial
            self._asked.notify_all()
        if self._thread is None:
            # the engine that plays probes while the other one is in the middle of a run
            self.backend = Engine(
                self.model, eos_ids=self.spec.eos_ids, pad_id=self.spec.pad_id, max_length=self.spec.max_length
            )
            self.backend.keep_apart()
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()

    def send(self, update: WeightUpdate, probe: Probe) -> None:
        """Queue new weights."""
        with self._asked:
            self._updates.append((update, probe))
            self._asked.notify_all()

    def collect(self, wait_s: float = 0.0) -> WorkerProgress:
        """Everything that was finished since the last call; waits so long for the first of it.

        Raises: the error that ended the playing.
        """
        with self._asked:
            self._asked.wait_for(
                lambda: self._done.finished or self._done.transfers or self._error or self._is_ended, wait_s
            )
            if self._error is not None:
                raise self._error
            done, self._done = self._done, WorkerProgress()
            return done

    def end(self) -> None:
        """Stop playing, and wait for the thread."""
        with self._asked:
            self._is_ended = True
            self._asked.notify_all()
        if self._thread is not None:
            self._thread.join()

    # The playing thread

    def _work(self) -> None:
        try:
            while True:
                with self._asked:
                    self._asked.wait_for(lambda: self._tickets or self._updates or self._is_ended)
                if self._is_ended:
                    return
                self._take_updates(None)
                with self._asked:
                    tickets = [self._tickets.popleft() for _ in range(min(self._at_once, len(self._tickets)))]
                if tickets:
                    self._play_tickets(tickets)
        except _RunEnded:
            return
        except PosttrainError as error:
            self._end(error)
        except Exception as error:
            self._end(WorkerFailed(f"a rollout worker raised {type(error).__name__}: {error}"))

    def _end(self, error: PosttrainError) -> None:
        with self._asked:
            self._error = error
            self._asked.notify_all()

    def _play_tickets(self, tickets: Sequence[Ticket]) -> None:
        torch.set_num_threads(self.spec.threads)
        sampling = self._sampling
        with ExitStack() as stack:
            pool = None
            if self.environment.blocking:
                pool = stack.enter_context(StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s))

            def begin(ticket: Ticket) -> TicketGroup:
                return TicketGroup(ticket, self.environment, self.renderer, sampling, pool, self.engine.max_length)

            groups = [begin(ticket) for ticket in tickets]
            while groups:
                temperature = groups[0].ticket.temperature
                now = [group for group in groups if group.ticket.temperature == temperature]
                groups = [group for group in groups if group.ticket.temperature != temperature]
                self._play_groups(now, sampling, begin)
                groups, self._too_long = [*self._too_long, *groups], []

    def _play_groups(
        self, groups: list[TicketGroup], sampling: SamplingSettings, begin: Callable[[Ticket], TicketGroup]
    ) -> None:
        """One run of the engine, which goes on for as long as there are tickets of this temperature."""
        own = dataclasses.replace(sampling, temperature=groups[0].ticket.temperature)
        waiting = list(groups)
        sequences = [sequence for group in groups for sequence in group.sequences if not sequence.has_failed]
        owner = {id(sequence): group for group in groups for sequence in group.sequences}

        def between(run: LiveRun) -> None:
            if self._is_ended:
                raise _RunEnded
            for group in [group for group in waiting if group.is_over]:
                waiting.remove(group)
                self._hand_over(group.finished())
                for sequence in group.sequences:
                    owner.pop(id(sequence), None)
            if self._updates and self._take_updates(run) and self._partial == "drop":
                dropped = run.drop(again)
                with self._asked:
                    self._done.dropped += dropped
            while len(waiting) < self._at_once and (ticket := self._next_ticket(sampling, own.temperature)) is not None:
                refill(run, begin(ticket))

        def refill(run: LiveRun, group: TicketGroup) -> None:
            fresh = [sequence for sequence in group.sequences if not sequence.has_failed]
            if not all(run.fits(sequence) for sequence in fresh):
                self._too_long.append(group)
                return
            waiting.append(group)
            owner.update((id(sequence), group) for sequence in group.sequences)
            for sequence in fresh:
                run.add(sequence)

        def again(sequence: VersionedSequence) -> VersionedSequence | None:
            group = owner[id(sequence)]
            made = group.again(cast(VersionedEpisode, sequence))
            owner[id(made)] = group
            return None if made.has_failed else made

        if sequences:
            run = LiveRun(
                self.engine, sequences, own, version=lambda: self.version, between=between,
                capacity=self._at_once * groups[0].ticket.group_size,
            )  # fmt: skip
            try:
                run.play()
            finally:
                run.close()
        for group in waiting:
            self._hand_over(group.finished())

    def _next_ticket(self, sampling: SamplingSettings, temperature: float) -> Ticket | None:
        """The next ticket, if a run with these settings may take it."""
        with self._asked:
            if self._too_long or not self._tickets or self._sampling != sampling:
                return None
            return self._tickets.popleft() if self._tickets[0].temperature == temperature else None

    def _hand_over(self, finished: FinishedTicket) -> None:
        with self._asked:
            self._done.finished.append(finished)
            self._asked.notify_all()

    def _take_updates(self, run: LiveRun | None) -> bool:
        """Load all weights that have arrived, in order; True = there were some."""
        reports: list[TransferReport] = []

        def load() -> None:
            while True:
                with self._asked:
                    if not self._updates:
                        return
                    update, probe = self._updates.popleft()
                reports.append(self.load(update, probe))

        load() if run is None else run.exchange(load)
        with self._asked:
            self._done.transfers += reports
            self._asked.notify_all()
        return bool(reports)
