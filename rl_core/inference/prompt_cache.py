"""Keys and values of prompts: each prompt is prefilled once and copied to every sequence that begins with it."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_core.data.batches import micro_batches, pad_rows
from rl_core.inference.decoder import Decoder
from rl_core.inference.sampling import RolloutSequence
from rl_core.memory import MemoryFit

__all__ = ["AdaptedPrompt", "PromptCache", "prompt_of"]

_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
_LOOKAHEAD_TOKENS = 1024  # a refill prefills prompts of waiting sequences with it, up to this many tokens


class AdaptedPrompt(NamedTuple):
    """Tokens and the adapter that reads them."""

    ids: tuple[int, ...]
    adapter: int = -1  # below 0 = none


def prompt_of(sequence: RolloutSequence) -> AdaptedPrompt:
    """Prompt of a sequence, with its adapter."""
    return AdaptedPrompt(tuple(sequence.prompt_ids), getattr(sequence, "adapter", -1))


class PromptCache:
    """Prefilled prompts of the sequences in a queue, kept until the last of them has begun."""

    def __init__(self, decoder: Decoder, queue: deque[RolloutSequence], pad_id: int, advice: str) -> None:
        """`queue`: the sequences that have not begun, which the caller takes out; `advice`: see `MemoryFit`."""
        self._decoder, self._queue, self._pad_id, self._advice = decoder, queue, pad_id, advice
        self._prefilled: dict[AdaptedPrompt, tuple[torch.Tensor, int]] = {}  # -> (keys and values, row)
        self._waiting = Counter(map(prompt_of, queue))  # sequences that have not begun

    def fill(self, slots: Sequence[int], prompts: Sequence[AdaptedPrompt]) -> None:
        """Copy all but the last token of each prompt into its slot."""
        self._prefill(prompts)
        by_batch: dict[int, tuple[torch.Tensor, list[tuple[int, int]]]] = {}
        for slot, prompt in zip(slots, prompts, strict=True):
            if len(prompt.ids) > 1:
                kv, row = self._prefilled[prompt]
                by_batch.setdefault(id(kv), (kv, []))[1].append((slot, row))
            self._waiting[prompt] -= 1
            if not self._waiting[prompt]:
                self._prefilled.pop(prompt, None)
        for kv, pairs in by_batch.values():
            MemoryFit("prompts", self._advice).compute([pairs], functools.partial(self._copy, kv))

    def expect(self, sequence: RolloutSequence) -> None:
        """One more sequence will begin."""
        self._waiting[prompt_of(sequence)] += 1

    def forget(self) -> None:
        """Let go of what was prefilled: the weights have changed."""
        self._prefilled.clear()

    def _copy(self, kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy prefilled prompts into slots: (slot, row of `kv`) each."""
        slots, rows = (torch.tensor(side).to(self._decoder.device) for side in zip(*pairs, strict=True))
        self._decoder.fill(slots, kv, rows)

    def _prefill(self, prompts: Sequence[AdaptedPrompt]) -> None:
        """Prefill all but the last token of these prompts, where not done yet, and of some of the queue's next ones."""
        missing = [p for p in dict.fromkeys(prompts) if len(p.ids) > 1 and p not in self._prefilled]
        if not missing:
            return
        total = sum(len(prompt.ids) for prompt in missing)
        wanted = dict.fromkeys(missing)
        for prompt in map(prompt_of, self._queue):
            if prompt in wanted or prompt in self._prefilled or len(prompt.ids) < 2:
                continue
            total += len(prompt.ids)
            if total > _LOOKAHEAD_TOKENS:
                break
            wanted[prompt] = None
        by_adapter: dict[int, list[AdaptedPrompt]] = {}
        for prompt in wanted:
            by_adapter.setdefault(prompt.adapter, []).append(prompt)
        for adapter, some in by_adapter.items():
            if self._decoder.prefills_by_length:
                for length in dict.fromkeys(len(prompt.ids) for prompt in some):
                    self._prefill_all([prompt for prompt in some if len(prompt.ids) == length], adapter)
            else:
                self._prefill_all(some, adapter)

    def _prefill_all(self, missing: Sequence[AdaptedPrompt], adapter: int) -> None:
        """Prefill prompts of one adapter, in batches."""
        lengths = [len(prompt.ids) - 1 for prompt in missing]

        def prefill(rows: list[int]) -> None:
            ids_MT = pad_rows([list(missing[i].ids[:-1]) for i in rows], self._pad_id).to(self._decoder.device)
            kv = self._decoder.prefill(ids_MT, adapter)
            for row, index in enumerate(rows):
                self._prefilled[missing[index]] = (kv, row)

        MemoryFit("prompts", self._advice).compute(micro_batches(lengths, _PREFILL_TOKENS), prefill, lengths=lengths)
