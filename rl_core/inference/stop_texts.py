"""Stop texts: the test for one among the newest tokens, and the text before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["cut_at_stop", "stop_test"]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def stop_test(decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """The test for a stop text among the newest tokens; None = there are no such texts."""
    if not stops:
        return None
    # A token has at least one byte, a character at most four; decoding may strip the first of them.
    longest = 4 * max(map(len, stops)) + 8

    def has_stop(ids: list[int]) -> bool:
        text = decode(ids[-longest:])
        return any(stop in text for stop in stops)

    return has_stop
