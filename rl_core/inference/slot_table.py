"""The table of slots that sequences are decoded in: their state on the host and one step for all of them.

n active slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from rl_core.cpu.fused_decode import DraftTable, SlotStates
from rl_core.environments.step_pool import Observation, PendingTurn, ReplacementContext
from rl_core.errors import OutOfMemory
from rl_core.inference.decoder import Decoder
from rl_core.inference.decoder_layers import HostAppendedTokens
from rl_core.inference.sampling import (
    RolloutSequence,
    check_logprob,
    check_observation,
    draw_uniforms,
)
from rl_core.out_of_memory import (
    MemoryFit,
    format_first_line,
    is_out_of_memory,
    record_out_of_memory,
)

# Most tokens per compiled call: the longest that a slot stays empty before it is refilled.
MAX_COMPILED_STEPS = 8


class SlotTable(ABC):
    """Slots of a decoder's cache and the sequences in them.

    Slots 0..n-1 are active, n = `count`. Later slots are free or waiting: for their environment or, after memory ran
    out, for active sequences to end. `length` counts a slot's tokens in the cache. The next step appends the newest
    token, `pending`, after the slot's `to_append` (an observation's earlier tokens).
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        length: int,
        max_sampled: int,
        is_eos: np.ndarray,
        fit: MemoryFit,
    ) -> None:
        """Reserve as many of the slots as fit into memory.

        Args:
            length: longest sequence in tokens.
            max_sampled: most tokens that one sequence may sample.
            fit: its limit is the number of slots that memory allows; found and stored here.
        """
        self._decoder, self._is_eos, self._fit = decoder, is_eos, fit
        self._slots = self._reserve_slots(slots, length)
        self._count = 0
        self._sequences: list[RolloutSequence | None] = [None] * self._slots  # None = a free slot
        self._waiting_on_env: dict[int, PendingTurn] = {}
        self._to_append: dict[int, list[int]] = {}
        self._pending, self._length, self._limit, self._context, self._sampled, self._acted = (
            np.zeros(self._slots, dtype=np.int64) for _ in range(6)
        )
        self._rows = np.arange(self._slots)
        self._uniforms = np.zeros((self._slots, max_sampled))
        self._tokens = np.zeros((self._slots, max_sampled), dtype=np.int64)  # of the current action
        self._logprobs = np.zeros((self._slots, max_sampled))
        self._temperatures = np.ones(self._slots, dtype=np.float32)
        self._states = SlotStates(
            tokens=self._pending,
            positions=self._length,
            limits=self._limit,
            sampled=self._sampled,
            acted=self._acted,
            uniforms=self._uniforms,
            chosen=self._tokens,
            logprobs=self._logprobs,
            temperatures=self._temperatures,
        )
        self._drafts: DraftTable | None = None
        # bool [slots, V]: tokens of each sequence, for the repetition penalty
        self._seen: torch.Tensor | None = None

    @abstractmethod
    def _count_compiled_steps(self) -> int:
        """Return how many tokens one compiled call may sample; 0 = something has to happen between two tokens."""

    @abstractmethod
    def _sample_tokens(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: HostAppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the device's part of a step; return tokens int64 [n] and their log-probabilities [n].

        Args:
            tokens, positions: int64 [n], newest tokens of the active slots.
        """

    def _compute_logits(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: HostAppendedTokens | None
    ) -> torch.Tensor:
        """Return the logits [n, V] that follow the newest tokens; arguments as of `_sample_tokens`."""
        on_device = None
        if appended is not None:
            on_device = appended.move_to_device(n, self._to_tensor)
            tokens = np.concatenate([tokens, appended.real_tokens])
            positions = np.concatenate([positions, appended.real_positions])
        return self._decoder.step(
            self._to_tensor(tokens),
            self._to_tensor(positions),
            n,
            int(positions[:n].max()) + 1,
            on_device,
        )

    @abstractmethod
    def _find_stopped(self, n: int) -> np.ndarray | None:
        """Return bool [n], True = the slot's newest token completes a stop text; None if there are no stop texts."""

    def _refuse_logprob(self, slot: int, logprob: float) -> None:
        """Raise NonFiniteTensor for a slot's newest log-probability."""
        check_logprob(logprob, int(self._sampled[slot]) - 1, self._decoder.dtype)

    def _reserve_slots(self, slots: int, length: int) -> int:
        """Reserve the cache for as many slots as fit into memory; return their number."""
        slots = min(slots, self._fit.limit or slots)
        while True:
            try:
                self._decoder.reserve_cache(slots, length)
                return slots
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                slots = self._halve_slots(slots, format_first_line(error))

    def _halve_slots(self, slots: int, problem: str) -> int:
        """Return half of the slots and store it as the limit.

        Raises: OutOfMemory if a single slot did not fit.
        """
        if slots == 1:
            raise OutOfMemory(
                f"not even one sequence of these rollouts fits into memory ({problem}); {self._fit.advice}"
            )
        self._fit.limit = slots // 2
        record_out_of_memory(self._fit.subject, self._fit.limit, "slots")
        return self._fit.limit

    def _list_decodable_slots(self) -> list[int]:
        """List slots whose sequences have not ended and do not wait for their environment, up to the memory limit."""
        decodable = [
            slot
            for slot in range(self._slots)
            if self._sequences[slot] is not None and slot not in self._waiting_on_env
        ]
        return decodable[: self._fit.limit]

    def _put_sequence(
        self,
        slot: int,
        sequence: RolloutSequence,
        limit: int,
        temperature: float,
        num_used_uniforms: int = 0,
    ) -> None:
        """Put a sequence into a slot whose cache holds all of its prompt but the last token.

        Args:
            num_used_uniforms: random numbers of its seed that are used up.
        """
        prompt = sequence.prompt_ids
        self._sequences[slot] = sequence
        self._pending[slot], self._length[slot] = prompt[-1], len(prompt) - 1
        self._limit[slot] = self._context[slot] = limit
        self._sampled[slot] = self._acted[slot] = 0
        self._temperatures[slot] = temperature
        room = limit - len(prompt)
        self._uniforms[slot, :room] = draw_uniforms(sequence.seed, room, num_used_uniforms)
        if self._drafts is not None:
            self._drafts.read_text(slot, prompt)

    def _compact_slots(self, active: list[int]) -> None:
        """Make these slots 0..n-1: active ones move into holes, and waiting sequences there move out."""
        self._count = len(active)
        holes = sorted(set(range(self._count)) - set(active))
        if not holes:
            return
        outside = [slot for slot in active if slot >= self._count]
        moves = dict(zip(holes, outside, strict=True))  # target -> source
        moves |= {
            source: hole
            for hole, source in zip(holes, outside, strict=True)
            if self._sequences[hole]
        }
        targets, sources = list(moves), list(moves.values())
        # move_slots reads all sources before it writes any target, so two slots can be swapped
        self._decoder.move_slots(
            self._to_tensor(sources), self._to_tensor(targets), int(self._length[sources].max())
        )
        for array in self._list_slot_arrays():
            array[targets] = array[sources]
        if self._seen is not None:
            self._seen[self._to_tensor(targets)] = self._seen[self._to_tensor(sources)]
        sequences = {target: self._sequences[source] for target, source in moves.items()}
        for slot in {*targets, *sources}:
            self._sequences[slot] = sequences.get(slot)
        moved_to = {source: target for target, source in moves.items()}
        self._to_append = {moved_to.get(slot, slot): ids for slot, ids in self._to_append.items()}
        self._waiting_on_env = {
            moved_to.get(slot, slot): turn for slot, turn in self._waiting_on_env.items()
        }

    def _list_slot_arrays(self) -> tuple[np.ndarray, ...]:
        """List every array whose first axis is the slots."""
        return (
            *(() if self._drafts is None else (self._drafts.read,)),
            self._pending,
            self._length,
            self._limit,
            self._context,
            self._sampled,
            self._acted,
            self._temperatures,
            self._uniforms,
            self._tokens,
            self._logprobs,
        )

    def _step_slots(self) -> tuple[bool, list[int]]:
        """Sample in every active slot: one token, or several if its turn does not end earlier; use fewer slots if
        memory runs out.

        Returns: whether some slots are no longer active (ended or waiting); the slots that ended, in order.
        """
        while True:
            try:
                self._sample_active_slots()
                break
            except (
                Exception
            ) as error:  # only the cache was written, and the retry writes the same values
                if not is_out_of_memory(error):
                    raise
                self._count = self._halve_slots(self._count, format_first_line(error))
        n, rows = self._count, self._rows[: self._count]
        newest, logprobs = self._pending[:n], self._logprobs[rows, self._acted[:n] - 1]
        has_sampled = self._acted[:n] > 0  # False where a prompt is read piece by piece
        is_broken = has_sampled & ~np.isfinite(logprobs)
        for slot in np.flatnonzero(is_broken).tolist():
            self._refuse_logprob(slot, float(logprobs[slot]))
        has_ended = self._is_eos[newest] | is_broken
        stopped = self._find_stopped(n)
        if stopped is not None:
            has_ended |= stopped
        acted = np.flatnonzero(
            has_sampled & (has_ended | (self._length[:n] + 1 >= self._limit[:n]))
        )
        for slot in acted.tolist():
            self._end_turn(slot, hit_limit=not has_ended[slot])
        ended = [slot for slot in acted.tolist() if self._sequences[slot] is None]
        return bool(ended or any(slot in self._waiting_on_env for slot in acted.tolist())), ended

    def _sample_active_slots(self) -> None:
        """Sample one token in each active slot, or several if nothing has to be appended."""
        n = self._count
        to_append = {slot: ids for slot, ids in self._to_append.items() if slot < n}
        if not to_append and (steps := self._count_compiled_steps()):
            self._sample_steps(n, steps)
        else:
            self._sample_one_token(n, to_append)

    def _sample_steps(self, n: int, steps: int) -> None:
        """Sample at least `steps` tokens in each of the first n slots with compiled code, each slot until its turn
        ends.
        """
        self._decoder.sample_steps(self._states, n, self._is_eos, steps, self._drafts)

    def _sample_one_token(self, n: int, to_append: dict[int, list[int]]) -> None:
        """Sample one token in each of the first n slots, after appending pending observations."""
        appended = None
        if to_append:
            appended = HostAppendedTokens.from_slots(to_append, self._length)
        tokens, positions = self._pending[:n], self._length[:n].copy()
        for slot, ids in to_append.items():
            positions[slot] += len(ids)
        rows, acted = self._rows[:n], self._acted[:n]
        # may raise; the run's state is still unchanged here
        chosen, logprobs = self._sample_tokens(tokens, positions, n, appended)
        for slot in to_append:
            self._length[slot] += len(self._to_append.pop(slot))
        self._logprobs[rows, acted] = logprobs
        self._pending[:n] = self._tokens[rows, acted] = chosen
        self._length[:n] += 1
        self._sampled[:n] += 1
        acted += 1

    def _end_turn(self, slot: int, hit_limit: bool) -> None:
        """Hand over a finished action; the slot then continues, is free, or waits for its environment."""
        sequence, count = self._sequences[slot], int(self._acted[slot])
        assert sequence is not None
        outcome = sequence.take_action(
            self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist(), hit_limit
        )
        self._acted[slot] = 0
        if isinstance(outcome, PendingTurn):
            self._waiting_on_env[slot] = outcome
        else:
            self._append_observation(slot, outcome, hit_limit)

    def _append_observation(
        self, slot: int, observation: Observation, hit_limit: bool = False
    ) -> bool:
        """Append the environment's answer or start a new context with it; return False if the sequence has ended."""
        sequence = self._sequences[slot]
        if observation is None or sequence is None:
            self._sequences[slot] = None
            return False
        room, context = int(self._limit[slot] - self._length[slot]) - 1, int(self._context[slot])
        draws = context - len(sequence.prompt_ids) - int(self._sampled[slot])
        check_observation(observation, room, context, hit_limit, draws)
        if isinstance(observation, ReplacementContext):
            ids = observation.ids
            self._to_append[slot] = ids[:-1]
            self._length[slot], self._limit[slot] = 0, observation.limit
            if self._seen is not None:
                self._seen[slot] = False
            text = ids
        else:
            ids = observation
            text = [int(self._pending[slot]), *ids]
            self._to_append[slot] = text[:-1]
        if self._drafts is not None:
            self._drafts.read_text(slot, text)
        if not self._to_append[slot]:  # a context of one token
            del self._to_append[slot]
        self._pending[slot] = ids[-1]
        if self._seen is not None:
            self._seen[slot, self._to_tensor(ids)] = True
        return True

    def _to_tensor(self, values: np.ndarray | Sequence[int]) -> torch.Tensor:
        """Copy values to the device; integers as int64, floats as float64."""
        array = np.asarray(values)
        return torch.from_numpy(array).to(self._decoder.device, non_blocking=True)
