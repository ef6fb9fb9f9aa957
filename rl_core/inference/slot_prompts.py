"""Prompts of served requests into the slots of a decoder's cache; a beginning that some slot holds is copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.data.batches import micro_batches, pack, pad_rows
from rl_core.inference.decoder import Decoder
from rl_core.memory import MemoryFit

__all__ = ["SlotPrompts"]

_ROWS = 512  # tokens of one pass of compiled code, at least one prompt; more at once are not faster
_WORTH_WAITING = 16  # tokens that a prompt has in common with one that is read first, so that it is copied from there
_PADDED_TOKENS = 8192  # of one pass of torch's kernels
_WIDTH = 32  # their prompts are padded to a multiple of it, so that a row's width does not depend on other rows


@dataclass(frozen=True, slots=True)
class _Reading:
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

    def __init__(self, decoder: Decoder, lengths: np.ndarray, context: int, pad_id: int, advice: str) -> None:
        """
        Args:
            lengths: int64 [slots], tokens of each slot in the cache, those of ended sequences too; written by the
                caller where a slot's tokens change, and by `read`.
            context: longest prompt; `pad_id`: any token; `advice`: see `MemoryFit`.
        """
        self._decoder, self._lengths, self._pad_id, self._advice = decoder, lengths, pad_id, advice
        self._ids = np.zeros((len(lengths), context), dtype=np.int32)  # of the sequence in a slot, or before
        self._counts = np.zeros(len(lengths), dtype=np.int64)  # of them; those beyond `lengths` are not in the cache

    @property
    def by_slot(self) -> tuple[np.ndarray, ...]:
        """Arrays whose first axis is the slots; they go where a slot's keys and values go."""
        return self._ids, self._counts

    def extend(self, slot: int, tokens: np.ndarray) -> None:
        """An answer behind the prompt, which may be the beginning of the next prompt of a conversation.

        What stands behind tokens that were not told of is not kept.
        """
        count = int(self._counts[slot])
        if count and count + len(tokens) == self._lengths[slot] + 1:  # the newest one is not in the cache
            self._ids[slot, count : count + len(tokens)] = tokens
            self._counts[slot] += len(tokens)

    def forget(self, slot: int) -> None:
        """The slot's tokens are other ones from now on."""
        self._counts[slot] = 0

    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], most: int) -> list[int]:
        """Prompts into slots, all but the last token of each, but at most so many that have to be computed.

        Returns: tokens of each in its slot. Raises: OutOfMemory.
        """
        if not self._decoder.can_take_in:
            return self._prefill(slots, [tuple(prompt[: min(most, len(prompt) - 1)]) for prompt in prompts])
        waiting = [(slot, np.array(prompt, dtype=np.int32)) for slot, prompt in zip(slots, prompts, strict=True)]
        while waiting:
            now: list[_Reading] = []
            later: list[tuple[int, np.ndarray]] = []
            for slot, prompt in waiting:
                source, common = self._longest(slot, prompt)
                if any(_num_common(prompt, other.prompt[: other.end]) >= common + _WORTH_WAITING for other in now):
                    later.append((slot, prompt))
                else:
                    now.append(_Reading(slot, prompt, source, common, min(common + most, len(prompt) - 1)))
            self._take_in(now)
            waiting = later
        return [int(self._lengths[slot]) for slot in slots]

    def _longest(self, slot: int, prompt: np.ndarray) -> tuple[int, int]:
        """The slot with the longest beginning of a prompt, all but its last token, and the length; rather its own."""
        count = len(prompt) - 1
        if not count:
            return slot, 0
        is_other = self._ids[:, :count] != prompt[:count]
        alike = np.where(is_other.any(axis=1), is_other.argmax(axis=1), count)
        alike = np.minimum(alike, np.minimum(self._counts, self._lengths))
        best = int(alike.argmax())
        return (slot if alike[slot] == alike[best] else best), int(alike[best])

    def _take_in(self, readings: Sequence[_Reading]) -> None:
        """By compiled code: prompts of any lengths in one pass, without padding."""
        for reading in readings:
            self._counts[reading.slot] = 0  # until it is read
        parts: dict[tuple[int, int], list[int]] = {}  # slot and number of its tokens -> slots that get them
        for reading in readings:
            if reading.common and reading.source != reading.slot:
                parts.setdefault((reading.source, reading.common), []).append(reading.slot)
        taken = [self._decoder.taken(*part) for part in parts]  # all are read before any is written
        for slots, kv in zip(parts.values(), taken, strict=True):
            self._decoder.fill(torch.tensor(slots), kv, torch.zeros(len(slots), dtype=torch.int64))
        rest = [reading for reading in readings if reading.end > reading.common]
        lengths = [reading.end - reading.common for reading in rest]

        def take_in(batch: list[int]) -> None:
            some = [rest[index] for index in batch]
            tokens = np.concatenate([r.prompt[r.common : r.end] for r in some]).astype(np.int64)
            positions = np.concatenate([np.arange(r.common, r.end) for r in some])
            slots = np.repeat([r.slot for r in some], [lengths[index] for index in batch])
            self._decoder.take_in(*map(torch.from_numpy, (tokens, positions, slots)))

        batches = pack(lengths, max([_ROWS, *lengths]))
        MemoryFit("prompts", self._advice).compute(batches, take_in, lengths=lengths)
        for reading in readings:
            self._ids[reading.slot, : len(reading.prompt)] = reading.prompt
            self._counts[reading.slot], self._lengths[reading.slot] = len(reading.prompt), reading.end

    def _prefill(self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> list[int]:
        """By torch's kernels: prompts of about the same length in one pass."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, prompt in zip(slots, prompts, strict=True):
            if prompt:
                slots_of.setdefault(prompt, []).append(slot)
        by_width: dict[int, list[tuple[int, ...]]] = {}
        for prompt in slots_of:
            width = min(-(-len(prompt) // _WIDTH) * _WIDTH, self._decoder.max_length)
            by_width.setdefault(width, []).append(prompt)
        fit = MemoryFit("prompts", self._advice)
        for width, rows in by_width.items():
            prefill = functools.partial(self._prefill_batch, slots_of, rows, width)
            batches = micro_batches([width] * len(rows), _PADDED_TOKENS)
            fit.compute(batches, prefill, lengths=[width] * len(rows))
        return [len(prompt) for prompt in prompts]

    def _prefill_batch(
        self, slots_of: dict[tuple[int, ...], list[int]], rows: list[tuple[int, ...]], width: int, batch: list[int]
    ) -> None:
        device = self._decoder.device
        padded = [[*rows[index], *[self._pad_id] * (width - len(rows[index]))] for index in batch]
        kv = self._decoder.prefill(pad_rows(padded, self._pad_id).to(device))
        pairs = [(slot, row) for row, index in enumerate(batch) for slot in slots_of[rows[index]]]
        targets, sources = (torch.tensor(side).to(device) for side in zip(*pairs, strict=True))
        self._decoder.fill(targets, kv, sources)


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two prompts begin with alike."""
    size = min(len(one), len(other))
    is_other = one[:size] != other[:size]
    return int(is_other.argmax()) if is_other.any() else size
