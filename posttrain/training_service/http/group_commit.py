"""Group commit: acknowledge requests and results only after an fsync, one fsync for all pending callers.

Acceptances and results are committed in short transactions that do not wait for the disk. One thread then waits for
the disk, once for everything committed before. Another thread accepts the requests of all callers: requests that
arrive while it writes form its next transaction.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from posttrain.training_service.store import NewRequest, ServiceStore, StoredRequest
from rl_core.errors import BackendError

log = logging.getLogger(__name__)

# One statement names all requests of a batch, and SQLite takes 32,766 values in a statement.
MAX_BATCH_ITEMS = 1000

T = TypeVar("T")
CommitCallback = Callable[[Exception | None], None]  # receives the error if the sync failed


class BatchThread(Generic[T]):
    """Thread that processes all queued items together, up to `MAX_BATCH_ITEMS`."""

    def __init__(self, name: str, process_batch: Callable[[list[T]], None]) -> None:
        """Args: process_batch: called in the thread; must not raise."""
        self._process_batch = process_batch
        self._queued: deque[T] = deque()
        self._wake_event = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._process_queued, name=name, daemon=True)

    def start_thread(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put_item(self, item: T) -> None:
        """Queue an item, from any thread."""
        self._queued.append(item)
        self._wake_event.set()

    def stop_thread(self) -> None:
        """Stop after processing all queued items."""
        self._is_closing = True
        self._wake_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _process_queued(self) -> None:
        while not self._is_closing or self._queued:
            self._wake_event.wait()
            self._wake_event.clear()
            batch = [self._queued.popleft() for _ in range(min(len(self._queued), MAX_BATCH_ITEMS))]
            if self._queued:
                self._wake_event.set()
            if batch:
                self._process_batch(batch)


class GroupCommit:
    """Callbacks that run in the event loop once everything committed before is on disk."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BatchThread[CommitCallback] = BatchThread(
            "service-disk", self._sync_and_call_back
        )

    def start_thread(self) -> None:
        """Start, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start_thread()

    def stop_thread(self) -> None:
        """Stop after all pending callbacks."""
        self._thread.stop_thread()

    def call_after_commit(self, callback: CommitCallback) -> None:
        """Call `callback` once everything that the calling thread has committed or read is on disk. Thread-safe."""
        self._thread.put_item(callback)

    async def wait_for_commit(self) -> None:
        """Wait until everything committed so far is on disk. Raises: BackendError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_after_commit(partial(_resolve_futures, [done], [None]))
        await done

    def _sync_and_call_back(self, callbacks: list[CommitCallback]) -> None:
        error: Exception | None = None
        try:
            self._store.sync_to_disk()
        except BackendError as raised:
            log.error("%s", raised)
            error = raised
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_run_callbacks, callbacks, error)
        except RuntimeError:  # the event loop has ended, so no caller is left
            log.debug("%d callbacks after the end of the event loop", len(callbacks))


def _run_callbacks(callbacks: Sequence[CommitCallback], error: Exception | None) -> None:
    for callback in callbacks:
        callback(error)


class IntakeQueue:
    """Queue of all callers' requests. Requests that arrive together share a transaction."""

    def __init__(self, store: ServiceStore, group_commit: GroupCommit) -> None:
        self._store, self._group_commit = store, group_commit
        self._thread: BatchThread[tuple[NewRequest, asyncio.Future[StoredRequest]]] = BatchThread(
            "service-accept", self._accept_batch
        )

    def start_thread(self) -> None:
        """Start the thread."""
        self._thread.start_thread()

    def stop_thread(self) -> None:
        """Stop after accepting all queued requests."""
        self._thread.stop_thread()

    async def accept_request(self, new: NewRequest) -> StoredRequest:
        """Store a request; it is on disk when this returns. Raises: as `ServiceStore.accept_request`."""
        done: asyncio.Future[StoredRequest] = asyncio.get_running_loop().create_future()
        self._thread.put_item((new, done))
        return await done

    def _accept_batch(self, batch: list[tuple[NewRequest, asyncio.Future[StoredRequest]]]) -> None:
        answers = self._store_batch([new for new, _ in batch])
        self._group_commit.call_after_commit(
            partial(_resolve_futures, [future for _, future in batch], answers)
        )

    def _store_batch(self, batch: Sequence[NewRequest]) -> Sequence[StoredRequest | Exception]:
        """Store a batch; return answers and errors in order."""
        try:
            return self._store.accept_batch(batch)
        except BackendError as error:
            return [error] * len(batch)
        except Exception as error:  # one request holds a value that the database driver refuses
            if len(batch) == 1:
                return [error]
            # Bisection finds the request in log2(n) transactions.
            half = len(batch) // 2
            return [*self._store_batch(batch[:half]), *self._store_batch(batch[half:])]


def _resolve_futures(
    futures: Sequence[asyncio.Future[Any]], answers: Sequence[object], error: Exception | None
) -> None:
    """Set the results or errors of futures that are still awaited."""
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue
        if failure := error or (answer if isinstance(answer, Exception) else None):
            future.set_exception(failure)
        else:
            future.set_result(answer)
