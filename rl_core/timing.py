"""Where the seconds of an iteration go: named spans that add up, for whoever asks.

Code marks what it does with `with span("reference"):`; `with collected() as seconds:` around it fills a dictionary.
Spans may lie within each other, and each counts its whole length; `INSIDE` names those that do. Work on other threads
is not seen, only the waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["INSIDE", "collected", "count", "span"]

# span -> the span that it lies within; the others share out an iteration between them
INSIDE = {
    "environment": "rollout",
    "states": "reward",
    "reference": "update",
    "measure": "update",
    "optimizer": "update",
}

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)


@contextmanager
def collected() -> Iterator[dict[str, float]]:
    """Seconds (and amounts) by name, of all spans within the block, on this thread."""
    found: dict[str, float] = {}
    token = _seconds.set(found)
    try:
        yield found
    finally:
        _seconds.reset(token)


class span:  # noqa: N801  # reads as a word of the language, and a generator would cost three times as much
    """Counts the seconds of a block under a name."""

    __slots__ = ("_name", "_started")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        count(self._name, time.perf_counter() - self._started)


def count(name: str, amount: float) -> None:
    """Add to what is collected under a name; nothing where nobody collects."""
    found = _seconds.get()
    if found is not None:
        found[name] = found.get(name, 0.0) + amount
