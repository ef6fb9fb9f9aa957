"""Slots of the rollout engine for requests that come and go between decoding steps.

n active slots, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.waiting import bound_waiting
from rl_core.environments.step_pool import NewContext, Observation, PendingTurn
from rl_core.errors import NonFiniteTensor
from rl_core.inference.appended_tokens import AppendedTokens
from rl_core.inference.decoder import Decoder
from rl_core.inference.sampling import check_weights, log_probabilities
from rl_core.inference.served_requests import Progress, ServedRequest, TopTokens
from rl_core.inference.slot_prompts import SlotPrompts
from rl_core.inference.slot_table import STEPS, SlotTable
from rl_core.memory import MemoryFit
from rl_core.models.lora import merged
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PIECE", "ServedSlots"]

PIECE = 512  # tokens of a prompt that are read at once; of a longer one, the rest while others decode
_ADVICE = "lower serving.slots or serving.context, or serve a smaller model"
_PLAIN = SamplingSettings()


@dataclass(slots=True)
class _Parked:
    """A request's place in a slot, to be taken up again bit for bit."""

    kv: torch.Tensor  # [layers, 2, 1, K, length, D]
    rows: list[np.ndarray]  # one of each array of the table
    to_append: list[int] | None
    turn: PendingTurn | None


class ServedSlots(SlotTable):
    """The requests that one set of weights answers: `admit`, `step` until they end, `remove`, `park` and `resume`.

    A request's tokens depend on its prompt, seed and sampling, and on the weights; where compiled code decodes, they
    are the same to the last bit whatever shares the slots with it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        eos_ids: Collection[int],
        pad_id: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`context`: longest prompt and answer together. `wake` is called, on any thread, when an environment has
        answered.

        Adapters of the model are merged until `release`. Raises: NonFiniteTensor, OutOfMemory.
        """
        keep_freed_memory()
        bound_waiting()
        check_weights(model)
        self._stack = ExitStack()
        self._stack.enter_context(merged(model))
        decoder = Decoder(model)
        is_eos = self._model_eos = np.zeros(decoder.vocab_size, dtype=bool)
        is_eos[[token for token in eos_ids if token < len(is_eos)]] = True
        super().__init__(decoder, slots, context, context, is_eos, MemoryFit("slots of the server", _ADVICE))
        self._no_eos = np.zeros_like(is_eos)
        self._prompts, self._wake = SlotPrompts(decoder, self._length, context, pad_id, _ADVICE), wake
        self._is_plain = np.ones(self._slots, dtype=bool)
        self._parked: dict[ServedRequest, _Parked] = {}
        self._ended: list[ServedRequest] = []
        self._progress: list[Progress] = []

    # -- coming and going ----------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots, as many as fit into memory."""
        return min(self._slots, self._fit.limit or self._slots)

    @property
    def free(self) -> int:
        """Requests that can be admitted or resumed."""
        return self.capacity - sum(request is not None for request in self._sequences)

    @property
    def is_empty(self) -> bool:
        """True = no request is here, not even a parked one."""
        return not self._parked and all(request is None for request in self._sequences)

    @property
    def requests(self) -> list[ServedRequest]:
        """Those in slots, and the parked ones."""
        return [*self._in_slots(), *self._parked]

    def _in_slots(self) -> list[ServedRequest]:
        return [request for request in self._sequences if isinstance(request, ServedRequest)]

    def held(self) -> list[tuple[ServedRequest, int]]:
        """Requests in slots, and the tokens that each has sampled since it took its slot; one that waits for its
        environment counts as having had its turn."""
        turn = 2**62
        return [
            (request, turn if slot in self._waiting_on_env else int(self._sampled[slot]) - request.held_since)
            for slot, request in enumerate(self._sequences)
            if isinstance(request, ServedRequest)
        ]

    def admit(self, requests: Sequence[ServedRequest]) -> None:
        """Begin requests, at most `free`; what their prompts have in common with others' is read once."""
        places = [slot for slot in range(self._slots) if self._sequences[slot] is None][: len(requests)]
        counts = self._prompts.read(places, [request.prompt_ids for request in requests], PIECE)
        for slot, request, count in zip(places, requests, counts, strict=True):
            prompt = request.prompt_ids
            limit = min(len(prompt) + request.sampling.max_completion_tokens, self._uniforms.shape[1])
            self._place(slot, request, limit, request.sampling.temperature, request.drawn)
            self._is_plain[slot] = request.is_plain
            request.held_since = 0
            if count < len(prompt) - 1:
                self._length[slot] = count
                request.unread = prompt[count:]
                self._read_on(slot, request)

    def _both(self, pairs: list[tuple[int, int]], kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, rows = zip(*pairs, strict=True)
        return self._tensor(slots), kv, self._tensor(rows)

    def _read_on(self, slot: int, request: ServedRequest) -> None:
        """Have the next step read the next piece of a long prompt."""
        piece, request.unread = request.unread[:PIECE], request.unread[PIECE:]
        self._pending[slot] = piece[-1]
        if len(piece) > 1:
            self._to_append[slot] = piece[:-1]

    def remove(self, request: ServedRequest) -> None:
        """Free a request's slot; its environment's answer, if it waits for one, is not waited for."""
        if self._parked.pop(request, None) is None:
            slot = self._sequences.index(request)
            self._sequences[slot] = None
            self._to_append.pop(slot, None)
            self._waiting_on_env.pop(slot, None)

    def park(self, request: ServedRequest) -> None:
        """Free a request's slot and keep its place."""
        slot = self._sequences.index(request)
        self._parked[request] = _Parked(
            kv=self._decoder.taken(slot, int(self._length[slot])),
            rows=[array[slot].copy() for array in self._by_slot()],
            to_append=self._to_append.pop(slot, None),
            turn=self._waiting_on_env.pop(slot, None),
        )
        self._sequences[slot] = None

    def resume(self, request: ServedRequest) -> None:
        """Take up a parked request in a free slot."""
        slot, place = self._sequences.index(None), self._parked.pop(request)
        if place.kv.shape[4]:
            self._decoder.fill(*self._both([(slot, 0)], place.kv))
        for array, row in zip(self._by_slot(), place.rows, strict=True):
            array[slot] = row
        if place.to_append is not None:
            self._to_append[slot] = place.to_append
        if place.turn is not None:
            self._waiting_on_env[slot] = place.turn
        self._sequences[slot] = request
        request.held_since = int(self._sampled[slot])

    def may_resume(self, request: ServedRequest) -> bool:
        """False = it waits for its environment, so that a slot would be of no use to it."""
        turn = self._parked[request].turn
        return turn is None or turn.done()

    def release(self) -> None:
        """Let go of the cache and of the model, whose adapters are taken out again."""
        self._decoder.release()
        self._stack.close()

    # -- decoding ------------------------------------------------------------------------------------------------------

    def step(self) -> tuple[list[ServedRequest], list[Progress]]:
        """Sample in every slot that can go on: one token, or several where nothing has to be done between them.

        Returns: the requests that have ended; new tokens of those that stream.
        """
        for slot in [slot for slot, turn in self._waiting_on_env.items() if turn.done()]:
            self._answered(slot, self._waiting_on_env.pop(slot))
        self._compact(self._decodable())
        if self._count:
            has_own_ends = any(request.end_ids is not None for request in self._active())
            self._is_eos = self._no_eos if has_own_ends else self._model_eos  # `_stopped` looks for the ends then
            self._step()
            for slot in range(self._count):
                self._tell(slot)
        ended, self._ended = self._ended, []
        progress, self._progress = self._progress, []
        return ended, progress

    @property
    def can_step(self) -> bool:
        """True = some request can go on without waiting."""
        return any(
            request is not None and (slot not in self._waiting_on_env or self._waiting_on_env[slot].done())
            for slot, request in enumerate(self._sequences)
        )

    def _answered(self, slot: int, turn: PendingTurn) -> None:
        """Go on with what a slot's environment answered."""
        request = self._request(slot)
        try:
            if self._go_on(slot, turn.result()):
                return
        except Exception as error:
            request.error = error
            self._sequences[slot] = None
        self._ended.append(request)

    def _go_on(self, slot: int, observation: Observation, hit_limit: bool = False) -> bool:
        if isinstance(observation, NewContext):
            self._prompts.forget(slot)
        return super()._go_on(slot, observation, hit_limit)

    def _request(self, slot: int) -> ServedRequest:
        request = self._sequences[slot]
        assert isinstance(request, ServedRequest)
        return request

    def _tell(self, slot: int) -> None:
        """Note the new tokens of a request that streams."""
        request, count = self._sequences[slot], int(self._acted[slot])
        if not isinstance(request, ServedRequest) or not request.streams or request.told >= count:
            return
        new = slice(request.told, count)
        top = TopTokens.stacked(request.top_rows[request.told - count :]) if request.top else None
        self._progress.append(
            Progress(request, self._tokens[slot, new].tolist(), self._logprobs[slot, new].tolist(), top)
        )
        request.told = count

    def _end_turn(self, slot: int, hit_limit: bool) -> None:
        request = self._request(slot)
        self._tell(slot)
        self._prompts.extend(slot, self._tokens[slot, : self._acted[slot]])
        super()._end_turn(slot, hit_limit)
        if self._sequences[slot] is None:
            self._ended.append(request)
        elif slot in self._waiting_on_env:
            self._waiting_on_env[slot].call.future.add_done_callback(lambda future: self._wake())

    def _refuse(self, slot: int, logprob: float) -> None:
        try:
            super()._refuse(slot, logprob)
        except NonFiniteTensor as error:
            self._request(slot).error = error

    def _by_slot(self) -> tuple[np.ndarray, ...]:
        return (*super()._by_slot(), self._is_plain, *self._prompts.by_slot)

    def _steps_at_once(self) -> int:
        is_plain = bool(self._is_plain[: self._count].all()) and not any(r.unread for r in self._active())
        return STEPS if is_plain and self._decoder.samples_steps(_PLAIN) else 0

    def _active(self) -> Iterable[ServedRequest]:
        return (self._request(slot) for slot in range(self._count))

    def _take_one(self, n: int, to_append: dict[int, list[int]]) -> None:
        reading = [slot for slot in range(n) if self._request(slot).unread]
        super()._take_one(n, to_append)
        for slot in reading:  # its prompt goes on: what was sampled after a part of it is nothing
            self._sampled[slot] -= 1
            self._acted[slot] -= 1
            self._read_on(slot, self._request(slot))

    def _stopped(self, n: int) -> np.ndarray | None:
        asked = [slot for slot, request in enumerate(self._active()) if request.has_stops and self._acted[slot]]
        looks_for_ends = self._is_eos is self._no_eos
        if not asked and not looks_for_ends:
            return None
        found = np.zeros(n, dtype=bool)
        if looks_for_ends:
            for slot, request in enumerate(self._active()):
                newest = int(self._pending[slot])
                found[slot] = self._model_eos[newest] if request.end_ids is None else newest in request.end_ids
        for slot in asked:
            found[slot] |= self._request(slot).should_stop(self._tokens[slot, : self._acted[slot]].tolist())
        return found

    def _sample(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: AppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        alike: dict[int, list[int]] = {}  # slots whose tokens are drawn in the same way
        for slot, request in enumerate(self._active()):
            alike.setdefault(id(request.drawing), []).append(slot)
        if self._decoder.graphs is not None and appended is None and len(alike) == 1 and self._is_plain[:n].all():
            both_2n = self._decoder.sample(tokens, positions, drawn, self._request(0).drawing)
            return both_2n[0].astype(np.int64), both_2n[1]
        logits_nV = self._decoder.step(
            self._tensor(tokens), self._tensor(positions), n, int(positions[:n].max()) + 1, appended
        )
        chosen, logprobs = np.zeros(n, dtype=np.int64), np.zeros(n)
        for slots in alike.values():
            sampling = self._request(slots[0]).drawing
            part = logits_nV if len(slots) == n else logits_nV[self._tensor(slots)]
            tokens_m, logprobs_m = self._decoder.draw(part, self._tensor(drawn[slots]), sampling)
            chosen[slots], logprobs[slots] = tokens_m.cpu().numpy(), logprobs_m.cpu().numpy()
            self._keep_top(part, slots, sampling)
        return chosen, logprobs

    def _keep_top(self, logits_mV: torch.Tensor, slots: list[int], sampling: SamplingSettings) -> None:
        """Note the most likely tokens for the requests that want them."""
        asked = [row for row, slot in enumerate(slots) if self._request(slot).top and not self._request(slot).unread]
        if not asked:
            return
        most = max(self._request(slots[row]).top for row in asked)
        restriction = sampling if sampling.is_restricted else None
        log_p_mV = log_probabilities(logits_mV[self._tensor(asked)], sampling.temperature, restriction)
        best = log_p_mV.topk(min(most, log_p_mV.shape[-1]), dim=-1)
        for row, ids, logprobs in zip(asked, best.indices.cpu().numpy(), best.values.cpu().numpy(), strict=True):
            request = self._request(slots[row])
            kept = logprobs[: request.top]
            rest = max(0.0, 1.0 - float(np.exp(kept.astype(np.float64)).sum()))
            request.top_rows.append((ids[: request.top], kept, rest))
