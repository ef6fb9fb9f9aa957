"""Continuous batching: requests that join and leave the rollout engine's slots between decoding steps.

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
from rl_core.cpu.openmp_spin import limit_openmp_spin
from rl_core.environments.step_pool import Observation, PendingTurn, ReplacementContext
from rl_core.errors import NonFiniteTensor
from rl_core.inference.decoder import Decoder
from rl_core.inference.decoder_layers import HostAppendedTokens
from rl_core.inference.prompt_scores import score_prompts
from rl_core.inference.recorded_steps import MAX_TOP, HostStep, build_drawing_rows
from rl_core.inference.sampling import check_weights, compute_log_probabilities
from rl_core.inference.serving_requests import RequestProgress, ServedRequest, TopTokens
from rl_core.inference.slot_prompts import SlotPrompts
from rl_core.inference.slot_table import MAX_COMPILED_STEPS, SlotTable
from rl_core.inference.token_rules import RulesFailed
from rl_core.models.lora import use_merged_weights
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Longer prompts are read in pieces of this many tokens, while other slots decode.
PROMPT_PIECE_TOKENS = 512
_MEMORY_ADVICE = "lower serving.slots or serving.context, or serve a smaller model"
_DEFAULT_SAMPLING = SamplingSettings()


@dataclass(slots=True)
class _PausedRequest:
    """A slot's state, saved so that its request resumes bit for bit."""

    kv: torch.Tensor  # [layers, 2, 1, K, length, D]
    rows: list[np.ndarray]  # the slot's row of each array in _list_slot_arrays()
    to_append: list[int] | None
    turn: PendingTurn | None


