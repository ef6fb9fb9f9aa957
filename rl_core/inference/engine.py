"""The rollout engine: sequences decoded together over preallocated key/value slots.

Each prompt is prefilled once and copied to every sequence that begins with it. A slot is refilled as soon as its
sequence ends; when the queue is empty, active slots are compacted. Observations are appended to the live cache in the
step in which the other slots decode. A sequence with a pending environment step keeps its slot while the others
continue. Sampling a token and computing its log-probability take one pass over the logits, with one read-back per
step.

n active slots.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_core.capabilities import decoding
from rl_core.capabilities.rotary_positions import find_row_limit
from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.fused_decode import DraftTable
from rl_core.cpu.openmp_spin import limit_openmp_spin
from rl_core.data.batches import pad_rows, plan_micro_batches
from rl_core.environments.step_pool import wait_for_any_turn
from rl_core.errors import OutOfMemory
from rl_core.inference.decoder import Decoder
from rl_core.inference.decoder_layers import HostAppendedTokens
from rl_core.inference.recorded_steps import HostStep, build_drawing_rows
from rl_core.inference.sampling import (
    RolloutBackend,
    RolloutSequence,
    apply_repetition_penalty,
    check_prompt,
    check_weights,
)
from rl_core.inference.slot_table import MAX_COMPILED_STEPS, SlotTable
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models.forward_modes import resolve_autocast
from rl_core.models.lora import use_merged_weights
from rl_core.models.routed_adapters import Adapter
from rl_core.out_of_memory import (
    MemoryFit,
    format_first_line,
    is_out_of_memory,
    register_memory_holder,
)
from rl_core.settings import SamplingSettings
from rl_core.types import AutocastPrecision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Environments are polled after this many seconds of decoding: the longest delay until a finished step rejoins.
READY_CHECK_S = 0.002
# Extra cache tokens per slot in a run to which sequences are added, because prompts differ in length.
SPARE_TOKENS = 256
_PREFILL_TOKENS = 8192  # padded tokens per prefill pass
# a refill also prefills prompts of queued sequences, up to this many tokens
_LOOKAHEAD_TOKENS = 1024
# The common beginning of prompts is computed once if that saves this many multiplications: some 190 tokens at 135M.
_MIN_SAVED_PRODUCTS = 2e10
# advice for a model of which not even one sequence fits
_MEMORY_ADVICE = "lower sampling.max_completion_tokens, or use a smaller model"


class AdaptedPrompt(NamedTuple):
    """The tokens of a prompt and the number of the adapter that reads them."""

    ids: tuple[int, ...]
    adapter: int = -1  # below 0 = none


def read_adapted_prompt(sequence: RolloutSequence) -> AdaptedPrompt:
    """Return a sequence's prompt with its adapter."""
    return AdaptedPrompt(tuple(sequence.prompt_ids), getattr(sequence, "adapter", -1))


