"""Results that clients wait for: one thread looks at the store for all of them, and brings the results with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from flows.service.http.disk_wait import DiskWait
from flows.service.store import ServiceStore, StoredRequest
from rl_core.errors import BackendError

__all__ = ["WaitingRoom"]

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0  # without any change of the store
AFTER_A_FAULT_SECONDS = 1.0
SOON_SECONDS = 10.0  # after an acceptance, in which its result is looked for though nobody waits yet
MOST_IDS = 100_000  # requests of which it is remembered that they are open, or final and on the disk
MOST_BYTES = 64 << 20  # of results that are held, the newest
LARGE = 1 << 20  # bytes of a result that is read again when it is asked for


class WaitingRoom:
    """Wakes those who wait for a request, or for any request of a target. All but the thread is of the event loop."""

    def __init__(self, store: ServiceStore, disk: DiskWait) -> None:
        self._store, self._disk = store, disk
        self._cursor = 0
        self.told = 0  # place in the order of finishing up to which everything is on the disk
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)  # by request and by target
        self._open: OrderedDict[str, str] = OrderedDict()  # accepted here and not seen final since -> owner
        self._final: OrderedDict[str, None] = OrderedDict()  # seen final, and on the disk
        self._results: OrderedDict[str, StoredRequest] = OrderedDict()
        self._bytes = 0
        self._until = 0.0  # results are looked for though nobody waits; monotonic
        self._is_needed, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="service-results", daemon=True)

    def open(self) -> None:
        """Begin, in the running event loop."""
        self._cursor = self.told = self._store.finish_cursor()  # before anybody looks, so that nothing is missed
        self._thread.start()

    def close(self) -> None:
        """Wake everybody, and end."""
        self._is_over.set()
        self._is_needed.set()
        for events in list(self._waiting.values()):
            for event in events:
                event.set()
        if self._thread.is_alive():
            self._thread.join()  # a look at a store that is closed would open it again

    @property
    def is_over(self) -> bool:
        """True = the server ends; nobody should wait any more."""
        return self._is_over.is_set()

    @contextlib.contextmanager
    def expecting(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set when the request, or one of the target, becomes final from now on."""
        event = asyncio.Event()
        self._waiting[name].add(event)
        self._is_needed.set()
        try:
            yield event
        finally:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    # -- what is known without a look at the store ---------------------------------------------------------------------

    def accepted(self, request: StoredRequest) -> None:
        """Note a request that was accepted here: its result will be asked for."""
        if request.is_final or request.request_id in self._final:  # the worker may be faster
            return
        _remember(self._open, request.request_id, request.owner)
        self._until = time.monotonic() + SOON_SECONDS
        self._is_needed.set()

    def owner_of_open(self, request_id: str) -> str | None:
        """The owner of a request that has no result yet; None = the store has to be asked."""
        return self._open.get(request_id)

    def doubt(self, request_id: str) -> None:
        """Have the store asked: a result may have been missed, where it expired or the disk refused."""
        self._open.pop(request_id, None)

    def result(self, request_id: str) -> StoredRequest | None:
        """A request that is final and on the disk, if it is held here."""
        return self._results.get(request_id)

    def is_told(self, request_id: str) -> bool:
        """True = that it is final is on the disk."""
        return request_id in self._final

    def forget(self, request_ids: Iterable[str]) -> None:
        """Results that the store has forgotten."""
        for request_id in request_ids:
            if (found := self._results.pop(request_id, None)) is not None:
                self._bytes -= len(found.answer or b"")

    # -- results ------------------------------------------------------------------------------------------------------

    def _arrived(
        self, found: Sequence[tuple[str, str]], cursor: int, results: Sequence[StoredRequest], error: Exception | None
    ) -> None:
        """Note what has become final, and wake who waits; they ask the store for themselves where the disk refused."""
        if error is None:
            self.told = cursor
            for result in results:
                self._hold(result)
        for request_id, _ in found:
            self._open.pop(request_id, None)
            if error is None:
                _remember(self._final, request_id, None)
        for name in {name for pair in found for name in pair}:
            for event in self._waiting.get(name, ()):
                event.set()

    def _hold(self, result: StoredRequest) -> None:
        size = len(result.answer or b"")
        if size > LARGE:
            return
        self.forget([result.request_id])
        self._results[result.request_id] = result
        self._bytes += size
        while self._bytes > MOST_BYTES or len(self._results) > MOST_IDS:
            self.forget([next(iter(self._results))])

    def _is_wanted(self) -> bool:
        return bool(self._waiting) or time.monotonic() < self._until

    def _watch(self) -> None:
        """In a thread: what has become final since the last look."""
        while not self._is_over.is_set():
            try:
                if not self._is_wanted():
                    self._is_needed.clear()
                    if not self._is_wanted():
                        self._is_needed.wait()
                        continue
                seen = self._store.changes()
                found, cursor = self._store.finished_since(self._cursor)
                if found:
                    asked = [one for one, _ in found if one in self._open or one in self._waiting]
                    results = self._store.results(asked)
                    self._cursor = cursor  # not before: those who wait for these would wait for ever
                    self._disk.then(partial(self._arrived, found, cursor, results))
                else:
                    self._store.wait_for_change(seen, LOOK_SECONDS, self._is_over)
            except BackendError as error:
                log.warning("%s", error)
                self._is_over.wait(AFTER_A_FAULT_SECONDS)


def _remember(known: OrderedDict[str, str] | OrderedDict[str, None], name: str, value: str | None) -> None:
    known[name] = value  # type: ignore[assignment]
    if len(known) > MOST_IDS:
        known.popitem(last=False)
