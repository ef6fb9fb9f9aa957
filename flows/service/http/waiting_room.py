"""Results that clients wait for: one thread looks at the store for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from flows.service.store import ServiceStore
from rl_core.errors import BackendError

__all__ = ["WaitingRoom"]

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0  # without any change of the store
AFTER_A_FAULT_SECONDS = 1.0


class WaitingRoom:
    """Wakes those who wait for a request, or for any request of a target."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cursor = 0
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)  # by request and by target
        self._somebody_waits, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="service-results", daemon=True)

    def open(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._cursor = self._store.finish_cursor()  # before anybody looks, so that nothing is missed
        self._thread.start()

    def close(self) -> None:
        """Wake everybody, and end."""
        self._is_over.set()
        self._somebody_waits.set()
        for events in list(self._waiting.values()):
            for event in events:
                event.set()

    @property
    def is_over(self) -> bool:
        """True = the server ends; nobody should wait any more."""
        return self._is_over.is_set()

    @contextlib.contextmanager
    def expecting(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set when the request, or one of the target, becomes final from now on."""
        event = asyncio.Event()
        self._waiting[name].add(event)
        self._somebody_waits.set()
        try:
            yield event
        finally:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _wake(self, names: list[str]) -> None:
        for name in names:
            for event in self._waiting.get(name, ()):
                event.set()

    def _watch(self) -> None:
        """In a thread: what has become final since the last look."""
        while not self._is_over.is_set():
            try:
                if not self._waiting:
                    self._somebody_waits.clear()
                    if not self._waiting:
                        self._somebody_waits.wait()
                        continue
                seen = self._store.changes()
                found, self._cursor = self._store.finished_since(self._cursor)
                if found and self._loop is not None:
                    names = {name for pair in found for name in pair}
                    self._loop.call_soon_threadsafe(self._wake, list(names))
                else:
                    self._store.wait_for_change(seen, LOOK_SECONDS)
            except BackendError as error:
                log.warning("%s", error)
                time.sleep(AFTER_A_FAULT_SECONDS)
            except RuntimeError:  # the event loop is closed
                return
