"""Text of tokens that come one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_core.inference.stop_texts import cut_at_stop

__all__ = ["TextStream"]

_BROKEN = "\ufffd"  # decoded from bytes that are no character, or not yet


class TextStream:
    """Parts of a text as soon as they are certain: whole characters, and no beginning of a stop text.

    Decoded a few tokens at a time, with those before them, because what a token stands for depends on them in some
    tokenizers. The parts together are the text of all tokens, cut at a stop text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._before = self._read = 0  # tokens whose text is known; those from `before` on are decoded with new ones
        self._held = ""  # known text that may begin a stop text
        self._told = ""
        self._is_over = False

    def add(self, ids: Sequence[int]) -> str:
        """The part that further tokens make certain."""
        self._ids += ids
        known = self._decode(self._ids[self._before : self._read])
        text = self._decode(self._ids[self._before :])
        if not text.startswith(known) or text.endswith(_BROKEN):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return self._certain(text[len(known) :])

    def end(self) -> str:
        """The rest, once all tokens are known."""
        if self._is_over:
            return ""
        whole = cut_at_stop(self._decode(self._ids), self._stops)
        rest = whole.removeprefix(self._told) if whole.startswith(self._told) else ""
        self._told, self._is_over = self._told + rest, True
        return rest

    def _certain(self, new: str) -> str:
        if self._is_over:
            return ""
        text = self._held + new
        cut = cut_at_stop(text, self._stops)
        if len(cut) < len(text):
            self._is_over, self._held = True, ""
        else:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            cut, self._held = text[: len(text) - held], text[len(text) - held :]
        self._told += cut
        return cut


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop text."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
