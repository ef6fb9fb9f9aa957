"""Callers are told only what is on the disk: one wait for all who are about to be told something.

Acceptances and results are committed by short transactions that do not wait for the disk. Here is the wait, once for
all that were committed before it begins. One thread accepts the requests of all callers: those that come while it
writes are its next transaction.
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

MAX_BATCH_ITEMS = 1000  # taken at once: one statement names all requests of a batch, and SQLite takes 32,766 values in one

T = TypeVar("T")
CommitCallback = Callable[[Exception | None], None]  # with the error, where the disk refused


class BatchThread(Generic[T]):
    """A thread that takes at once what was put before it, up to `MOST`."""

    def __init__(self, name: str, process_batch: Callable[[list[T]], None]) -> None:
        """`take`: in the thread; raises nothing."""
        self._process_batch = process_batch
        self._queued: deque[T] = deque()
        self._wake_event = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._process_queued, name=name, daemon=True)

    def start_thread(self) -> None:
        """Begin."""
        self._thread.start()

    def put_item(self, item: T) -> None:
        """From any thread."""
        self._queued.append(item)
        self._wake_event.set()

    def stop_thread(self) -> None:
        """End after what has been put."""
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
    """Calls that are made in the event loop once everything committed before is on the disk."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BatchThread[CommitCallback] = BatchThread(
            "service-disk", self._sync_and_call_back
        )

    def start_thread(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start_thread()

    def stop_thread(self) -> None:
        """End; what was asked for before is done."""
        self._thread.stop_thread()

    def call_after_commit(self, call: CommitCallback) -> None:
        """From any thread: what it has committed or read is on the disk when `call` is made."""
        self._thread.put_item(call)

    async def wait_for_commit(self) -> None:
        """Until everything that is committed now is on the disk. Raises: BackendError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_after_commit(partial(_resolve_futures, [done], [None]))
        await done

    def _sync_and_call_back(self, calls: list[CommitCallback]) -> None:
        error: Exception | None = None
        try:
            self._store.sync_to_disk()
        except BackendError as raised:
            log.error("%s", raised)
            error = raised
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_run_callbacks, calls, error)
        except RuntimeError:  # the loop has ended: nobody is left to be told
            log.debug("%d calls after the end of the event loop", len(calls))


def _run_callbacks(calls: Sequence[CommitCallback], error: Exception | None) -> None:
    for call in calls:
        call(error)


class IntakeQueue:
    """Requests of all callers, those that come at the same time in one transaction."""

    def __init__(self, store: ServiceStore, disk: GroupCommit) -> None:
        self._store, self._group_commit = store, disk
        self._thread: BatchThread[tuple[NewRequest, asyncio.Future[StoredRequest]]] = BatchThread(
            "service-accept", self._accept_batch
        )

    def start_thread(self) -> None:
        """Begin."""
        self._thread.start_thread()

    def stop_thread(self) -> None:
        """End; what was given before is accepted."""
        self._thread.stop_thread()

    async def accept_request(self, new: NewRequest) -> StoredRequest:
        """Store a request; it is on the disk when this returns. Raises: as `ServiceStore.accept`."""
        done: asyncio.Future[StoredRequest] = asyncio.get_running_loop().create_future()
        self._thread.put_item((new, done))
        return await done

    def _accept_batch(self, batch: list[tuple[NewRequest, asyncio.Future[StoredRequest]]]) -> None:
        answers = self._store_batch([new for new, _ in batch])
        self._group_commit.call_after_commit(
            partial(_resolve_futures, [future for _, future in batch], answers)
        )

    def _store_batch(self, batch: Sequence[NewRequest]) -> Sequence[StoredRequest | Exception]:
        """Answers and errors in order."""
        try:
            return self._store.accept_batch(batch)
        except BackendError as error:
            return [error] * len(batch)
        except (
            Exception
        ) as error:  # a value that the database's driver does not take: the fault of one of them
            if len(batch) == 1:
                return [error]
            half = (
                len(batch) // 2
            )  # found in as many transactions as the number has digits, not one for each
            return [*self._store_batch(batch[:half]), *self._store_batch(batch[half:])]


def _resolve_futures(
    futures: Sequence[asyncio.Future[Any]], answers: Sequence[object], error: Exception | None
) -> None:
    """Give futures their values or errors, if somebody still waits for them."""
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue
        if failure := error or (answer if isinstance(answer, Exception) else None):
            future.set_exception(failure)
        else:
            future.set_result(answer)
