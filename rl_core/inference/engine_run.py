"""One run of the rollout engine over sequences that are known at its beginning.

n active slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from rl_core.environments.step_pool import wait_for_any
from rl_core.inference.appended_tokens import AppendedTokens
from rl_core.inference.decoder import Decoder
from rl_core.inference.prompt_cache import PromptCache, prompt_of
from rl_core.inference.sampling import RolloutSequence, penalized
from rl_core.inference.slot_table import STEPS, SlotTable
from rl_core.memory import MemoryFit
from rl_core.models.routed_adapters import Adapter
from rl_core.settings import SamplingSettings

__all__ = ["EngineRun"]

READY_S = (
    0.002  # of decoding, until a look at the environments that are waited for: so late does a finished step rejoin
)
SPARE_TOKENS = 256  # of the cache of a run to which sequences are added: prompts differ in length


class EngineRun(SlotTable):
    """One call of `Engine.run`: the host's side of every slot."""

    _tells_ends = False  # True = that a sequence has ended is told before others' environments are waited for

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
        capacity: int | None = None,
    ) -> None:
        """`fit`: see `SlotTable`. `adapters`: those that sequences name by their `adapter`.

        `capacity`: sequences that may be in the run at once, later ones among them, and room for slightly longer ones;
        None = nothing is added to those of the beginning.
        """
        self._sampling = sampling
        self._max_length = max_length
        self._queue = deque(sequences)
        self._limits = {id(s): self._limit_of(s) for s in sequences}
        self._longest = max(self._limits.values())
        most = max(self._limits[id(s)] - len(s.prompt_ids) for s in sequences)
        slots = min(sampling.slots, len(sequences))
        if capacity is not None:
            self._longest = min(self._longest + SPARE_TOKENS, max_length)
            most = min(sampling.max_completion_tokens, max_length)
            slots = min(sampling.slots, max(capacity, len(sequences)))
        super().__init__(decoder, slots, self._longest, most, is_eos, fit)
        self._count = self._slots
        # Nothing is to be done between a token and the next of a turn
        self._steps_alone = decoder.samples_steps(sampling) and sampling.repetition_penalty == 1 and not sampling.stop
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(self._slots, decoder.vocab_size, dtype=torch.bool, device=decoder.device)
        self._step_s = READY_S  # of the newest call of compiled code, for each of its tokens
        self._adapter_of = np.full(self._slots, -1, dtype=np.int64)
        if adapters:
            decoder.adapt(adapters, self._adapter_of)
        self._prompts = PromptCache(decoder, self._queue, pad_id, fit.advice)

    def _limit_of(self, sequence: RolloutSequence) -> int:
        """Tokens that a sequence may have, its prompt included."""
        return min(len(sequence.prompt_ids) + self._sampling.max_completion_tokens, self._max_length)

    def play(self) -> None:
        """Run every sequence to its end."""
        self._begin(list(range(self._slots)))
        while self._count:
            changed, ended = self._step()
            self._begin(ended[: len(self._queue)])
            if changed or self._waiting_on_env:
                self._compact(self._rejoin())

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
            if active or (ended and self._tells_ends):
                break
        return active

    def _begin(self, slots: list[int]) -> None:
        """Start waiting sequences in free slots."""
        if not slots:
            return
        sequences = [self._queue.popleft() for _ in slots]
        prompts = [prompt_of(sequence) for sequence in sequences]
        self._prompts.fill(slots, prompts)
        for slot, sequence, (ids, adapter) in zip(slots, sequences, prompts, strict=True):
            self._place(slot, sequence, self._limits[id(sequence)], self._sampling.temperature)
            self._adapter_of[slot] = adapter
            if self._seen is not None:
                self._seen[slot] = False
                self._seen[slot, self._tensor(ids)] = True

    def _by_slot(self) -> tuple[np.ndarray, ...]:
        return (*super()._by_slot(), self._adapter_of)

    def _steps_at_once(self) -> int:
        if not self._steps_alone:
            return 0
        if not self._waiting_on_env or self._sampling.rejoin == "together":
            return STEPS
        return min(STEPS, max(1, int(READY_S / self._step_s)))

    def _sample_steps(self, n: int, steps: int) -> None:
        began = time.perf_counter()
        super()._sample_steps(n, steps)
        self._step_s = max((time.perf_counter() - began) / steps, READY_S / STEPS)

    def _stopped(self, n: int) -> np.ndarray | None:
        if not self._sampling.stop:
            return None
        actions = [self._tokens[slot, : self._acted[slot]].tolist() for slot in range(n)]
        sequences = self._sequences[:n]
        return np.array([s is not None and s.should_stop(ids) for s, ids in zip(sequences, actions, strict=True)])

    def _sample(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: AppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `SlotTable`: one upload, one read-back."""
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
