"""Wall-clock profile of an iteration: seconds by named span.

Code is marked by `with span("reference"):`; an enclosing `with collected() as seconds:` fills a dictionary. Nested
spans each count their full duration; `INSIDE` lists them. Work on other threads is not recorded, only waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# nested span -> enclosing span; the others partition an iteration
ENCLOSING_SPANS = {
    "environment": "rollout",
    "weight_sync": "rollout",
    "states": "reward",
    "reference": "update",
    "measure": "update",
    "optimizer": "update",
    "numerics": "update",
}

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)


@contextmanager
def collect_seconds() -> Iterator[dict[str, float]]:
    """Seconds (and counts) by name, of all spans in the block on this thread."""
    found: dict[str, float] = {}
    token = _seconds.set(found)
    try:
        yield found
    finally:
        _seconds.reset(token)


class span:  # noqa: N801  # lower case like a context manager function; a generator-based one takes three times as long
    """Context manager that adds the seconds of its block to a name."""

    __slots__ = ("_name", "_started")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        add_to_total(self._name, time.perf_counter() - self._started)


def add_to_total(name: str, amount: float) -> None:
    """Add to a name's total; no-op outside `collected`."""
    found = _seconds.get()
    if found is not None:
        found[name] = found.get(name, 0.0) + amount
