"""Decoding of completions: as they stand after their prompt.

SentencePiece's tokenizers mark a word's space within its token and drop that of a text's first token, so a completion
decoded alone loses its leading space: "2 + 2 =" and "4" for "2 + 2 = 4".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_STARTS = ("\u2581", "\u0120")  # SentencePiece's and byte-level BPE's marks of a space
_NUM_PROBES = 4
_NUM_CONTEXT_TOKENS = 8


class CompletionDecoder:
    """Texts of token ids that follow others."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context_ids: Sequence[int] | None = None
    ) -> None:
        """Find out whether a text depends on what precedes it.

        Args:
            context_ids: tokens as they precede completions, such as the header of a turn; None = a letter.
        """
        self._tokenizer = tokenizer
        if context_ids is None:
            context_ids = tokenizer.encode("a", add_special_tokens=False)
        context = list(context_ids)[-_NUM_CONTEXT_TOKENS:]
        self._context_ids: list[int] = []
        self._context_text = ""
        vocabulary = tokenizer.get_vocab()
        starts = (
            number
            for token, number in vocabulary.items()
            if token[:1] in _WORD_STARTS and token[1:].isalpha()
        )
        probes = [[number] for number in heapq.nsmallest(_NUM_PROBES, starts)]
        if any(self._decode_after(context, ids) != self.decode_start(ids) for ids in probes):
            self._context_ids, self._context_text = context, self.decode_start(context)
        prefixed = tokenizer.encode("a", add_special_tokens=False)
        # True = encoding a text alone adds the space that decoding it in context shows
        self.adds_space: bool = bool(self._context_ids) and self.decode_ids(prefixed) == " a"

    def decode_ids(self, ids: Sequence[int]) -> str:
        """Return the text of these tokens after their context, special tokens included."""
        if not self._context_ids:
            return self.decode_start(ids)
        text = self.decode_start([*self._context_ids, *ids])
        if not text.startswith(self._context_text):
            return self.decode_start(ids)
        return text[len(self._context_text) :]

    def _decode_after(self, context: Sequence[int], ids: Sequence[int]) -> str:
        known = self.decode_start(context)
        text = self.decode_start([*context, *ids])
        return text[len(known) :] if text.startswith(known) else self.decode_start(ids)

    def decode_start(self, ids: Sequence[int]) -> str:
        """Return the text of these tokens at the start of a text."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
