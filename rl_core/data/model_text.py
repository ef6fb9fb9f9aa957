"""Model-written text and values, made safe to tokenise, store and show.

A policy may write anything, and JSON escapes give it what its tokens cannot spell: half of a surrogate pair, NUL,
numbers of thousands of digits, brackets nested a thousand deep. Tokenizers, UTF-8 files, databases and recursive
encoders refuse some of these; `plain_json` and `printable` replace exactly those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

__all__ = ["plain_json", "printable", "without_surrogates"]

MAX_DEPTH = 32  # levels of lists and objects that are kept
MAX_BITS = 1024  # of an integer; Python refuses to write one of more than 4300 digits
LEFT_OUT = "…"


def printable(text: str) -> str:
    """Text with lone surrogates as '?' (no UTF-8 encodes them) and NUL as U+FFFD (PostgreSQL does not store it)."""
    return without_surrogates(text).replace("\0", "\ufffd")


def without_surrogates(text: str) -> str:
    """Text with lone surrogates as '?'; a tokenizer written in Python may decode to them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def plain_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A copy that every JSON writer and reader takes.

    Texts are `printable`; numbers that JSON does not have, and integers above MAX_BITS bits, become texts; what lies
    deeper than `depth` levels is left out; anything else becomes its str().
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Integral):
        number = int(value)
        return number if number.bit_length() <= MAX_BITS else f"(an integer of {number.bit_length()} bits)"
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping | list | tuple) and depth <= 0:
        return LEFT_OUT
    if isinstance(value, Mapping):
        return {printable(str(name)): plain_json(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, depth - 1) for item in value]
    return printable(str(value))