class PromptCache:
    """Prefilled prompts of queued sequences; each is kept until its last sequence has begun."""

    def __init__(
        self, decoder: Decoder, queue: deque[RolloutSequence], pad_id: int, advice: str
    ) -> None:
        """Count the queued prompts.

        Args:
            queue: sequences that have not begun; the caller removes them.
            advice: see `MemoryFit`.
        """
        self._decoder, self._queue, self._pad_id, self._advice = decoder, queue, pad_id, advice
        # prompt -> (keys and values, row)
        self._prefilled: dict[AdaptedPrompt, tuple[torch.Tensor, int]] = {}
        self._waiting = Counter(map(read_adapted_prompt, queue))  # sequences that have not begun

    def fill_slots(self, slots: Sequence[int], prompts: Sequence[AdaptedPrompt]) -> None:
        """Copy all but the last token of each prompt into its slot."""
        self._prefill_missing(prompts)
        by_batch: dict[int, tuple[torch.Tensor, list[tuple[int, int]]]] = {}
        for slot, prompt in zip(slots, prompts, strict=True):
            if len(prompt.ids) > 1:
                kv, row = self._prefilled[prompt]
                by_batch.setdefault(id(kv), (kv, []))[1].append((slot, row))
            self._waiting[prompt] -= 1
            if not self._waiting[prompt]:
                self._prefilled.pop(prompt, None)
        for kv, pairs in by_batch.values():
            MemoryFit("prompts", self._advice).compute_batches(
                [pairs], functools.partial(self._copy_to_slots, kv)
            )

    def register_sequence(self, sequence: RolloutSequence) -> None:
        """Count one more sequence that will begin."""
        self._waiting[read_adapted_prompt(sequence)] += 1

    def clear_prefilled(self) -> None:
        """Drop the prefilled prompts: the weights have changed."""
        self._prefilled.clear()

    def _copy_to_slots(self, kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy prefilled prompts into slots.

        Args:
            pairs: (slot, row of `kv`) each.
        """
        slots, rows = (
            torch.tensor(side).to(self._decoder.device) for side in zip(*pairs, strict=True)
        )
        self._decoder.fill_slots(slots, kv, rows)

    def _prefill_missing(self, prompts: Sequence[AdaptedPrompt]) -> None:
        """Prefill all but the last token of those prompts that are missing, and of some next ones in the queue."""
        missing = [p for p in dict.fromkeys(prompts) if len(p.ids) > 1 and p not in self._prefilled]
        if not missing:
            return
        total = sum(len(prompt.ids) for prompt in missing)
        to_prefill = dict.fromkeys(missing)
        for prompt in map(read_adapted_prompt, self._queue):
            if prompt in to_prefill or prompt in self._prefilled or len(prompt.ids) < 2:
                continue
            total += len(prompt.ids)
            if total > _LOOKAHEAD_TOKENS:
                break
            to_prefill[prompt] = None
        by_adapter: dict[int, list[AdaptedPrompt]] = {}
        for prompt in to_prefill:
            by_adapter.setdefault(prompt.adapter, []).append(prompt)
        for adapter, adapter_prompts in by_adapter.items():
            if self._decoder.prefills_by_length:
                for length in dict.fromkeys(len(prompt.ids) for prompt in adapter_prompts):
                    self._prefill_adapter_prompts(
                        [prompt for prompt in adapter_prompts if len(prompt.ids) == length], adapter
                    )
            else:
                self._prefill_adapter_prompts(adapter_prompts, adapter)

    def _prefill_adapter_prompts(self, missing: Sequence[AdaptedPrompt], adapter: int) -> None:
        """Prefill prompts of one adapter in batches; compute a long common beginning once."""
        start = 0 if self._decoder.prefills_by_length else _count_shared_tokens(missing)
        if start * (len(missing) - 1) * self._decoder.layer_parameters < _MIN_SAVED_PRODUCTS:
            start = 0
        lengths = [len(prompt.ids) - 1 - start for prompt in missing]
        prefix: torch.Tensor | None = None

        def prefill_prefix(_: list[int]) -> None:
            nonlocal prefix
            ids_1P = pad_rows([list(missing[0].ids[:start])], self._pad_id)
            prefix = self._decoder.prefill_prompts(ids_1P.to(self._decoder.device), adapter)

        def prefill(rows: list[int]) -> None:
            ids_MT = pad_rows([list(missing[i].ids[start:-1]) for i in rows], self._pad_id).to(
                self._decoder.device
            )
            kv = self._decoder.prefill_prompts(ids_MT, adapter, prefix)
            for row, index in enumerate(rows):
                self._prefilled[missing[index]] = (kv, row)

        if start:
            MemoryFit("prompts", self._advice).compute_batches(
                [[0]], prefill_prefix, lengths=[start]
            )

        MemoryFit("prompts", self._advice).compute_batches(
            plan_micro_batches(lengths, _PREFILL_TOKENS), prefill, lengths=lengths
        )


def _count_shared_tokens(prompts: Sequence[AdaptedPrompt]) -> int:
    """Return the length of the prompts' common beginning, without the last two tokens of the shortest prompt.

    The last token is not prefilled, and each row keeps one.
    """
    first, last = min(prompts).ids, max(prompts).ids  # the two that differ first
    limit = min(len(prompt.ids) for prompt in prompts) - 2
    shared = 0
    while shared < limit and first[shared] == last[shared]:
        shared += 1
    return shared


class EngineRun(SlotTable):
    """The host side of one `Engine.run_sequences` call: the state of every slot."""

    # True = return ended sequences before waiting for other sequences' environments
    _reports_ends_early = False

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
        """Reserve the slots for these sequences.

        Args:
            fit: see `SlotTable`.
            adapters: adapters that sequences refer to by their attribute `adapter`.
            capacity: largest number of sequences in the run at the same time, including sequences added later, which
                may be slightly longer; None = no sequence is added later.
        """
        self._sampling = sampling
        self._max_length = max_length
        self._queue = deque(sequences)
        self._limits = {id(s): self._compute_limit(s) for s in sequences}
        self._longest = max(self._limits.values())
        max_sampled = max(self._limits[id(s)] - len(s.prompt_ids) for s in sequences)
        slots = min(sampling.slots, len(sequences))
        if capacity is not None:
            self._longest = min(self._longest + SPARE_TOKENS, max_length)
            max_sampled = min(sampling.max_completion_tokens, max_length)
            slots = min(sampling.slots, max(capacity, len(sequences)))
        super().__init__(decoder, slots, self._longest, max_sampled, is_eos, fit)
        self._count = self._slots
        # compiled multi-token steps: nothing has to happen between two tokens of a turn
        self._can_step_compiled = (
            decoder.can_sample_steps(sampling)
            and sampling.repetition_penalty == 1
            and not sampling.stop
        )
        if self._can_step_compiled and decoder.can_draft_tokens:
            self._drafts = DraftTable(self._slots)
        if sampling.repetition_penalty != 1:
            self._seen = decoder.reserve_seen_tokens()
        self._drawing_51 = build_drawing_rows([sampling])
        self._step_s = READY_CHECK_S  # seconds per token in the last compiled call
        self._adapter_of = np.full(self._slots, -1, dtype=np.int64)
        if adapters:
            decoder.set_adapters(adapters, self._adapter_of)
        self._prompts = PromptCache(decoder, self._queue, pad_id, fit.advice)

    def _compute_limit(self, sequence: RolloutSequence) -> int:
        """Return the most tokens that a sequence may have, prompt included."""
        return min(
            len(sequence.prompt_ids) + self._sampling.max_completion_tokens, self._max_length
        )

    def play_sequences(self) -> None:
        """Run every sequence to its end."""
        self._start_sequences(list(range(self._slots)))
        while self._count:
            changed, ended = self._step_slots()
            self._start_sequences(ended[: len(self._queue)])
            if changed or self._waiting_on_env:
                self._compact_slots(self._resume_finished_steps())

    def _resume_finished_steps(self) -> list[int]:
        """List the slots to activate next: decodable ones and those whose environments have answered.

        With rejoin 'together', a finished step rejoins only when no other sequence is decodable, so results are
        bit-identical regardless of timing; with 'ready' it rejoins immediately.
        """
        active = self._list_decodable_slots()
        while self._waiting_on_env and (not active or self._sampling.rejoin == "ready"):
            waiting = sorted(self._waiting_on_env)
            if self._sampling.rejoin == "ready":
                if not active:
                    wait_for_any_turn(self._waiting_on_env.values())
                waiting = [slot for slot in waiting if self._waiting_on_env[slot].is_done()]
            ended = [
                slot
                for slot in waiting
                if not self._append_observation(slot, self._waiting_on_env.pop(slot).finish_turn())
            ]
            self._start_sequences(ended[: len(self._queue)])
            active = self._list_decodable_slots()
            if active or (ended and self._reports_ends_early):
                break
        return active

    def _start_sequences(self, slots: list[int]) -> None:
        """Start waiting sequences in free slots."""
        if not slots:
            return
        sequences = [self._queue.popleft() for _ in slots]
        prompts = [read_adapted_prompt(sequence) for sequence in sequences]
        self._prompts.fill_slots(slots, prompts)
        for slot, sequence, (ids, adapter) in zip(slots, sequences, prompts, strict=True):
            self._put_sequence(
                slot, sequence, self._limits[id(sequence)], self._sampling.temperature
            )
            self._adapter_of[slot] = adapter
            if self._seen is not None:
                self._seen[slot] = False
                self._seen[slot, self._to_tensor(ids)] = True

    def _list_slot_arrays(self) -> tuple[np.ndarray, ...]:
        return (*super()._list_slot_arrays(), self._adapter_of)

    def _count_compiled_steps(self) -> int:
        if not self._can_step_compiled:
            return 0
        if not self._waiting_on_env or self._sampling.rejoin == "together":
            return MAX_COMPILED_STEPS
        return min(MAX_COMPILED_STEPS, max(1, int(READY_CHECK_S / self._step_s)))

    def _sample_steps(self, n: int, steps: int) -> None:
        start_time = time.perf_counter()
        super()._sample_steps(n, steps)
        self._step_s = max(
            (time.perf_counter() - start_time) / steps, READY_CHECK_S / MAX_COMPILED_STEPS
        )

    def _find_stopped(self, n: int) -> np.ndarray | None:
        if not self._sampling.stop:
            return None
        actions = [self._tokens[slot, : self._acted[slot]].tolist() for slot in range(n)]
        sequences = self._sequences[:n]
        return np.array(
            [
                s is not None and s.should_stop(ids)
                for s, ids in zip(sequences, actions, strict=True)
            ]
        )

    def _sample_tokens(
        self, tokens: np.ndarray, positions: np.ndarray, n: int, appended: HostAppendedTokens | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `SlotTable._sample_tokens`: one upload, one read-back."""
        drawn = self._uniforms[self._rows[:n], self._sampled[:n]]
        if self._decoder.graphs is not None:
            step = HostStep(
                tokens,
                positions,
                drawn,
                self._drawing_51,
                self._sampling.is_restricted,
                appended,
                self._seen,
            )
            both_2n = self._decoder.sample_with_graphs(step)
            return both_2n[0].astype(np.int64), both_2n[1]
        logits_nV = self._compute_logits(tokens, positions, n, appended)
        if self._seen is not None:
            logits_nV = apply_repetition_penalty(
                logits_nV, self._seen[:n], self._sampling.repetition_penalty
            )
        tokens_n, logprobs_n = self._decoder.draw_tokens(
            logits_nV, self._to_tensor(drawn), self._sampling
        )
        if self._seen is not None:
            self._seen[self._to_tensor(self._rows[:n]), tokens_n] = True
        if tokens_n.device.type == "cpu":
            return tokens_n.numpy(), logprobs_n.numpy()
        # token ids are exact in float64
        both_2n = torch.stack([tokens_n.double(), logprobs_n.double()]).cpu().numpy()
        return both_2n[0].astype(np.int64), both_2n[1]


def create_rollout_backend(
    model: PreTrainedModel,
    *,
    eos_ids: Collection[int],
    pad_id: int,
    max_length: int,
    textless_ids: Collection[int] = (),
    autocast: AutocastPrecision = "none",
) -> RolloutBackend:
    """Create the engine if the decoder supports the model (`rl_core.capabilities`), otherwise transformers' forward
    pass.

    Args:
        eos_ids: tokens that end an action.
        pad_id: any token, used to pad batches.
        max_length: longest prompt and completion together, in tokens.
        textless_ids: tokens that are never sampled (`token_ids.find_textless_ids`).
        autocast: precision in which the trainer multiplies by float32 weights; copies of weights on a CPU follow it.
    """
    autocast = resolve_autocast(autocast, next(model.parameters()).device.type)
    if decoding.check_rollout_decoder(model).allowed:
        return Engine(
            model,
            eos_ids=eos_ids,
            pad_id=pad_id,
            max_length=max_length,
            textless_ids=textless_ids,
            autocast=autocast,
        )
    return TransformersBackend(
        model, eos_ids=eos_ids, pad_id=pad_id, max_length=max_length, textless_ids=textless_ids
    )


class Engine:
    """A `RolloutBackend` over the model's own weights; it samples from them without copying."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        max_length: int,
        textless_ids: Collection[int] = (),
        autocast: AutocastPrecision = "none",
    ) -> None:
        """Bind the model; see `create_rollout_backend` for the arguments."""
        keep_freed_memory()
        limit_openmp_spin()
        self.max_length = min(max_length, find_row_limit(model) or max_length)
        self._model = model
        self._pad_id, self._textless_ids = pad_id, textless_ids
        self._decoder = Decoder(model, textless_ids, autocast)
        # its limit is the number of slots decoded together
        self._fit = MemoryFit("slots of the rollout engine", _MEMORY_ADVICE)
        self._is_running = False
        # True = memory ran out while the cache of the last run was held; each run then gives it back at its end.
        self._gives_cache_back = False
        self.set_end_tokens(eos_ids)
        register_memory_holder(self)

    def release_models(self) -> bool:
        """Release an accelerator's cache between runs, as memory has run out; return whether there was one."""
        if self._is_running or not self._decoder.holds_device_cache:
            return False
        self._decoder.release_cache()
        self._gives_cache_back = True
        return True

    @contextmanager
    def _hold_cache(self) -> Iterator[None]:
        """Hold the cache throughout the context."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            if self._gives_cache_back:
                self._decoder.release_cache()

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Set the tokens that end an action."""
        self._is_eos = np.zeros(self._decoder.vocab_size, dtype=bool)
        self._is_eos[[token for token in eos_ids if token < len(self._is_eos)]] = True

    def disable_cross_row_batching(self) -> None:
        """Make a sequence's numbers independent of the others: bit for bit if the step is compiled."""
        self._decoder.prefills_by_length = True

    def refresh_weights(self) -> None:
        """Do nothing: weights are read where the model keeps them."""

    @contextmanager
    def bind_decoder(self) -> Iterator[Decoder]:
        """Yield the decoder over the current weights, adapters merged, for a run driven by the caller."""
        check_weights(self._model)
        with self._hold_cache(), use_merged_weights(self._model):
            self._decoder.bind_weights()
            yield self._decoder

    def build_request_options(self) -> dict[str, Any]:
        """Build arguments of a `ContinuousBatcher` over this engine's model."""
        return {
            "model": self._model,
            "eos_ids": np.flatnonzero(self._is_eos).tolist(),
            "pad_id": self._pad_id,
            "textless_ids": self._textless_ids,
        }

    def build_run_options(self) -> dict[str, Any]:
        """Build this engine's arguments for an `EngineRun`."""
        return {
            "is_eos": self._is_eos,
            "pad_id": self._pad_id,
            "max_length": self.max_length,
            "fit": self._fit,
        }

    @property
    def supports_adapters(self) -> bool:
        """True if sequences may have their own adapters (see `run_sequences`)."""
        return self._decoder.supports_adapters

    def run_sequences(
        self,
        sequences: Sequence[RolloutSequence],
        sampling: SamplingSettings,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Play every sequence to its end, with the model's adapters merged; unmerge them bit for bit afterwards.

        Sequences with different adapters can be decoded together: set a sequence's attribute `adapter` to an index of
        `adapters` (only if `supports_adapters`). Tokens and log-probabilities are independent of the other sequences.

        If memory runs out, fewer sequences are decoded together, in this and later runs. Tokens do not change,
        because a sequence's tokens depend on its own random numbers alone.
        Raises: OutOfMemory if not even one sequence fits.
        """
        for sequence in sequences:
            check_prompt(sequence, self.max_length)
        if not sequences:
            return
        check_weights(self._model)
        try:
            with self._hold_cache(), use_merged_weights(self._model):
                self._decoder.bind_weights()
                run = EngineRun(
                    self._decoder,
                    sequences,
                    sampling,
                    self._is_eos,
                    self._pad_id,
                    self.max_length,
                    self._fit,
                    adapters,
                )
                run.play_sequences()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"rollouts do not fit into memory ({format_first_line(error)}); lower sampling.slots, "
                f"{_MEMORY_ADVICE}"
            ) from error
