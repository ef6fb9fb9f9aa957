"""Prompts of served requests into the slots of a decoder's cache.

N tokens of all prompts together, M prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from rl_core.data.batches import micro_batches, pack, pad_rows
from rl_core.inference.decoder import Decoder
from rl_core.memory import MemoryFit

__all__ = ["SlotPrompts"]

_ROWS = 512  # tokens of one pass of compiled code, at least one prompt; more at once are not faster
_PADDED_TOKENS = 8192  # of one pass of torch's kernels
_WIDTH = 32  # their prompts are padded to a multiple of it, so that a row's width does not depend on other rows

Prompt = tuple[int, ...]


class SlotPrompts:
    """Keys and values of prompts, each computed once and copied to every slot that begins with it.

    A slot's numbers do not depend on the prompts that are read with it: to the last bit where compiled code reads them.
    """

    def __init__(self, decoder: Decoder, pad_id: int, advice: str) -> None:
        """`pad_id`: any token; `advice`: see `MemoryFit`."""
        self._decoder, self._pad_id, self._advice = decoder, pad_id, advice

    def read(self, slots: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Every token of each prompt into its slot. Raises: OutOfMemory."""
        slots_of: dict[Prompt, list[int]] = {}
        for slot, prompt in zip(slots, prompts, strict=True):
            if prompt:
                slots_of.setdefault(prompt, []).append(slot)
        if not slots_of:
            return
        if self._decoder.can_take_in:
            self._take_in(slots_of)
        else:
            self._prefill(slots_of)

    def _take_in(self, slots_of: dict[Prompt, list[int]]) -> None:
        """By compiled code: prompts of any lengths in one pass, without padding, into the first slot of each."""
        rows = list(slots_of)
        lengths = [len(prompt) for prompt in rows]

        def take_in(batch: list[int]) -> None:
            tokens = np.array([token for row in batch for token in rows[row]], dtype=np.int64)
            positions = np.concatenate([np.arange(lengths[row]) for row in batch])
            firsts = np.repeat([slots_of[rows[row]][0] for row in batch], [lengths[row] for row in batch])
            self._decoder.take_in(*map(torch.from_numpy, (tokens, positions, firsts)))

        batches = pack(lengths, max([_ROWS, *lengths]))
        MemoryFit("prompts", self._advice).compute(batches, take_in, lengths=lengths)
        for prompt, (first, *others) in slots_of.items():
            if others:
                self._decoder.move(torch.tensor([first] * len(others)), torch.tensor(others), len(prompt))

    def _prefill(self, slots_of: dict[Prompt, list[int]]) -> None:
        """By torch's kernels: prompts of about the same length in one pass."""
        by_width: dict[int, list[Prompt]] = {}
        for prompt in slots_of:
            width = min(-(-len(prompt) // _WIDTH) * _WIDTH, self._decoder.max_length)
            by_width.setdefault(width, []).append(prompt)
        fit = MemoryFit("prompts", self._advice)
        for width, rows in by_width.items():
            prefill = functools.partial(self._prefill_batch, slots_of, rows, width)
            fit.compute(
                micro_batches([width] * len(rows), _PADDED_TOKENS), prefill, lengths=[width] * len(rows)
            )  # fmt: skip

    def _prefill_batch(
        self, slots_of: dict[Prompt, list[int]], rows: list[Prompt], width: int, batch: list[int]
    ) -> None:
        device = self._decoder.device
        padded = [[*rows[index], *[self._pad_id] * (width - len(rows[index]))] for index in batch]
        kv = self._decoder.prefill(pad_rows(padded, self._pad_id).to(device))
        pairs = [(slot, row) for row, index in enumerate(batch) for slot in slots_of[rows[index]]]
        targets, sources = (torch.tensor(side).to(device) for side in zip(*pairs, strict=True))
        self._decoder.fill(targets, kv, sources)
