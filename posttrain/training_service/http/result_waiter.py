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

from posttrain.training_service.http.group_commit import GroupCommit
from posttrain.training_service.store import ServiceStore, StoredRequest
from rl_core.errors import BackendError

log = logging.getLogger(__name__)
POLL_SECONDS = 5.0  # without any change of the store
RETRY_SECONDS = 1.0
PREFETCH_SECONDS = (
    10.0  # after an acceptance, in which its result is looked for though nobody waits yet
)
MAX_TRACKED_REQUESTS = (
    100_000  # requests of which it is remembered that they are open, or final and on the disk
)
MAX_CACHED_BYTES = 64 << 20  # of results that are held, the newest
MAX_CACHED_RESULT_BYTES = 1 << 20  # bytes of a result that is read again when it is asked for


class ResultWaiter:
    """Wakes those who wait for a request, or for any request of a target. All but the thread is of the event loop."""

    def __init__(self, store: ServiceStore, disk: GroupCommit) -> None:
        self._store, self._group_commit = store, disk
        self._cursor = 0
        self.durable_cursor = (
            0  # place in the order of finishing up to which everything is on the disk
        )
        self._waiters: dict[str, set[asyncio.Event]] = defaultdict(set)  # by request and by target
        self._open_owners: OrderedDict[str, str] = (
            OrderedDict()
        )  # accepted here and not seen final since -> owner
        self._durable_final: OrderedDict[str, None] = OrderedDict()  # seen final, and on the disk
        self._results: OrderedDict[str, StoredRequest] = OrderedDict()
        self._cached_bytes = 0
        self._prefetch_until = 0.0  # results are looked for though nobody waits; monotonic
        self._wake_event, self._close_event = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._poll_store, name="service-results", daemon=True
        )

    def start_thread(self) -> None:
        """Begin, in the running event loop."""
        self._cursor = self.durable_cursor = (
            self._store.read_finish_cursor()
        )  # before anybody looks, so that nothing is missed
        self._thread.start()

    def stop_thread(self) -> None:
        """Wake everybody, and end."""
        self._close_event.set()
        self._wake_event.set()
        for events in list(self._waiters.values()):
            for event in events:
                event.set()
        if self._thread.is_alive():
            self._thread.join()  # a look at a store that is closed would open it again

    @property
    def is_closing(self) -> bool:
        """True = the server ends; nobody should wait any more."""
        return self._close_event.is_set()

    @contextlib.contextmanager
    def expect_result(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set when the request, or one of the target, becomes final from now on."""
        event = asyncio.Event()
        self._waiters[name].add(event)
        self._wake_event.set()
        try:
            yield event
        finally:
            self._waiters[name].discard(event)
            if not self._waiters[name]:
                del self._waiters[name]

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    # -- what is known without a look at the store ---------------------------------------------------------------------

    def track_request(self, request: StoredRequest) -> None:
        """Note a request that was accepted here: its result will be asked for."""
        if (
            request.is_final or request.request_id in self._durable_final
        ):  # the worker may be faster
            return
        _insert_bounded(self._open_owners, request.request_id, request.owner)
        self._prefetch_until = time.monotonic() + PREFETCH_SECONDS
        self._wake_event.set()

    def find_open_owner(self, request_id: str) -> str | None:
        """The owner of a request that has no result yet; None = the store has to be asked."""
        return self._open_owners.get(request_id)

    def untrack_request(self, request_id: str) -> None:
        """Have the store asked: a result may have been missed, where it expired or the disk refused."""
        self._open_owners.pop(request_id, None)

    def find_cached_result(self, request_id: str) -> StoredRequest | None:
        """A request that is final and on the disk, if it is held here."""
        return self._results.get(request_id)

    def is_durably_final(self, request_id: str) -> bool:
        """True = that it is final is on the disk."""
        return request_id in self._durable_final

    def evict_results(self, request_ids: Iterable[str]) -> None:
        """Results that the store has forgotten."""
        for request_id in request_ids:
            if (found := self._results.pop(request_id, None)) is not None:
                self._cached_bytes -= len(found.answer or b"")

    # -- results ------------------------------------------------------------------------------------------------------

    def _deliver_results(
        self,
        found: Sequence[tuple[str, str]],
        cursor: int,
        results: Sequence[StoredRequest],
        error: Exception | None,
    ) -> None:
        """Note what has become final, and wake who waits; they ask the store for themselves where the disk refused."""
        if error is None:
            self.durable_cursor = cursor
            for result in results:
                self._cache_result(result)
        for request_id, _ in found:
            self._open_owners.pop(request_id, None)
            if error is None:
                _insert_bounded(self._durable_final, request_id, None)
        for name in {name for pair in found for name in pair}:
            for event in self._waiters.get(name, ()):
                event.set()

    def _cache_result(self, result: StoredRequest) -> None:
        size = len(result.answer or b"")
        if size > MAX_CACHED_RESULT_BYTES:
            return
        self.evict_results([result.request_id])
        self._results[result.request_id] = result
        self._cached_bytes += size
        while self._cached_bytes > MAX_CACHED_BYTES or len(self._results) > MAX_TRACKED_REQUESTS:
            self.evict_results([next(iter(self._results))])

    def _should_poll(self) -> bool:
        return bool(self._waiters) or time.monotonic() < self._prefetch_until

    def _poll_store(self) -> None:
        """In a thread: what has become final since the last look."""
        while not self._close_event.is_set():
            try:
                if not self._should_poll():
                    self._wake_event.clear()
                    if not self._should_poll():
                        self._wake_event.wait()
                        continue
                seen = self._store.read_change_counter()
                found, cursor = self._store.list_finished_since(self._cursor)
                if found:
                    asked = [
                        one for one, _ in found if one in self._open_owners or one in self._waiters
                    ]
                    results = self._store.find_results(asked)
                    self._cursor = (
                        cursor  # not before: those who wait for these would wait for ever
                    )
                    self._group_commit.call_after_commit(
                        partial(self._deliver_results, found, cursor, results)
                    )
                else:
                    self._store.wait_for_change(seen, POLL_SECONDS, self._close_event)
            except BackendError as error:
                log.warning("%s", error)
                self._close_event.wait(RETRY_SECONDS)


def _insert_bounded(
    known: OrderedDict[str, str] | OrderedDict[str, None], name: str, value: str | None
) -> None:
    known[name] = value  # type: ignore[assignment]
    if len(known) > MAX_TRACKED_REQUESTS:
        known.popitem(last=False)
