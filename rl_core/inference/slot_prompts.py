"""Prompt caching over slots: read prompts into cache slots and copy prefixes that a slot already holds.

T tokens of a padded prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.data.batches import pack_sequences, pad_rows, plan_micro_batches
from rl_core.inference.decoder import Decoder
from rl_core.out_of_memory import MemoryFit

# tokens per pass of the compiled kernels, at least one prompt; larger passes are not faster
_PASS_TOKENS = 512
# A prompt waits for another of the same batch if their common prefix is longer than the cached one by this much.
_MIN_SHARED_TOKENS = 16
_PADDED_TOKENS = 8192  # padded tokens per pass of torch's kernels
# Torch's kernels get prompts padded to a multiple of this, so a row's width does not depend on the other rows.
_PAD_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class _PromptRead:
    """A prompt to read into a slot.

    Tokens 0..common-1 are copied from slot `source`; tokens common..end-1 are computed.
    """

    slot: int
    prompt: np.ndarray  # int32
    source: int
    common: int
    end: int


class SlotPrompts:
    """The prompts whose keys and values are held in cache slots.

    The compiled kernels compute a token's numbers from the tokens before it in its slot alone, bit for bit,
    regardless of which prompts are read together. A prompt's longest prefix that is already in the cache, from a
    running or a finished request, is therefore copied. Torch's kernels compute equal prompts of one batch once and
    cache nothing.
    """

    def __init__(
        self, decoder: Decoder, lengths: np.ndarray, context: int, pad_id: int, advice: str
    ) -> None:
        """Create the table for empty slots.

        Args:
            lengths: int64 [slots], cached tokens of each slot, including finished sequences. Shared with the caller:
                `read_prompts` writes it, and so does the caller when a slot's tokens change.
            context: longest prompt in tokens.
            pad_id: any token.
            advice: see `MemoryFit`.
        """
        self._decoder, self._lengths, self._pad_id, self._advice = decoder, lengths, pad_id, advice
        # tokens of the sequence in each slot, or of its last one
        self._ids = np.zeros((len(lengths), context), dtype=np.int32)
        # valid entries per row of _ids; those beyond `lengths` are not in the cache
        self._counts = np.zeros(len(lengths), dtype=np.int64)

    @property
    def slot_arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays whose first axis is the slots; they move with a slot's keys and values."""
        return self._ids, self._counts

    def extend_slot(self, slot: int, tokens: np.ndarray) -> None:
        """Append an answer to the slot's prompt: it may begin the next prompt of a conversation.

        Ignore the answer if the slot holds tokens that were never reported.
        """
        count = int(self._counts[slot])
        # the newest token is not in the cache yet
        if count and count + len(tokens) == self._lengths[slot] + 1:
            self._ids[slot, count : count + len(tokens)] = tokens
            self._counts[slot] += len(tokens)

    def invalidate_slot(self, slot: int) -> None:
        """Forget the slot's cached prompt."""
        self._counts[slot] = 0

    def read_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], max_computed_tokens: int
    ) -> list[int]:
        """Read all but the last token of each prompt into its slot; compute at most `max_computed_tokens` of each.

        Returns: cached tokens of each slot.
        Raises: OutOfMemory.
        """
        if not self._decoder.can_append_tokens:
            beginnings = [
                tuple(prompt[: min(max_computed_tokens, len(prompt) - 1)]) for prompt in prompts
            ]
            return self._prefill_prompts(slots, beginnings)
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
                    end = min(common + max_computed_tokens, len(prompt) - 1)
                    now.append(_PromptRead(slot, prompt, source, common, end))
            self._read_with_kernels(now)
            waiting = later
        return [int(self._lengths[slot]) for slot in slots]

    def _find_longest_prefix(self, slot: int, prompt: np.ndarray) -> tuple[int, int]:
        """Return the slot with the longest cached prefix of a prompt (excluding its last token) and the prefix
        length.

        Prefer the prompt's target slot among equals.
        """
        count = len(prompt) - 1
        if not count:
            return slot, 0
        differs = self._ids[:, :count] != prompt[:count]
        num_common = np.where(differs.any(axis=1), differs.argmax(axis=1), count)
        num_common = np.minimum(num_common, np.minimum(self._counts, self._lengths))
        best = int(num_common.argmax())
        return (slot if num_common[slot] == num_common[best] else best), int(num_common[best])

    def _read_with_kernels(self, readings: Sequence[_PromptRead]) -> None:
        """Read prompts of any lengths with the compiled kernels, without padding."""
        for reading in readings:
            self._counts[reading.slot] = 0  # unusable as a source until it is read
        # (source slot, common tokens) -> target slots
        targets_by_prefix: dict[tuple[int, int], list[int]] = {}
        for reading in readings:
            if reading.common and reading.source != reading.slot:
                targets_by_prefix.setdefault((reading.source, reading.common), []).append(
                    reading.slot
                )
        # copy all prefixes before any slot is overwritten
        prefixes = [self._decoder.copy_slot_prefix(*part) for part in targets_by_prefix]
        for slots, kv in zip(targets_by_prefix.values(), prefixes, strict=True):
            self._decoder.fill_slots(
                torch.tensor(slots), kv, torch.zeros(len(slots), dtype=torch.int64)
            )
        to_compute = [reading for reading in readings if reading.end > reading.common]
        lengths = [reading.end - reading.common for reading in to_compute]

        def append_batch(batch: list[int]) -> None:
            batch_readings = [to_compute[index] for index in batch]
            tokens = np.concatenate([r.prompt[r.common : r.end] for r in batch_readings]).astype(
                np.int64
            )
            positions = np.concatenate([np.arange(r.common, r.end) for r in batch_readings])
            slots = np.repeat([r.slot for r in batch_readings], [lengths[index] for index in batch])
            self._decoder.append_tokens(*map(torch.from_numpy, (tokens, positions, slots)))

        batches = pack_sequences(lengths, max([_PASS_TOKENS, *lengths]))
        MemoryFit("prompts", self._advice).compute_batches(batches, append_batch, lengths=lengths)
        for reading in readings:
            self._ids[reading.slot, : len(reading.prompt)] = reading.prompt
            self._counts[reading.slot] = len(reading.prompt)
            self._lengths[reading.slot] = reading.end

    def _prefill_prompts(
        self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """Read prompts with torch's kernels, those of about the same length in one pass."""
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
        target_slots, source_rows = (
            torch.tensor(side).to(device) for side in zip(*pairs, strict=True)
        )
        self._decoder.fill_slots(target_slots, kv, source_rows)


def _count_common_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix of two prompts."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size
