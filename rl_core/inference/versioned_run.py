"""Rollout engine runs in which the weights change; each sequence records which version sampled which tokens.

With compiled decoding, a sequence's numbers depend only on its prompt, its random numbers and these version starts. A
run whose weights were changed by a trainer can therefore be repeated by `ReplayEngineRun`, regardless of the
sequences that ran with it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol, cast

from rl_core.inference.engine import Engine, EngineRun
from rl_core.inference.sampling import RolloutSequence
from rl_core.inference.slot_table import MAX_COMPILED_STEPS
from rl_core.settings import SamplingSettings

# (sampled tokens before it, version); the first one also computed the prompt's keys and values
VersionStarts = list[tuple[int, int]]


class VersionedSequence(RolloutSequence, Protocol):
    """A sequence that records the versions it was sampled with."""

    version_starts: VersionStarts


def record_version(starts: VersionStarts, sampled: int, version: int) -> None:
    """Record that a sequence continues under this version after `sampled` tokens.

    A version under which nothing was computed is removed: two changes between the same two tokens count as one.
    """
    if starts and starts[-1][0] == sampled and (sampled or len(starts) > 1):
        starts.pop()
    starts.append((sampled, version))


class _VersionedRun(EngineRun):
    """A run whose weights may be exchanged between two steps; the cache and the tokens in it stay."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        capacity: int | None = None,
    ) -> None:
        self._engine, self._stack = engine, ExitStack()
        decoder = self._stack.enter_context(engine.bind_decoder())
        # the order in which finished steps rejoin does not affect a sequence's numbers here, so none waits
        run_sampling = dataclasses.replace(sampling, rejoin="ready")
        super().__init__(
            decoder, sequences, run_sampling, **engine.build_run_options(), capacity=capacity
        )

    def close(self) -> None:
        """Unmerge the adapters from the weights."""
        self._stack.close()

    def exchange_weights(self, change_weights: Callable[[], None]) -> None:
        """Change the model's weights by `change_weights` and continue with them."""
        self._stack.close()
        change_weights()
        self._stack.enter_context(self._engine.bind_decoder())
        self._decoder.reserve_cache(self._slots, self._longest)
        self._prompts.clear_prefilled()

    def iter_occupied_slots(self) -> Iterator[tuple[int, VersionedSequence]]:
        """Yield the slots of sequences that have begun and not ended."""
        for slot, sequence in enumerate(self._sequences):
            if sequence is not None:
                yield slot, cast(VersionedSequence, sequence)

    def _list_free_slots(self) -> list[int]:
        return [slot for slot in range(self._slots) if self._sequences[slot] is None]


class StreamingEngineRun(_VersionedRun):
    """A run that can get new weights and sequences between its steps."""

    _reports_ends_early = True

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        *,
        version: Callable[[], int],
        between_steps: Callable[[StreamingEngineRun], None],
        capacity: int | None = None,
    ) -> None:
        """Create the run.

        Args:
            version: returns the current version of the weights.
            between_steps: called before every step; may call `add_sequence`, `exchange_weights` and
                `restart_sequences`.
            capacity: largest number of sequences in the run at the same time; None = no sequence is added.
        """
        self._version, self._between_steps = version, between_steps
        super().__init__(engine, sequences, sampling, capacity)

    def can_fit(self, sequence: VersionedSequence) -> bool:
        """Return whether the run's slots are long enough for this sequence."""
        return self._compute_limit(sequence) <= self._longest

    def add_sequence(self, sequence: VersionedSequence) -> None:
        """Queue one more sequence, for which `can_fit` holds."""
        self._limits[id(sequence)] = self._compute_limit(sequence)
        self._prompts.register_sequence(sequence)
        self._queue.append(sequence)

    def play_sequences(self) -> None:
        """Run every sequence to its end."""
        while True:
            self._between_steps(self)
            self._start_sequences(self._list_free_slots()[: len(self._queue)])
            self._compact_slots(self._resume_finished_steps())
            if self._count:
                self._step_slots()
            elif not self._waiting_on_env and not self._queue:
                return

    def exchange_weights(self, change_weights: Callable[[], None]) -> None:
        """Exchange the weights; running sequences record the new version."""
        super().exchange_weights(change_weights)
        for slot, sequence in self.iter_occupied_slots():
            record_version(sequence.version_starts, int(self._sampled[slot]), self._version())

    def restart_sequences(
        self, build_replacement: Callable[[VersionedSequence], VersionedSequence | None]
    ) -> int:
        """Remove every sequence that has begun and queue its replacement, if any; return how many were removed."""
        dropped = list(self.iter_occupied_slots())
        for slot, sequence in dropped:
            if slot in self._waiting_on_env:  # its environment is still stepping
                self._waiting_on_env.pop(slot).call.wait_until_done()
            self._sequences[slot] = None
            self._to_append.pop(slot, None)
            replacement = build_replacement(sequence)
            if replacement is None:
                continue
            self._limits[id(replacement)] = self._limits[id(sequence)]
            self._prompts.register_sequence(replacement)
            self._queue.append(replacement)
        return len(dropped)

    def _start_sequences(self, slots: list[int]) -> None:
        for sequence in list(self._queue)[: len(slots)]:
            cast(VersionedSequence, sequence).version_starts[:] = [(0, self._version())]
        super()._start_sequences(slots)


class ReplayEngineRun(_VersionedRun):
    """A run that repeats sequences with known version starts, version by version."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        load: Callable[[int], None],
    ) -> None:
        """Load the first version.

        Args:
            load: loads a version's weights into the model.
        """
        ordered = sorted(sequences, key=lambda sequence: sequence.version_starts[0][1])
        self._load = load
        self._order = deque(sorted({version for s in sequences for _, version in s.version_starts}))
        self._current = self._order.popleft()
        load(self._current)
        super().__init__(engine, ordered, sampling)

    def play_sequences(self) -> None:
        """Run every sequence to its end."""
        while True:
            self._start_sequences(self._list_free_slots())
            self._compact_slots(self._resume_finished_steps())
            if self._count:
                self._step_slots()
            elif self._order:
                self._current = self._order.popleft()
                self.exchange_weights(lambda: self._load(self._current))
            elif not self._count_ready_sequences():
                return

    def _start_sequences(self, slots: list[int]) -> None:
        super()._start_sequences(slots[: self._count_ready_sequences()])

    def _count_ready_sequences(self) -> int:
        """Count the sequences at the head of the queue that begin under the current version."""
        queued = (
            cast(VersionedSequence, sequence).version_starts[0][1] for sequence in self._queue
        )
        return sum(first <= self._current for first in queued)

    def _count_remaining_tokens(self, slot: int) -> int:
        """Count the tokens that a slot's sequence samples before its next version."""
        sequence = cast(VersionedSequence, self._sequences[slot])
        later = [start for start, version in sequence.version_starts if version > self._current]
        return later[0] - int(self._sampled[slot]) if later else MAX_COMPILED_STEPS

    def _list_decodable_slots(self) -> list[int]:
        active = [
            slot
            for slot, _ in self.iter_occupied_slots()
            if slot not in self._waiting_on_env and self._count_remaining_tokens(slot) > 0
        ]
        return active[: self._fit.limit]

    def _count_compiled_steps(self) -> int:
        steps = super()._count_compiled_steps()
        if not steps:
            return 0
        return min([steps, *(self._count_remaining_tokens(slot) for slot in range(self._count))])
