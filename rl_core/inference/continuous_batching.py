"""Prompts of served requests into the slots of a decoder's cache; a beginning that some slot holds is copied.

Slots of the rollout engine for requests that come and go between decoding steps.

n active slots, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.openmp_spin import limit_openmp_spin
from rl_core.data.batches import pack_sequences, pad_rows, plan_micro_batches
from rl_core.environments.step_pool import Observation, PendingTurn, ReplacementContext
from rl_core.errors import NonFiniteTensor
from rl_core.inference.decoder import Decoder
from rl_core.inference.decoder_layers import AppendedTokens
from rl_core.inference.sampling import check_weights, compute_log_probabilities
from rl_core.inference.serving_requests import RequestProgress, ServedRequest, TopTokens
from rl_core.inference.slot_table import MAX_COMPILED_STEPS, SlotTable
from rl_core.models.lora import use_merged_weights
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# tokens of one pass of compiled code, at least one prompt; more at once are not faster
_PASS_TOKENS = 512
_MIN_SHARED_TOKENS = 16  # tokens that a prompt has in common with one that is read first, so that it is copied from there
_PADDED_TOKENS = 8192  # of one pass of torch's kernels
_PAD_MULTIPLE = 32  # their prompts are padded to a multiple of it, so that a row's width does not depend on other rows


@dataclass(frozen=True, slots=True)
class _PromptRead:
    """A prompt on its way into a slot: tokens 0..common-1 come from `source`, those up to `end` are computed."""

    slot: int
    prompt: np.ndarray  # int32
    source: int
    common: int
    end: int


class SlotPrompts:
    """Keys and values of prompts in slots.

    Compiled code computes a token's numbers from those before it in its slot alone, to the last bit: whichever prompts
    are read together, and by whom their beginning was read. So the beginning that a prompt has in common with one in
    the cache, of a request that runs or has ended, is copied. Torch's kernels compute each of several equal prompts
    once, and nothing is kept.
    """

    def __init__(
        self, decoder: Decoder, lengths: np.ndarray, context: int, pad_id: int, advice: str
    ) -> None:
        """
        Args:
            lengths: int64 [slots], tokens of each slot in the cache, those of ended sequences too; written by the
                caller where a slot's tokens change, and by `read`.
            context: longest prompt; `pad_id`: any token; `advice`: see `MemoryFit`.
        """
        self._decoder, self._lengths, self._pad_id, self._advice = decoder, lengths, pad_id, advice
        # of the sequence in a slot, or before
        self._ids = np.zeros((len(lengths), context), dtype=np.int32)
        # of them; those beyond `lengths` are not in the cache
        self._counts = np.zeros(len(lengths), dtype=np.int64)

    @property
    def slot_arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays whose first axis is the slots; they go where a slot's keys and values go."""
        return self._ids, self._counts

    def extend_slot(self, slot: int, tokens: np.ndarray) -> None:
        """An answer behind the prompt, which may be the beginning of the next prompt of a conversation.

        What stands behind tokens that were not told of is not kept.
        """
        count = int(self._counts[slot])
        if (
            count and count + len(tokens) == self._lengths[slot] + 1
        ):  # the newest one is not in the cache
            self._ids[slot, count : count + len(tokens)] = tokens
            self._counts[slot] += len(tokens)

    def invalidate_slot(self, slot: int) -> None:
        """The slot's tokens are other ones from now on."""
        self._counts[slot] = 0

    def read_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], max_computed_tokens: int
    ) -> list[int]:
        """Prompts into slots, all but the last token of each, but at most so many that have to be computed.

        Returns: tokens of each in its slot. Raises: OutOfMemory.
        """
        if not self._decoder.can_append_tokens:
            return self._prefill_prompts(
                slots,
                [tuple(prompt[: min(max_computed_tokens, len(prompt) - 1)]) for prompt in prompts],
            )
        waiting = [
            (slot, np.array(prompt, dtype=np.int32))
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
        while waiting:
            now: list[_PromptRead] = []
            later: list[tuple[int, np.ndarray]] = []
            for slot, prompt in waiting:
                source, common = self._find_longest_prefix(slot, prompt)
                if any(
                    _count_common_tokens(prompt, other.prompt[: other.end])
                    >= common + _MIN_SHARED_TOKENS
                    for other in now
                ):
                    later.append((slot, prompt))
                else:
                    now.append(
                        _PromptRead(
                            slot,
                            prompt,
                            source,
                            common,
                            min(common + max_computed_tokens, len(prompt) - 1),
                        )
                    )
            self._read_with_kernels(now)
            waiting = later
        return [int(self._lengths[slot]) for slot in slots]

    def _find_longest_prefix(self, slot: int, prompt: np.ndarray) -> tuple[int, int]:
        """The slot with the longest beginning of a prompt, all but its last token, and the length; rather its own."""
        count = len(prompt) - 1
        if not count:
            return slot, 0
        is_other = self._ids[:, :count] != prompt[:count]
        alike = np.where(is_other.any(axis=1), is_other.argmax(axis=1), count)
        alike = np.minimum(alike, np.minimum(self._counts, self._lengths))
        best = int(alike.argmax())
        return (slot if alike[slot] == alike[best] else best), int(alike[best])

    def _read_with_kernels(self, readings: Sequence[_PromptRead]) -> None:
        """By compiled code: prompts of any lengths in one pass, without padding."""
        for reading in readings:
            self._counts[reading.slot] = 0  # until it is read
        # slot and number of its tokens -> slots that get them
        parts: dict[tuple[int, int], list[int]] = {}
        for reading in readings:
            if reading.common and reading.source != reading.slot:
                parts.setdefault((reading.source, reading.common), []).append(reading.slot)
        # all are read before any is written
        taken = [self._decoder.copy_slot_prefix(*part) for part in parts]
        for slots, kv in zip(parts.values(), taken, strict=True):
            self._decoder.fill_slots(
                torch.tensor(slots), kv, torch.zeros(len(slots), dtype=torch.int64)
            )
        rest = [reading for reading in readings if reading.end > reading.common]
        lengths = [reading.end - reading.common for reading in rest]

        def take_in(batch: list[int]) -> None:
            some = [rest[index] for index in batch]
            tokens = np.concatenate([r.prompt[r.common : r.end] for r in some]).astype(np.int64)
            positions = np.concatenate([np.arange(r.common, r.end) for r in some])
            slots = np.repeat([r.slot for r in some], [lengths[index] for index in batch])
            self._decoder.append_tokens(*map(torch.from_numpy, (tokens, positions, slots)))

        batches = pack_sequences(lengths, max([_PASS_TOKENS, *lengths]))
        MemoryFit("prompts", self._advice).compute_batches(batches, take_in, lengths=lengths)
        for reading in readings:
            self._ids[reading.slot, : len(reading.prompt)] = reading.prompt
            self._counts[reading.slot], self._lengths[reading.slot] = (
                len(reading.prompt),
                reading.end,
            )

    def _prefill_prompts(
        self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """By torch's kernels: prompts of about the same length in one pass."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, prompt in zip(slots, prompts, strict=True):
            if prompt:
                slots_of.setdefault(prompt, []).append(slot)
        by_width: dict[int, list[tuple[int, ...]]] = {}
        for prompt in slots_of:
            width = min(-(-len(prompt) // _PAD_MULTIPLE) * _PAD_MULTIPLE, self._decoder.max_length)
            by_width.setdefault(width, []).append(prompt)
        fit = MemoryFit("prompts", self._advice)
        for width, rows in by_width.items():
            prefill = functools.partial(self._prefill_batch, slots_of, rows, width)
            batches = plan_micro_batches([width] * len(rows), _PADDED_TOKENS)
            fit.compute_batches(batches, prefill, lengths=[width] * len(rows))
        return [len(prompt) for prompt in prompts]

    def _prefill_batch(
        self,
        slots_of: dict[tuple[int, ...], list[int]],
        rows: list[tuple[int, ...]],
        width: int,
        batch: list[int],
    ) -> None:
        device = self._decoder.device
        padded = [[*rows[index], *[self._pad_id] * (width - len(rows[index]))] for index in batch]
        kv = self._decoder.prefill_prompts(pad_rows(padded, self._pad_id).to(device))
        pairs = [(slot, row) for row, index in enumerate(batch) for slot in slots_of[rows[index]]]
        targets, sources = (torch.tensor(side).to(device) for side in zip(*pairs, strict=True))
        self._decoder.fill_slots(targets, kv, sources)


def _count_common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two prompts begin with alike."""
    size = min(len(one), len(other))
    is_other = one[:size] != other[:size]
    return int(is_other.argmax()) if is_other.any() else size


# tokens of a prompt that are read at once; of a longer one, the rest while others decode
PROMPT_PIECE_TOKENS = 512
_MEMORY_ADVICE = "lower serving.slots or serving.context, or serve a smaller model"
_DEFAULT_SAMPLING = SamplingSettings()


@dataclass(slots=True)
class _PausedRequest:
    """A request's place in a slot, to be taken up again bit for bit."""

    kv: torch.Tensor  # [layers, 2, 1, K, length, D]
    rows: list[np.ndarray]  # one of each array of the table
    to_append: list[int] | None
    turn: PendingTurn | None


class ContinuousBatcher(SlotTable):
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
        limit_openmp_spin()
        check_weights(model)
        self._stack = ExitStack()
        self._stack.enter_context(use_merged_weights(model))
        decoder = Decoder(model)
        is_eos = self._model_eos = np.zeros(decoder.vocab_size, dtype=bool)
        is_eos[[token for token in eos_ids if token < len(is_eos)]] = True
        super().__init__(
            decoder,
            slots,
            context,
            context,
            is_eos,
            MemoryFit("slots of the server", _MEMORY_ADVICE),
        )
        self._no_eos = np.zeros_like(is_eos)
        self._prompts, self._wake = (
            SlotPrompts(decoder, self._length, context, pad_id, _MEMORY_ADVICE),
            wake,
        )
        self._allows_multiple_steps = np.ones(self._slots, dtype=bool)
        self._paused: dict[ServedRequest, _PausedRequest] = {}
        self._ended: list[ServedRequest] = []
        self._progress: list[RequestProgress] = []

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
        return not self._paused and all(request is None for request in self._sequences)

    @property
    def requests(self) -> list[ServedRequest]:
        """Those in slots, and the parked ones."""
        return [*self._list_slot_requests(), *self._paused]

    def _list_slot_requests(self) -> list[ServedRequest]:
        return [request for request in self._sequences if isinstance(request, ServedRequest)]

    def list_held_requests(self) -> list[tuple[ServedRequest, int]]:
        """Requests in slots, and the tokens that each has sampled since it took its slot; one that waits for its
        environment counts as having had its turn."""
        turn = 2**62
        return [
            (
                request,
                turn
                if slot in self._waiting_on_env
                else int(self._sampled[slot]) - request.num_sampled_at_start,
            )
            for slot, request in enumerate(self._sequences)
            if isinstance(request, ServedRequest)
        ]

    def start_requests(self, requests: Sequence[ServedRequest]) -> None:
        """Begin requests, at most `free`; what their prompts have in common with others' is read once."""
        places = [slot for slot in range(self._slots) if self._sequences[slot] is None][
            : len(requests)
        ]
        counts = self._prompts.read_prompts(
            places, [request.prompt_ids for request in requests], PROMPT_PIECE_TOKENS
        )
        for slot, request, count in zip(places, requests, counts, strict=True):
            prompt = request.prompt_ids
            limit = min(
                len(prompt) + request.sampling.max_completion_tokens, self._uniforms.shape[1]
            )
            self._put_sequence(slot, request, limit, request.sampling.temperature, request.drawn)
            self._allows_multiple_steps[slot] = request.allows_multiple_steps
            request.num_sampled_at_start = 0
            if count < len(prompt) - 1:
                self._length[slot] = count
                request.unread = prompt[count:]
                self._read_next_piece(slot, request)

    def _build_fill_arguments(
        self, pairs: list[tuple[int, int]], kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, rows = zip(*pairs, strict=True)
        return self._to_tensor(slots), kv, self._to_tensor(rows)

    def _read_next_piece(self, slot: int, request: ServedRequest) -> None:
        """Have the next step read the next piece of a long prompt."""
        piece, request.unread = (
            request.unread[:PROMPT_PIECE_TOKENS],
            request.unread[PROMPT_PIECE_TOKENS:],
        )
        self._pending[slot] = piece[-1]
        if len(piece) > 1:
            self._to_append[slot] = piece[:-1]

    def remove_request(self, request: ServedRequest) -> None:
        """Free a request's slot; its environment's answer, if it waits for one, is not waited for."""
        if self._paused.pop(request, None) is None:
            slot = self._sequences.index(request)
            self._sequences[slot] = None
            self._to_append.pop(slot, None)
            self._waiting_on_env.pop(slot, None)

    def pause_request(self, request: ServedRequest) -> None:
        """Free a request's slot and keep its place."""
        slot = self._sequences.index(request)
        self._paused[request] = _PausedRequest(
            kv=self._decoder.copy_slot_prefix(slot, int(self._length[slot])),
            rows=[array[slot].copy() for array in self._list_slot_arrays()],
            to_append=self._to_append.pop(slot, None),
            turn=self._waiting_on_env.pop(slot, None),
        )
        self._sequences[slot] = None

    def resume_request(self, request: ServedRequest) -> None:
        """Take up a parked request in a free slot."""
        slot, place = self._sequences.index(None), self._paused.pop(request)
        if place.kv.shape[4]:
            self._decoder.fill_slots(*self._build_fill_arguments([(slot, 0)], place.kv))
        for array, row in zip(self._list_slot_arrays(), place.rows, strict=True):
            array[slot] = row
        if place.to_append is not None:
            self._to_append[slot] = place.to_append
        if place.turn is not None:
            self._waiting_on_env[slot] = place.turn
        self._sequences[slot] = request
        request.num_sampled_at_start = int(self._sampled[slot])

    def can_resume(self, request: ServedRequest) -> bool:
        """False = it waits for its environment, so that a slot would be of no use to it."""
        turn = self._paused[request].turn
        return turn is None or turn.is_done()

    def release_memory(self) -> None:
        """Let go of the cache and of the model, whose adapters are taken out again."""
        self._decoder.release_cache()
        self._stack.close()

    def step(self) -> tuple[list[ServedRequest], list[RequestProgress]]:
        """Sample in every slot that can go on: one token, or several where nothing has to be done between them.

        Returns: the requests that have ended; new tokens of those that stream.
        """
        for slot in [slot for slot, turn in self._waiting_on_env.items() if turn.is_done()]:
            self._take_environment_answer(slot, self._waiting_on_env.pop(slot))
        self._compact_slots(self._list_decodable_slots())
        if self._count:
            has_own_ends = any(
                request.end_ids is not None for request in self._iter_active_requests()
            )
            # `_stopped` looks for the ends then
            self._is_eos = self._no_eos if has_own_ends else self._model_eos
            self._step_slots()
            for slot in range(self._count):
                self._report_progress(slot)
        ended, self._ended = self._ended, []
        progress, self._progress = self._progress, []
        return ended, progress

    @property
    def can_step(self) -> bool:
        """True = some request can go on without waiting."""
        return any(
            request is not None
            and (slot not in self._waiting_on_env or self._waiting_on_env[slot].is_done())
            for slot, request in enumerate(self._sequences)
        )

    def _take_environment_answer(self, slot: int, turn: PendingTurn) -> None:
        """Go on with what a slot's environment answered."""
        request = self._find_request(slot)
        try:
            if self._append_observation(slot, turn.finish_turn()):
                return
        except Exception as error:
            request.error = error
            self._sequences[slot] = None
        self._ended.append(request)

    def _append_observation(
        self, slot: int, observation: Observation, hit_limit: bool = False
    ) -> bool:
        if isinstance(observation, ReplacementContext):
            self._prompts.invalidate_slot(slot)
        return super()._append_observation(slot, observation, hit_limit)

    def _find_request(self, slot: int) -> ServedRequest:
        request = self._sequences[slot]
        assert isinstance(request, ServedRequest)
        return request

    def _report_progress(self, slot: int) -> None:
        """Note the new tokens of a request that streams."""
        request, count = self._sequences[slot], int(self._acted[slot])
        if (
            not isinstance(request, ServedRequest)
            or not request.streams
            or request.num_reported_tokens >= count
        ):
            return
        new = slice(request.num_reported_tokens, count)
        top = (
            TopTokens.from_rows(request.top_rows[request.num_reported_tokens - count :])
            if request.top
            else None
        )
        self._progress.append(
            RequestProgress(
                request, self._tokens[slot, new].tolist(), self._logprobs[slot, new].tolist(), top
            )
        )
        request.num_reported_tokens = count

    def _end_turn(self, slot: int, hit_limit: bool) -> None:
        request = self._find_request(slot)
        self._report_progress(slot)
        self._prompts.extend_slot(slot, self._tokens[slot, : self._acted[slot]])
        super()._end_turn(slot, hit_limit)
        if self._sequences[slot] is None:
            self._ended.append(request)
        elif slot in self._waiting_on_env:
            self._waiting_on_env[slot].call.future.add_done_callback(lambda future: self._wake())

    def _refuse_logprob(self, slot: int, logprob: float) -> None:
        try:
            super()._refuse_logprob(slot, logprob)
        except NonFiniteTensor as error:
            self._find_request(slot).error = error

    def _list_slot_arrays(self) -> tuple[np.ndarray, ...]:
        return (
            *super()._list_slot_arrays(),
            self._allows_multiple_steps,
            *self._prompts.slot_arrays,
        )

    def _count_compiled_steps(self) -> int:
        is_plain = bool(self._allows_multiple_steps[: self._count].all()) and not any(
            r.unread for r in self._iter_active_requests()
        )
        return (
            MAX_COMPILED_STEPS
            if is_plain and self._decoder.can_sample_steps(_DEFAULT_SAMPLING)
            else 0
        )

    def _iter_active_requests(self) -> Iterable[ServedRequest]:
        return (self._find_request(slot) for slot in range(self._count))

    def _sample_one_token(self, n: int, to_append: dict[int, list[int]]) -> None:
        reading = [slot for slot in range(n) if self._find_request(slot).unread]
        super()._sample_one_token(n, to_append)
        for slot in reading:  # its prompt goes on: what was sampled after a part of it is nothing
            self._sampled[slot] -= 1
            self._acted[slot] -= 1
            self._read_next_piece(slot, self._find_request(slot))

    def _find_stopped(self, n: int) -> np.ndarray | None:
        asked = [
            slot
            for slot, request in enumerate(self._iter_active_requests())
            if request.has_stops and self._acted[slot]
        ]
        looks_for_ends = self._is_eos is self._no_eos
        if not asked and not looks_for_ends:
            return None
        found = np.zeros(n, dtype=bool)
        if looks_for_ends:
            for slot, request in enumerate(self._iter_active_requests()):
                newest = int(self._pending[slot])
                found[slot] = (
                    self._model_eos[newest]
                    if request.end_ids is None
                    else newest in request.end_ids
                )
        for slot in asked:
            found[slot] |= self._find_request(slot).should_stop(
                self._tokens[slot, : self._acted[slot]].tolist()
            )
        return found

    def _sample_tokens(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: AppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        alike: dict[int, list[int]] = {}  # slots whose tokens are drawn in the same way
        for slot, request in enumerate(self._iter_active_requests()):
            alike.setdefault(id(request.drawing), []).append(slot)
        if (
            self._decoder.graphs is not None
            and appended is None
            and len(alike) == 1
            and self._allows_multiple_steps[:n].all()
        ):
            both_2n = self._decoder.sample_with_graphs(
                tokens, positions, drawn, self._find_request(0).drawing
            )
            return both_2n[0].astype(np.int64), both_2n[1]
        logits_nV = self._decoder.step(
            self._to_tensor(tokens),
            self._to_tensor(positions),
            n,
            int(positions[:n].max()) + 1,
            appended,
        )
        chosen, logprobs = np.zeros(n, dtype=np.int64), np.zeros(n)
        for slots in alike.values():
            sampling = self._find_request(slots[0]).drawing
            part = logits_nV if len(slots) == n else logits_nV[self._to_tensor(slots)]
            tokens_m, logprobs_m = self._decoder.draw_tokens(
                part, self._to_tensor(drawn[slots]), sampling
            )
            chosen[slots], logprobs[slots] = tokens_m.cpu().numpy(), logprobs_m.cpu().numpy()
            self._record_top_tokens(part, slots, sampling)
        return chosen, logprobs

    def _record_top_tokens(
        self, logits_mV: torch.Tensor, slots: list[int], sampling: SamplingSettings
    ) -> None:
        """Note the most likely tokens for the requests that want them."""
        asked = [
            row
            for row, slot in enumerate(slots)
            if self._find_request(slot).top and not self._find_request(slot).unread
        ]
        if not asked:
            return
        most = max(self._find_request(slots[row]).top for row in asked)
        restriction = sampling if sampling.is_restricted else None
        log_p_mV = compute_log_probabilities(
            logits_mV[self._to_tensor(asked)], sampling.temperature, restriction
        )
        best = log_p_mV.topk(min(most, log_p_mV.shape[-1]), dim=-1)
        for row, ids, logprobs in zip(
            asked, best.indices.cpu().numpy(), best.values.cpu().numpy(), strict=True
        ):
            request = self._find_request(slots[row])
            kept = logprobs[: request.top]
            rest = max(0.0, 1.0 - float(np.exp(kept.astype(np.float64)).sum()))
            request.top_rows.append((ids[: request.top], kept, rest))
