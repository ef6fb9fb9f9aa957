"""Waiting for results: one thread polls the store for all waiting clients and prefetches their results."""

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
POLL_SECONDS = 5.0  # between polls while the store does not change
RETRY_SECONDS = 1.0
# Results are prefetched this long after an acceptance although no client waits yet.
PREFETCH_SECONDS = 10.0
MAX_TRACKED_REQUESTS = 100_000  # requests remembered as open, or as final and on disk
MAX_CACHED_BYTES = 64 << 20  # total size of cached results; the oldest are evicted
MAX_CACHED_RESULT_BYTES = 1 << 20  # larger results are not cached but read from the store


class ResultWaiter:
    """Wake-up of clients that wait for a request, or for any request of a target.

    Everything but the polling thread runs in the event loop.
    """

    def __init__(self, store: ServiceStore, group_commit: GroupCommit) -> None:
        self._store, self._group_commit = store, group_commit
        self._cursor = 0
        # position in the order of finishing up to which everything is on disk
        self.durable_cursor = 0
        self._waiters: dict[str, set[asyncio.Event]] = defaultdict(set)  # by request and by target
        # request accepted here and not yet seen final -> owner
        self._open_owners: OrderedDict[str, str] = OrderedDict()
        self._durable_final: OrderedDict[str, None] = OrderedDict()  # final and on disk
        self._results: OrderedDict[str, StoredRequest] = OrderedDict()
        self._cached_bytes = 0
        self._prefetch_until = 0.0  # monotonic seconds
        self._wake_event, self._close_event = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._poll_store, name="service-results", daemon=True
        )

    def start_thread(self) -> None:
        """Start, in the running event loop."""
        # Read the cursor before the first poll so that no result is missed.
        self._cursor = self.durable_cursor = self._store.read_finish_cursor()
        self._thread.start()

    def stop_thread(self) -> None:
        """Wake all waiting clients, then stop."""
        self._close_event.set()
        self._wake_event.set()
        for events in list(self._waiters.values()):
            for event in events:
                event.set()
        if self._thread.is_alive():
            self._thread.join()  # polling a closed store would open it again

    @property
    def is_closing(self) -> bool:
        """True if the server is shutting down and clients should stop waiting."""
        return self._close_event.is_set()

    @contextlib.contextmanager
    def expect_result(self, name: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set when the request, or a request of the target, becomes final from now on."""
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

    def track_request(self, request: StoredRequest) -> None:
        """Track a request accepted here, whose result a client will ask for."""
        # The worker may already have finished it.
        if request.is_final or request.request_id in self._durable_final:
            return
        _insert_bounded(self._open_owners, request.request_id, request.owner)
        self._prefetch_until = time.monotonic() + PREFETCH_SECONDS
        self._wake_event.set()

    def find_open_owner(self, request_id: str) -> str | None:
        """Return the owner of a request that has no result yet; None = ask the store."""
        return self._open_owners.get(request_id)

    def untrack_request(self, request_id: str) -> None:
        """Ask the store from now on: a result may have been missed if it expired or a sync failed."""
        self._open_owners.pop(request_id, None)

    def find_cached_result(self, request_id: str) -> StoredRequest | None:
        """Return a cached request that is final and on disk."""
        return self._results.get(request_id)

    def is_durably_final(self, request_id: str) -> bool:
        """Return whether the request's final state is on disk."""
        return request_id in self._durable_final

    def evict_results(self, request_ids: Iterable[str]) -> None:
        """Remove results that the store has dropped."""
        for request_id in request_ids:
            result = self._results.pop(request_id, None)
            if result is not None:
                self._cached_bytes -= len(result.answer or b"")

    def _deliver_results(
        self,
        finished: Sequence[tuple[str, str]],
        cursor: int,
        results: Sequence[StoredRequest],
        error: Exception | None,
    ) -> None:
        """Record which requests became final and wake their clients.

        After a failed sync the clients ask the store themselves.
        """
        if error is None:
            self.durable_cursor = cursor
            for result in results:
                self._cache_result(result)
        for request_id, _ in finished:
            self._open_owners.pop(request_id, None)
            if error is None:
                _insert_bounded(self._durable_final, request_id, None)
        for name in {name for pair in finished for name in pair}:
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
        """Poll, in the thread, for requests that became final."""
        while not self._close_event.is_set():
            try:
                if not self._should_poll():
                    self._wake_event.clear()
                    if not self._should_poll():
                        self._wake_event.wait()
                        continue
                counter = self._store.read_change_counter()
                finished, cursor = self._store.list_finished_since(self._cursor)
                if not finished:
                    self._store.wait_for_change(counter, POLL_SECONDS, self._close_event)
                    continue
                awaited = [
                    request_id
                    for request_id, _ in finished
                    if request_id in self._open_owners or request_id in self._waiters
                ]
                results = self._store.find_results(awaited)
                # Only now: had reading failed, clients of these requests would wait for ever.
                self._cursor = cursor
                self._group_commit.call_after_commit(
                    partial(self._deliver_results, finished, cursor, results)
                )
            except BackendError as error:
                log.warning("%s", error)
                self._close_event.wait(RETRY_SECONDS)


def _insert_bounded(
    known: OrderedDict[str, str] | OrderedDict[str, None], name: str, value: str | None
) -> None:
    known[name] = value  # type: ignore[assignment]
    if len(known) > MAX_TRACKED_REQUESTS:
        known.popitem(last=False)