class ContinuousBatcher(SlotTable):
    """The requests that one set of weights answers.

    A request's tokens depend on its prompt, seed, sampling settings and the weights. With compiled decoding they are
    the same bit for bit regardless of the other slots.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        eos_ids: Collection[int],
        pad_id: int,
        textless_ids: Collection[int] = (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Reserve the slots; merge the model's adapters until `release_memory`.

        Args:
            context: longest prompt and answer together, in tokens.
            textless_ids: tokens that are never sampled.
            wake: called on any thread when an environment has answered.
        Raises: NonFiniteTensor, OutOfMemory.
        """
        keep_freed_memory()
        limit_openmp_spin()
        check_weights(model)
        self._stack = ExitStack()
        self._stack.enter_context(use_merged_weights(model))
        decoder = Decoder(model, textless_ids)
        is_eos = self._model_eos = np.zeros(decoder.vocab_size, dtype=bool)
        is_eos[[token for token in eos_ids if token < len(is_eos)]] = True
        self._model = model
        super().__init__(
            decoder,
            slots,
            context,
            context,
            is_eos,
            MemoryFit("slots of the server", _MEMORY_ADVICE),
        )
        self._no_eos = np.zeros_like(is_eos)
        self._prompts = SlotPrompts(decoder, self._length, context, pad_id, _MEMORY_ADVICE)
        self._wake = wake
        self._allows_multiple_steps = np.ones(self._slots, dtype=bool)
        self._paused: dict[ServedRequest, _PausedRequest] = {}
        self._ended: list[ServedRequest] = []
        self._progress: list[RequestProgress] = []

    @property
    def capacity(self) -> int:
        """Slots that fit into memory."""
        return min(self._slots, self._fit.limit or self._slots)

    @property
    def is_batch_independent(self) -> bool:
        """True if a request's numbers do not depend on the other slots, bit for bit."""
        return self._decoder.can_append_tokens

    @property
    def free(self) -> int:
        """Requests that can be started or resumed."""
        return self.capacity - sum(request is not None for request in self._sequences)

    @property
    def is_empty(self) -> bool:
        """True if there is no request, not even a paused one."""
        return not self._paused and all(request is None for request in self._sequences)

    @property
    def requests(self) -> list[ServedRequest]:
        """Requests in slots and paused requests."""
        return [*self._list_slot_requests(), *self._paused]

    def _list_slot_requests(self) -> list[ServedRequest]:
        return [request for request in self._sequences if isinstance(request, ServedRequest)]

    def list_held_requests(self) -> list[tuple[ServedRequest, int]]:
        """List requests in slots with the tokens sampled since each took its slot.

        A request that waits for its environment counts as having used up its turn.
        """
        whole_turn = 2**62
        return [
            (
                request,
                whole_turn
                if slot in self._waiting_on_env
                else int(self._sampled[slot]) - request.num_sampled_at_start,
            )
            for slot, request in enumerate(self._sequences)
            if isinstance(request, ServedRequest)
        ]

    def start_requests(self, requests: Sequence[ServedRequest]) -> None:
        """Start at most `free` requests; read prefixes that their prompts share only once."""
        score_prompts(self._model, list(requests))
        free_slots = [slot for slot in range(self._slots) if self._sequences[slot] is None]
        slots = free_slots[: len(requests)]
        prompts = [request.prompt_ids for request in requests]
        counts = self._prompts.read_prompts(slots, prompts, PROMPT_PIECE_TOKENS)
        for slot, request, count in zip(slots, requests, counts, strict=True):
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
        """Schedule the next piece of a long prompt for the next step."""
        piece = request.unread[:PROMPT_PIECE_TOKENS]
        request.unread = request.unread[PROMPT_PIECE_TOKENS:]
        self._pending[slot] = piece[-1]
        if len(piece) > 1:
            self._to_append[slot] = piece[:-1]

    def remove_request(self, request: ServedRequest) -> None:
        """Free a request's slot without waiting for its environment."""
        if self._paused.pop(request, None) is None:
            slot = self._sequences.index(request)
            self._sequences[slot] = None
            self._to_append.pop(slot, None)
            self._waiting_on_env.pop(slot, None)

    def pause_request(self, request: ServedRequest) -> None:
        """Free a request's slot and save its state."""
        slot = self._sequences.index(request)
        self._paused[request] = _PausedRequest(
            kv=self._decoder.copy_slot_prefix(slot, int(self._length[slot])),
            rows=[array[slot].copy() for array in self._list_slot_arrays()],
            to_append=self._to_append.pop(slot, None),
            turn=self._waiting_on_env.pop(slot, None),
        )
        self._sequences[slot] = None

    def resume_request(self, request: ServedRequest) -> None:
        """Resume a paused request in a free slot."""
        slot, paused = self._sequences.index(None), self._paused.pop(request)
        if paused.kv.shape[4]:
            self._decoder.fill_slots(*self._build_fill_arguments([(slot, 0)], paused.kv))
        for array, row in zip(self._list_slot_arrays(), paused.rows, strict=True):
            array[slot] = row
        if paused.to_append is not None:
            self._to_append[slot] = paused.to_append
        if paused.turn is not None:
            self._waiting_on_env[slot] = paused.turn
        self._sequences[slot] = request
        request.num_sampled_at_start = int(self._sampled[slot])

    def can_resume(self, request: ServedRequest) -> bool:
        """Return whether a paused request can use a slot: False while it waits for its environment."""
        turn = self._paused[request].turn
        return turn is None or turn.is_done()

    def release_memory(self) -> None:
        """Release the cache and the model, and unmerge the model's adapters."""
        self._decoder.release_cache()
        self._stack.close()

    def step(self) -> tuple[list[ServedRequest], list[RequestProgress]]:
        """Sample in every ready slot: one token, or several if nothing has to happen between them.

        Returns: requests that have ended; new tokens of streaming requests.
        """
        for slot in [slot for slot, turn in self._waiting_on_env.items() if turn.is_done()]:
            self._take_environment_answer(slot, self._waiting_on_env.pop(slot))
        self._compact_slots(self._list_decodable_slots())
        if self._count:
            has_custom_ends = any(
                request.end_ids is not None for request in self._iter_active_requests()
            )
            # _find_stopped then looks for the end tokens
            self._is_eos = self._no_eos if has_custom_ends else self._model_eos
            self._step_slots()
            for slot in range(self._count):
                self._report_progress(slot)
        ended, self._ended = self._ended, []
        progress, self._progress = self._progress, []
        return ended, progress

    @property
    def can_step(self) -> bool:
        """True if some request can be decoded without waiting."""
        return any(
            request is not None
            and (slot not in self._waiting_on_env or self._waiting_on_env[slot].is_done())
            for slot, request in enumerate(self._sequences)
        )

    def _take_environment_answer(self, slot: int, turn: PendingTurn) -> None:
        """Append the environment's answer to its slot, or end the request on an error."""
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
        """Record the new tokens of a streaming request."""
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
        if self._find_request(slot).error is not None:
            return
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
        allows_multiple_steps = bool(self._allows_multiple_steps[: self._count].all()) and not any(
            r.unread for r in self._iter_active_requests()
        )
        return (
            MAX_COMPILED_STEPS
            if allows_multiple_steps and self._decoder.can_sample_steps(_DEFAULT_SAMPLING)
            else 0
        )

    def _iter_active_requests(self) -> Iterable[ServedRequest]:
        return (self._find_request(slot) for slot in range(self._count))

    def _sample_one_token(self, n: int, to_append: dict[int, list[int]]) -> None:
        reading = [slot for slot in range(n) if self._find_request(slot).unread]
        super()._sample_one_token(n, to_append)
        for slot in reading:  # discard the token sampled after an incomplete prompt
            self._sampled[slot] -= 1
            self._acted[slot] -= 1
            self._read_next_piece(slot, self._find_request(slot))

    def _find_stopped(self, n: int) -> np.ndarray | None:
        slots_with_stops = [
            slot
            for slot, request in enumerate(self._iter_active_requests())
            if request.has_stops and self._acted[slot]
        ]
        finds_end_tokens = self._is_eos is self._no_eos
        if not slots_with_stops and not finds_end_tokens:
            return None
        stopped = np.zeros(n, dtype=bool)
        if finds_end_tokens:
            for slot, request in enumerate(self._iter_active_requests()):
                newest = int(self._pending[slot])
                stopped[slot] = (
                    self._model_eos[newest]
                    if request.end_ids is None
                    else newest in request.end_ids
                )
        for slot in slots_with_stops:
            stopped[slot] |= self._find_request(slot).should_stop(
                self._tokens[slot, : self._acted[slot]].tolist()
            )
        return stopped

    def _sample_tokens(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: HostAppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        requests = [self._find_request(slot) for slot in range(n)]
        uses_graphs = self._decoder.graphs is not None and not any(r.editor for r in requests)
        if uses_graphs and max(r.top for r in requests) <= MAX_TOP:
            return self._sample_with_graphs(tokens, positions, drawn, requests, appended)
        # keys: id() of the drawing settings; below 0 for a slot with rules of its own
        slots_by_drawing: dict[int, list[int]] = {}
        for slot, request in enumerate(requests):
            key = id(request.drawing) if not self._has_rules(request) else -1 - slot
            slots_by_drawing.setdefault(key, []).append(slot)
        logits_nV = self._compute_logits(tokens, positions, n, appended)
        chosen, logprobs = np.zeros(n, dtype=np.int64), np.zeros(n)
        for slots in slots_by_drawing.values():
            sampling = self._find_request(slots[0]).drawing
            logits_mV = logits_nV if len(slots) == n else logits_nV[self._to_tensor(slots)]
            if self._has_rules(requests[slots[0]]):
                try:
                    logits_mV = self._edit_logits(slots[0], logits_mV)
                except RulesFailed as error:
                    requests[slots[0]].error, logprobs[slots[0]] = error, np.nan  # ends the request
                    continue
            tokens_m, logprobs_m = self._decoder.draw_tokens(
                logits_mV, self._to_tensor(drawn[slots]), sampling
            )
            chosen[slots], logprobs[slots] = tokens_m.cpu().numpy(), logprobs_m.cpu().numpy()
            self._record_top_tokens(logits_mV, slots, sampling)
        return chosen, logprobs

    @staticmethod
    def _has_rules(request: ServedRequest) -> bool:
        """Return whether the logits of the next token have to be edited; those within a prompt do not."""
        return request.editor is not None and not request.unread

    def _edit_logits(self, slot: int, logits_1V: torch.Tensor) -> torch.Tensor:
        editor = self._find_request(slot).editor
        assert editor is not None
        return editor.edit_logits(logits_1V, self._tokens[slot, : self._acted[slot]])

    def _sample_with_graphs(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        drawn: np.ndarray,
        requests: Sequence[ServedRequest],
        appended: HostAppendedTokens | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample requests of any mixture of settings in one step with one read-back."""
        drawings = [request.drawing for request in requests]
        step = HostStep(
            tokens,
            positions,
            drawn,
            build_drawing_rows(drawings),
            any(drawing.is_restricted for drawing in drawings),
            appended,
            num_top=max(0 if request.unread else request.top for request in requests),
        )
        result = self._decoder.sample_with_graphs(step)
        if step.num_top:
            ids_Kn, logprobs_Kn = np.split(result[2:], 2)
            for row, request in enumerate(requests):
                if request.top and not request.unread:
                    self._add_top_row(request, ids_Kn[:, row].astype(np.int64), logprobs_Kn[:, row])
        return result[0].astype(np.int64), result[1]

    def _add_top_row(
        self, request: ServedRequest, ids_K: np.ndarray, logprobs_K: np.ndarray
    ) -> None:
        """Record the most likely tokens of a step, the most likely first, for one request."""
        top_logprobs = logprobs_K[: request.top].astype(np.float32)
        rest = max(0.0, 1.0 - float(np.exp(top_logprobs.astype(np.float64)).sum()))
        request.top_rows.append((ids_K[: request.top], top_logprobs, rest))

    def _record_top_tokens(
        self, logits_mV: torch.Tensor, slots: list[int], sampling: SamplingSettings
    ) -> None:
        """Record the most likely tokens for the requests that ask for them."""
        rows_with_top = [
            row
            for row, slot in enumerate(slots)
            if self._find_request(slot).top and not self._find_request(slot).unread
        ]
        if not rows_with_top:
            return
        max_top = max(self._find_request(slots[row]).top for row in rows_with_top)
        restriction = sampling if sampling.is_restricted else None
        log_p_mV = compute_log_probabilities(
            logits_mV[self._to_tensor(rows_with_top)], sampling.temperature, restriction
        )
        best = log_p_mV.topk(min(max_top, log_p_mV.shape[-1]), dim=-1)
        for row, ids, logprobs in zip(
            rows_with_top, best.indices.cpu().numpy(), best.values.cpu().numpy(), strict=True
        ):
            self._add_top_row(self._find_request(slots[row]), ids, logprobs)
