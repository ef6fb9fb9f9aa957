"""One run of the rollout engine: the host's side of every slot, and the order of its steps.

n active slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from rl_core.cpu.fused_decode import SlotStates
from rl_core.environments.step_pool import NewContext, Observation, PendingTurn, wait_for_any
from rl_core.errors import OutOfMemory
from rl_core.inference.decoder import AppendedTokens, Decoder
from rl_core.inference.prompt_cache import PromptCache, prompt_of
from rl_core.inference.sampling import (
    RolloutSequence,
    check_logprob,
    check_observation,
    penalized,
    uniforms,
)
from rl_core.memory import MemoryFit, first_line, is_out_of_memory, note_out_of_memory
from rl_core.models.routed_adapters import Adapter
from rl_core.settings import SamplingSettings

__all__ = ["EngineRun"]

_STEPS = 8  # tokens of one call of compiled code: a slot is empty so long, at most, before it is refilled


class EngineRun:
    """One call of `Engine.run`: the host's side of every slot.

    Slots 0..n-1 are active, n = `count`; those after them are free or wait: for their environment, or, where memory ran
    out, until active ones have ended. `length` counts a slot's tokens in the cache; the newest token, `pending`, is
    taken in by the next step, together with the slot's `to_append` (an observation's earlier tokens), which come before
    it.
    """

    def __init__(
        self,
        decoder: Decoder,
        sequences: Sequence[RolloutSequence],
        sampling: SamplingSettings,
        is_eos: np.ndarray,
        pad_id: int,
        max_length: int,
        fit: MemoryFit,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`fit`: its limit is the number of slots that memory was seen to allow; found out here, and kept by it.

        `adapters`: those that sequences name by their `adapter`.
        """
        self._decoder, self._sampling, self._is_eos = decoder, sampling, is_eos
        self._fit = fit
        self._queue = deque(sequences)
        self._limits = {id(s): min(len(s.prompt_ids) + sampling.max_completion_tokens, max_length) for s in sequences}
        most = max(self._limits[id(s)] - len(s.prompt_ids) for s in sequences)
        self._slots = self._count = self._reserve(min(sampling.slots, len(sequences)), max(self._limits.values()))
        self._sequences: list[RolloutSequence | None] = [None] * self._slots  # None = a free slot
        self._waiting_on_env: dict[int, PendingTurn] = {}
        self._to_append: dict[int, list[int]] = {}
        self._pending, self._length, self._limit, self._sampled, self._acted = (
            np.zeros(self._slots, dtype=np.int64) for _ in range(5)
        )
        self._rows = np.arange(self._slots)
        self._uniforms = np.zeros((self._slots, most))
        self._tokens = np.zeros((self._slots, most), dtype=np.int64)  # of the current action
        self._logprobs = np.zeros((self._slots, most))
        self._states = SlotStates(
            tokens=self._pending, positions=self._length, limits=self._limit, sampled=self._sampled, acted=self._acted,
            uniforms=self._uniforms, chosen=self._tokens, logprobs=self._logprobs,
        )  # fmt: skip
        # Nothing is to be done between a token and the next of a turn
        self._steps_alone = decoder.samples_steps(sampling) and sampling.repetition_penalty == 1 and not sampling.stop
        self._seen: torch.Tensor | None = None  # bool [slots, V]: tokens of each sequence, where repeating them costs
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(self._slots, decoder.vocab_size, dtype=torch.bool, device=decoder.device)
        self._adapter_of = np.full(self._slots, -1, dtype=np.int64)
        if adapters:
            decoder.adapt(adapters, self._adapter_of)
        self._prompts = PromptCache(decoder, self._queue, pad_id, fit.advice)

    def _reserve(self, slots: int, length: int) -> int:
        """Reserve the cache of as many slots as fit into memory; returns their number."""
        slots = min(slots, self._fit.limit or slots)
        while True:
            try:
                self._decoder.reserve(slots, length)
                return slots
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                slots = self._fewer(slots, first_line(error))

    def _fewer(self, slots: int, problem: str) -> int:
        """Half of the slots, noted as the limit. Raises: OutOfMemory where it is one that did not fit."""
        if slots == 1:
            raise OutOfMemory(
                f"not even one sequence of these rollouts fits into memory ({problem}); {self._fit.advice}"
            )
        self._fit.limit = slots // 2
        note_out_of_memory(self._fit.what, self._fit.limit, "slots")
        return self._fit.limit

    def play(self) -> None:
        """Run every sequence to its end."""
        self._begin(list(range(self._slots)))
        while self._count:
            changed, ended = self._step()
            self._begin(ended[: len(self._queue)])
            if changed or self._waiting_on_env:
                self._compact(self._rejoin())

    # -- beginning, waiting and ending ---------------------------------------------------------------------------------

    def _rejoin(self) -> list[int]:
        """Slots to be active next: those that decode, and those whose environments have answered.

        With 'together' a finished step rejoins only when no other sequence is decodable, so results are bit-identical
        regardless of timing; with 'ready' at once.
        """
        active = self._decodable()
        while self._waiting_on_env and (not active or self._sampling.rejoin == "ready"):
            waiting = sorted(self._waiting_on_env)
            if self._sampling.rejoin == "ready":
                if not active:
                    wait_for_any(self._waiting_on_env.values())
                waiting = [slot for slot in waiting if self._waiting_on_env[slot].done()]
            ended = [slot for slot in waiting if not self._go_on(slot, self._waiting_on_env.pop(slot).result())]
            self._begin(ended[: len(self._queue)])
            active = self._decodable()
            if active:
                break
        return active

    def _decodable(self) -> list[int]:
        """Slots whose sequences have neither ended nor wait for their environment: the first ones that fit."""
        found = [
            slot
            for slot in range(self._slots)
            if self._sequences[slot] is not None and slot not in self._waiting_on_env
        ]
        return found[: self._fit.limit]

    def _begin(self, slots: list[int]) -> None:
        """Start waiting sequences in free slots."""
        if not slots:
            return
        sequences = [self._queue.popleft() for _ in slots]
        prompts = [prompt_of(sequence) for sequence in sequences]
        self._prompts.fill(slots, prompts)
        for slot, sequence, (prompt, adapter) in zip(slots, sequences, prompts, strict=True):
            self._sequences[slot], self._adapter_of[slot] = sequence, adapter
            self._pending[slot], self._length[slot] = prompt[-1], len(prompt) - 1
            self._limit[slot], self._sampled[slot], self._acted[slot] = self._limits[id(sequence)], 0, 0
            room = self._limit[slot] - len(prompt)
            self._uniforms[slot, :room] = uniforms(sequence.seed, room)
            if self._seen is not None:
                self._seen[slot] = False
                self._seen[slot, self._tensor(prompt)] = True

    def _compact(self, active: list[int]) -> None:
        """Make these slots 0..n-1: the last ones move into the holes, and sequences that wait there move out."""
        self._count = len(active)
        holes = sorted(set(range(self._count)) - set(active))
        if not holes:
            return
        outside = [slot for slot in active if slot >= self._count]
        moves = dict(zip(holes, outside, strict=True))  # target -> source
        moves |= {source: hole for hole, source in zip(holes, outside, strict=True) if hole in self._waiting_on_env}
        targets, sources = list(moves), list(moves.values())
        # all sources are read before any target is written, so two slots can change places
        self._decoder.move(self._tensor(sources), self._tensor(targets), int(self._length[sources].max()))
        for array in (self._pending, self._length, self._limit, self._sampled, self._acted, self._adapter_of):
            array[targets] = array[sources]
        for table in (self._uniforms, self._tokens, self._logprobs):
            table[targets] = table[sources]
        if self._seen is not None:
            self._seen[self._tensor(targets)] = self._seen[self._tensor(sources)]
        sequences = {target: self._sequences[source] for target, source in moves.items()}
        for slot in {*targets, *sources}:
            self._sequences[slot] = sequences.get(slot)
        moved_to = {source: target for target, source in moves.items()}
        self._to_append = {moved_to.get(slot, slot): ids for slot, ids in self._to_append.items()}
        self._waiting_on_env = {moved_to.get(slot, slot): turn for slot, turn in self._waiting_on_env.items()}

    # -- one token for every slot --------------------------------------------------------------------------------------

    def _step(self) -> tuple[bool, list[int]]:
        """Sample in every active slot: one token, or several where its turn does not end before; fewer slots where
        memory ends.

        Returns: True = some slots are no longer active (sequences ended, or wait); the slots that ended, in order.
        """
        while True:
            try:
                self._sample_active()
                break
            except Exception as error:  # nothing but the cache was written, and the same will be written there again
                if not is_out_of_memory(error):
                    raise
                self._count = self._fewer(self._count, first_line(error))
        n, rows = self._count, self._rows[: self._count]
        newest, logprobs = self._pending[:n], self._logprobs[rows, self._acted[:n] - 1]
        for slot in np.flatnonzero(~np.isfinite(logprobs)).tolist():
            check_logprob(float(logprobs[slot]), int(self._sampled[slot]) - 1, self._decoder.dtype)
        has_ended = self._is_eos[newest]
        if self._sampling.stop:
            has_ended |= self._stopped(n)
        acted = np.flatnonzero(has_ended | (self._length[:n] + 1 >= self._limit[:n]))
        for slot in acted.tolist():
            self._end_turn(slot, hit_limit=not has_ended[slot])
        ended = [slot for slot in acted.tolist() if self._sequences[slot] is None]
        return bool(ended or any(slot in self._waiting_on_env for slot in acted.tolist())), ended

    def _sample_active(self) -> None:
        """Sample one token in each active slot, or several where nothing has to be appended."""
        n = self._count
        to_append = {slot: ids for slot, ids in self._to_append.items() if slot < n}
        if self._steps_alone and not to_append:
            is_awaited = bool(self._waiting_on_env) and self._sampling.rejoin == "ready"
            self._decoder.sample_steps(self._states, n, self._is_eos, self._sampling, 1 if is_awaited else _STEPS)
        else:
            self._take_one(n, to_append)

    def _take_one(self, n: int, to_append: dict[int, list[int]]) -> None:
        """Sample one token in each of the first n slots, after what is to be appended."""
        appended, extra_tokens, extra_positions = self._appended_tokens(to_append, n)
        tokens, positions = self._pending[:n], self._length[:n].copy()
        for slot, ids in to_append.items():
            positions[slot] += len(ids)
        if appended is not None:
            tokens, positions = np.concatenate([tokens, extra_tokens]), np.concatenate([positions, extra_positions])
        rows, acted = self._rows[:n], self._acted[:n]
        chosen, logprobs = self._sample(tokens, positions, n, appended)  # may raise: the run's state is as it was
        for slot in to_append:
            self._length[slot] += len(self._to_append.pop(slot))
        self._logprobs[rows, acted] = logprobs
        self._pending[:n] = self._tokens[rows, acted] = chosen
        self._length[:n] += 1
        self._sampled[:n] += 1
        acted += 1

    def _stopped(self, n: int) -> np.ndarray:
        """bool [n], True = the slot's newest token completes a stop text."""
        actions = [self._tokens[slot, : self._acted[slot]].tolist() for slot in range(n)]
        sequences = self._sequences[:n]
        return np.array([s is not None and s.should_stop(ids) for s, ids in zip(sequences, actions, strict=True)])

    def _sample(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: AppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The device's part of a step: one upload, one read-back."""
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        if self._decoder.graphs is not None and appended is None and self._seen is None:
            both_2n = self._decoder.sample(tokens, positions, drawn, self._sampling)
            return both_2n[0].astype(np.int64), both_2n[1]
        logits_nV = self._decoder.step(
            self._tensor(tokens), self._tensor(positions), n, int(positions[:n].max()) + 1, appended
        )
        if self._seen is not None:
            logits_nV = penalized(logits_nV, self._seen[:n], self._sampling.repetition_penalty)
        tokens_n, logprobs_n = self._decoder.draw(logits_nV, self._tensor(drawn), self._sampling)
        if self._seen is not None:
            self._seen[self._tensor(self._rows[:n]), tokens_n] = True
        if tokens_n.device.type == "cpu":
            return tokens_n.numpy(), logprobs_n.numpy()
        both_2n = torch.stack([tokens_n.double(), logprobs_n.double()]).cpu().numpy()  # token ids are exact in float64
        return both_2n[0].astype(np.int64), both_2n[1]

    def _end_turn(self, slot: int, hit_limit: bool) -> None:
        """Hand a finished action over; the slot then goes on, is free, or waits for its environment."""
        sequence, count = self._sequences[slot], int(self._acted[slot])
        assert sequence is not None
        turnover = sequence.advance(
            self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist(), hit_limit
        )
        self._acted[slot] = 0
        if isinstance(turnover, PendingTurn):
            self._waiting_on_env[slot] = turnover
        else:
            self._go_on(slot, turnover, hit_limit)

    def _go_on(self, slot: int, observation: Observation, hit_limit: bool = False) -> bool:
        """Append the environment's answer, or begin with it anew; False = the sequence has ended."""
        if observation is None:
            self._sequences[slot] = None
            return False
        sequence = self._sequences[slot]
        room = int(self._limit[slot] - self._length[slot]) - 1
        check_observation(observation, room, self._limits[id(sequence)], hit_limit)
        if isinstance(observation, NewContext):
            ids = observation.ids
            self._to_append[slot] = ids[:-1]
            self._length[slot], self._limit[slot] = 0, observation.limit
            if self._seen is not None:
                self._seen[slot] = False
        else:
            ids = observation
            self._to_append[slot] = [int(self._pending[slot]), *ids[:-1]]
        if not self._to_append[slot]:  # a context of one token
            del self._to_append[slot]
        self._pending[slot] = ids[-1]
        if self._seen is not None:
            self._seen[slot, self._tensor(ids)] = True
        return True

    def _appended_tokens(
        self, to_append: dict[int, list[int]], n: int
    ) -> tuple[AppendedTokens | None, np.ndarray, np.ndarray]:
        """Indices of the observation tokens of this step, and the tokens and positions themselves."""
        if not to_append:
            nothing = np.zeros(0, dtype=np.int64)
            return None, nothing, nothing
        slots = np.array(list(to_append), dtype=np.int64)
        counts = np.array([len(ids) for ids in to_append.values()])
        width = int(counts.max())
        starts = np.cumsum(counts) - counts
        column = np.arange(width)
        inside = column < counts[:, None]
        within = np.minimum(column, counts[:, None] - 1)  # padding repeats a row's last token
        positions_XW = self._length[slots][:, None] + within
        appended = AppendedTokens(
            slots_X=self._tensor(slots),
            slots_E=self._tensor(np.repeat(slots, counts)),
            rows_XW=self._tensor(n + starts[:, None] + within),
            positions_XW=self._tensor(positions_XW),
            places_E=self._tensor(np.flatnonzero(inside)),
            length=int(positions_XW.max()) + 1,
        )
        tokens = np.array([token for ids in to_append.values() for token in ids], dtype=np.int64)
        return appended, tokens, positions_XW[inside]

    def _tensor(self, values: np.ndarray | Sequence[int]) -> torch.Tensor:
        """On the device; integers as int64, floats as float64."""
        array = np.asarray(values)
        return torch.from_numpy(array).to(self._decoder.device, non_blocking=True)
