"""Steps of a text: where they end, and which token of the text completes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rl_core.data.files import BadRow, describe_value
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

    The text of the first tokens may end within a character, whose bytes are then shown in another way: by one mark, or
    by one for each byte, also those of complete characters before it (byte fallback). Such places are passed over.

    Args:
        ends: ascending numbers of characters of `decode(ids)`.
        decode: text of the first tokens.
    Raises: DataError without a token.
    """
    if not len(ids):
        raise DataError("ids: a step without tokens has no end")
    text = decode(ids)

    @functools.cache
    def decode_through(place: int) -> str:
        return decode(ids[: place + 1])

    places: list[int] = []
    low = 0
    for end in ends:
        first, stop = low, len(ids) - 1
        low = stop  # the first place so far that completes the end
        while first < stop:
            middle = place = (first + stop) // 2
            while place < stop and not text.startswith(decode_through(place)):
                place += 1
            if place < stop and len(decode_through(place)) < end:
                first = place + 1
            else:
                low = place if place < stop else low
                stop = middle
        # Before it are places within a character only, of which one may have completed the end already.
        low = next((p for p in range(first, low) if decode_through(p)[:end] == text[:end]), low)
        places.append(low)
    return places


def validate_labelled_steps(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the completion of a row of stepwise supervision, and the end (characters) and label (0 to 1) of each step.

    A step that does not end with a line break is followed by one, but for the last.
    Raises: BadRow.
    """
    steps, labels = row["completions"], row["labels"]
    if row.get("step_separator") not in (None, "\n"):
        raise BadRow("step_separator", "must be a line break, which ends a step here")
    if not steps or len(steps) != len(labels):
        raise BadRow("labels", f"has {len(labels)} labels for {len(steps)} completions")
    text, ends = "", []
    for number, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if not isinstance(step, str) or not step.strip():
            raise BadRow(f"completions[{number}]", "must be a text that is not blank")
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise BadRow(
                f"labels[{number}]",
                f"must be true, false, or a share from 0 to 1, found {describe_value(label)}",
            )
        text += step if step.endswith("\n") or number == len(steps) - 1 else f"{step}\n"
        ends.append(len(text))
    return {
        "completion": text,
        "step_ends": ends,
        "step_labels": [float(label) for label in labels],
    }
