"""Wall-clock profile of an iteration: seconds by named span.

Mark code with `with span("reference"):`; an enclosing `with collect_seconds() as seconds:` fills a dictionary. Nested
spans each count their full duration; `ENCLOSING_SPANS` lists them. Work on other threads is not recorded, only waiting
for it.
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
    """Yield a dictionary that collects seconds (and counts) by name for all spans in the block on this thread."""
    totals: dict[str, float] = {}
    token = _seconds.set(totals)
    try:
        yield totals
    finally:
        _seconds.reset(token)


# Lower case like a context manager function; a generator-based one takes three times as long.
class span:  # noqa: N801
    """Context manager that adds the seconds of its block to a name."""

    __slots__ = ("_name", "_started")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        add_to_total(self._name, time.perf_counter() - self._started)


def add_to_total(name: str, amount: float) -> None:
    """Add to a name's total; no-op outside `collect_seconds`."""
    totals = _seconds.get()
    if totals is not None:
        totals[name] = totals.get(name, 0.0) + amount
