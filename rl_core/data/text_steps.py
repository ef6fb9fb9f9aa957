"""Steps of a text: where they end, and which token of the text completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rl_core.errors import DataError


class TextStep(NamedTuple):
    """Step of a text."""

    text: str  # without the delimiter
    end: int  # characters of the whole text up to its end, delimiter included


def split_into_steps(text: str, delimiter: str) -> list[TextStep]:
    """Split a text after each delimiter. What is blank belongs to the step before it, or to the first one.

    Blank steps would otherwise be a way to have more of them. A text without anything else is one step.
    """
    if not delimiter:
        raise DataError("delimiter: is empty, so it ends no step")
    steps: list[TextStep] = []
    position = 0
    for part in text.split(delimiter):
        position = min(len(text), position + len(part) + len(delimiter))
        if part.strip():
            steps.append(TextStep(part, position))
        elif steps:
            steps[-1] = steps[-1]._replace(end=position)
    if not steps:
        return [TextStep(text.strip(), len(text))]
    return steps


def find_completing_tokens(
    ids: Sequence[int], ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the index of the token that completes each number of characters; the last token where none does.

    Args:
        ends: ascending numbers of characters of `decode(ids)`.
        decode: text of the first tokens; it does not get shorter with more of them, but for half a character.
    Raises: DataError without a token.
    """
    if not len(ids):
        raise DataError("ids: a step without tokens has no end")
    places: list[int] = []
    low = 0
    for end in ends:
        high = len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        places.append(low)
    return places
