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

from flows.service.store import NewRequest, ServiceStore, StoredRequest
from rl_core.errors import BackendError

__all__ = ["Acceptance", "BatchThread", "DiskWait"]

log = logging.getLogger(__name__)

MOST = 1000  # taken at once: one statement names all requests of a batch, and SQLite takes 32,766 values in one

T = TypeVar("T")
Call = Callable[[Exception | None], None]  # with the error, where the disk refused


class BatchThread(Generic[T]):
    """A thread that takes at once what was put before it, up to `MOST`."""

    def __init__(self, name: str, take: Callable[[list[T]], None]) -> None:
        """`take`: in the thread; raises nothing."""
        self._take = take
        self._waiting: deque[T] = deque()
        self._is_needed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def open(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, item: T) -> None:
        """From any thread."""
        self._waiting.append(item)
        self._is_needed.set()

    def close(self) -> None:
        """End after what has been put."""
        self._is_over = True
        self._is_needed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        while not self._is_over or self._waiting:
            self._is_needed.wait()
            self._is_needed.clear()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST))]
            if self._waiting:
                self._is_needed.set()
            if batch:
                self._take(batch)


class DiskWait:
    """Calls that are made in the event loop once everything committed before is on the disk."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BatchThread[Call] = BatchThread("service-disk", self._sync)

    def open(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.open()

    def close(self) -> None:
        """End; what was asked for before is done."""
        self._thread.close()

    def then(self, call: Call) -> None:
        """From any thread: what it has committed or read is on the disk when `call` is made."""
        self._thread.put(call)

    async def wait(self) -> None:
        """Until everything that is committed now is on the disk. Raises: BackendError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.then(partial(_settle, [done], [None]))
        await done

    def _sync(self, calls: list[Call]) -> None:
        error: Exception | None = None
        try:
            self._store.sync()
        except BackendError as raised:
            log.error("%s", raised)
            error = raised
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_make, calls, error)
        except RuntimeError:  # the loop has ended: nobody is left to be told
            log.debug("%d calls after the end of the event loop", len(calls))


def _make(calls: Sequence[Call], error: Exception | None) -> None:
    for call in calls:
        call(error)


class Acceptance:
    """Requests of all callers, those that come at the same time in one transaction."""

    def __init__(self, store: ServiceStore, disk: DiskWait) -> None:
        self._store, self._disk = store, disk
        self._thread: BatchThread[tuple[NewRequest, asyncio.Future[StoredRequest]]] = BatchThread(
            "service-accept", self._accept
        )

    def open(self) -> None:
        """Begin."""
        self._thread.open()

    def close(self) -> None:
        """End; what was given before is accepted."""
        self._thread.close()

    async def accept(self, new: NewRequest) -> StoredRequest:
        """Store a request; it is on the disk when this returns. Raises: as `ServiceStore.accept`."""
        done: asyncio.Future[StoredRequest] = asyncio.get_running_loop().create_future()
        self._thread.put((new, done))
        return await done

    def _accept(self, batch: list[tuple[NewRequest, asyncio.Future[StoredRequest]]]) -> None:
        answers = self._answers([new for new, _ in batch])
        self._disk.then(partial(_settle, [future for _, future in batch], answers))

    def _answers(self, batch: Sequence[NewRequest]) -> Sequence[StoredRequest | Exception]:
        """Answers and errors in order."""
        try:
            return self._store.accept_together(batch)
        except BackendError as error:
            return [error] * len(batch)
        except Exception as error:  # a value that the database's driver does not take: the fault of one of them
            if len(batch) == 1:
                return [error]
            half = len(batch) // 2  # found in as many transactions as the number has digits, not one for each
            return [*self._answers(batch[:half]), *self._answers(batch[half:])]


def _settle(futures: Sequence[asyncio.Future[Any]], answers: Sequence[object], error: Exception | None) -> None:
    """Give futures their values or errors, if somebody still waits for them."""
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue
        if failure := error or (answer if isinstance(answer, Exception) else None):
            future.set_exception(failure)
        else:
            future.set_result(answer)
