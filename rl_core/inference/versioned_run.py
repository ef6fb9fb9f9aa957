"""Runs of the rollout engine in which the weights change: each sequence notes from which token on it had which version.

A sequence's numbers follow from its prompt, its random numbers and these notes alone (where decoding is compiled code),
so a run that was played while a trainer changed the weights is played again by `ReplayRun`, whatever ran beside it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol, cast

from rl_core.inference.engine import Engine
from rl_core.inference.engine_run import EngineRun
from rl_core.inference.sampling import RolloutSequence
from rl_core.inference.slot_table import STEPS
from rl_core.settings import SamplingSettings

__all__ = ["LiveRun", "ReplayRun", "VersionStarts", "VersionedSequence", "note_version"]

# (sampled tokens before it, version): the first one is of the prompt's keys and values, too
VersionStarts = list[tuple[int, int]]


class VersionedSequence(RolloutSequence, Protocol):
    """A sequence that knows the versions it was sampled with."""

    version_starts: VersionStarts


def note_version(starts: VersionStarts, sampled: int, version: int) -> None:
    """Note that a sequence of so many sampled tokens goes on under this version.

    A version under which nothing was computed is forgotten: two changes between the same two tokens are one.
    """
    if starts and starts[-1][0] == sampled and (sampled or len(starts) > 1):
        starts.pop()
    starts.append((sampled, version))


class _VersionedRun(EngineRun):
    """Weights may be exchanged between two steps; the cache, and the tokens in it, stay."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        capacity: int | None = None,
    ) -> None:
        self._engine, self._stack = engine, ExitStack()
        decoder = self._stack.enter_context(engine.bound())
        # which finished steps rejoin when changes no number here, so none waits for another
        own = dataclasses.replace(sampling, rejoin="ready")
        super().__init__(decoder, sequences, own, **engine.run_options(), capacity=capacity)

    def close(self) -> None:
        """Take adapters out of the weights again."""
        self._stack.close()

    def exchange(self, change: Callable[[], None]) -> None:
        """Have the model's weights changed, and go on with them."""
        self._stack.close()
        change()
        self._stack.enter_context(self._engine.bound())
        self._decoder.reserve(self._slots, self._longest)
        self._prompts.forget()

    def occupied(self) -> Iterator[tuple[int, VersionedSequence]]:
        """Slots with sequences that have begun and not ended."""
        for slot, sequence in enumerate(self._sequences):
            if sequence is not None:
                yield slot, cast(VersionedSequence, sequence)

    def _free(self) -> list[int]:
        return [slot for slot in range(self._slots) if self._sequences[slot] is None]


class LiveRun(_VersionedRun):
    """A run that asks for new weights and sequences between its steps."""

    _tells_ends = True

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        *,
        version: Callable[[], int],
        between: Callable[[LiveRun], None],
        capacity: int | None = None,
    ) -> None:
        """`version`: of the weights now; `between`: called before every step, may `add`, `exchange` and `drop`.

        `capacity`: sequences that may be in the run at once; None = none is added.
        """
        self._version, self._between = version, between
        super().__init__(engine, sequences, sampling, capacity)

    def fits(self, sequence: VersionedSequence) -> bool:
        """True = the run's cache has slots of this sequence's length."""
        return self._limit_of(sequence) <= self._longest

    def add(self, sequence: VersionedSequence) -> None:
        """Queue one more sequence, which `fits`."""
        self._limits[id(sequence)] = self._limit_of(sequence)
        self._prompts.expect(sequence)
        self._queue.append(sequence)

    def play(self) -> None:
        """Run every sequence to its end."""
        while True:
            self._between(self)
            self._begin(self._free()[: len(self._queue)])
            self._compact(self._rejoin())
            if self._count:
                self._step()
            elif not self._waiting_on_env and not self._queue:
                return

    def exchange(self, change: Callable[[], None]) -> None:
        """As in any run; sequences that have begun note the new version."""
        super().exchange(change)
        for slot, sequence in self.occupied():
            note_version(sequence.version_starts, int(self._sampled[slot]), self._version())

    def drop(self, again: Callable[[VersionedSequence], VersionedSequence | None]) -> int:
        """Take out every sequence that has begun, and queue another in its place, if any; returns their number."""
        dropped = list(self.occupied())
        for slot, sequence in dropped:
            if slot in self._waiting_on_env:  # its environment is in the middle of a step
                self._waiting_on_env.pop(slot).call.wait()
            self._sequences[slot] = None
            self._to_append.pop(slot, None)
            if (another := again(sequence)) is None:
                continue
            self._limits[id(another)] = self._limits[id(sequence)]
            self._prompts.expect(another)
            self._queue.append(another)
        return len(dropped)

    def _begin(self, slots: list[int]) -> None:
        for sequence in list(self._queue)[: len(slots)]:
            cast(VersionedSequence, sequence).version_starts[:] = [(0, self._version())]
        super()._begin(slots)


class ReplayRun(_VersionedRun):
    """Plays sequences whose version starts are given, version after version."""

    def __init__(
        self,
        engine: Engine,
        sequences: Sequence[VersionedSequence],
        sampling: SamplingSettings,
        load: Callable[[int], None],
    ) -> None:
        """`load`: puts the weights of a version into the model."""
        ordered = sorted(sequences, key=lambda sequence: sequence.version_starts[0][1])
        self._load = load
        self._order = deque(sorted({version for s in sequences for _, version in s.version_starts}))
        self._current = self._order.popleft()
        load(self._current)
        super().__init__(engine, ordered, sampling)

    def play(self) -> None:
        """Run every sequence to its end."""
        while True:
            self._begin(self._free())
            self._compact(self._rejoin())
            if self._count:
                self._step()
            elif self._order:
                self._current = self._order.popleft()
                self.exchange(lambda: self._load(self._current))
            elif not self._num_ready():
                return

    def _begin(self, slots: list[int]) -> None:
        super()._begin(slots[: self._num_ready()])

    def _num_ready(self) -> int:
        """Sequences at the head of the queue that begin under the present version."""
        queued = (cast(VersionedSequence, sequence).version_starts[0][1] for sequence in self._queue)
        return sum(first <= self._current for first in queued)

    def _left(self, slot: int) -> int:
        """Tokens that a slot's sequence samples before it goes on under a later version."""
        sequence = cast(VersionedSequence, self._sequences[slot])
        later = [start for start, version in sequence.version_starts if version > self._current]
        return later[0] - int(self._sampled[slot]) if later else STEPS

    def _decodable(self) -> list[int]:
        active = [
            slot for slot, _ in self.occupied() if slot not in self._waiting_on_env and self._left(slot) > 0
        ]  # fmt: skip
        return active[: self._fit.limit]

    def _steps_at_once(self) -> int:
        at_once = super()._steps_at_once()
        return min([at_once, *(self._left(slot) for slot in range(self._count))]) if at_once else 0
