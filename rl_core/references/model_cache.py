"""Cache of loaded models, bounded by number and by bytes.

What falls out of the cache and is still used elsewhere keeps its memory, so it counts until its last user drops it; it
comes back without being loaded again.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_core.errors import OutOfMemory
from rl_core.memory import is_out_of_memory, when_short

__all__ = ["CacheState", "ModelCache"]

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Model = TypeVar("Model")

GIB = 2**30


@dataclass(frozen=True, slots=True)
class CacheState:
    """Counts of a cache since it was made, and its content."""

    kept: int  # models in the cache
    alive: int  # these and those that fell out and are still used
    bytes: int  # of all that are alive
    limit: int  # bytes
    hits: int
    loads: int
    evictions: int


class ModelCache(Generic[Key, Model]):
    """Models by key, the least recently used evicted first. Thread-safe; a model is loaded once for all who ask."""

    def __init__(self, most: int, limit: Callable[[], int], free: Callable[[], int]) -> None:
        """`most`: models that are kept. `limit`: bytes of all models alive. `free`: bytes that the machine has left."""
        self._most, self._limit, self._free = most, limit, free
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Model] = OrderedDict()  # the newest last
        self._alive: dict[Key, tuple[weakref.ref[Model], int]] = {}
        self._loading: dict[Key, Future[Model]] = {}
        self._reserved: dict[Key, int] = {}  # bytes of models that are being loaded
        self._hits = self._loads = self._evictions = 0
        when_short(self)

    def get(self, key: Key, load: Callable[[], Model], size: Callable[[Model], int], expected: int, what: str) -> Model:
        """The model of a key: kept, still alive, being loaded by another thread, or loaded now.

        Args:
            size: bytes of a loaded model. expected: the same before it is loaded. what: for messages.
        Raises: OutOfMemory where it does not fit beside those in use; what `load` raises, to all who wait for it.
        """
        with self._lock:
            if (found := self._found(key)) is not None:
                self._hits += 1
                return found
            if waiting := self._loading.get(key):
                self._hits += 1
            else:
                self._make_room(expected, what)
                mine = self._loading[key] = Future()
                self._reserved[key] = expected
        if waiting:
            return waiting.result()
        try:
            model = self._load(load)
            with self._lock:
                self._take(key, model, size(model))
            mine.set_result(model)
            return model
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._loading[key], self._reserved[key]

    def release(self) -> None:
        """Drop every model, as memory is short; those in use stay with their users."""
        with self._lock:
            while self._kept:
                self._evict()

    @property
    def state(self) -> CacheState:
        """Present content and counts."""
        with self._lock:
            self._forget_dead()
            return CacheState(
                kept=len(self._kept), alive=len(self._alive), bytes=self._bytes(), limit=self._limit(),
                hits=self._hits, loads=self._loads, evictions=self._evictions,
            )  # fmt: skip

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _found(self, key: Key) -> Model | None:
        model = self._kept.get(key)
        if model is None and key in self._alive and (model := self._alive[key][0]()) is not None:
            self._keep(key, model)
        elif model is not None:
            self._kept.move_to_end(key)
        return model

    def _keep(self, key: Key, model: Model) -> None:
        self._kept[key] = model
        while len(self._kept) > self._most:
            self._evict()

    def _take(self, key: Key, model: Model, size: int) -> None:
        self._alive[key] = (weakref.ref(model), size)
        self._loads += 1
        self._keep(key, model)
        self._reserved[key] = 0
        while len(self._kept) > 1 and self._bytes() > self._limit():  # larger than expected
            self._evict()

    def _make_room(self, expected: int, what: str) -> None:
        limit = self._limit()
        if expected > limit:
            raise OutOfMemory(
                f"{what}: takes about {_gib(expected)}, and reference models may take {_gib(limit)} together; choose a "
                "lower precision (int8, int4), or raise memory_share"
            )
        while self._kept and len(self._kept) + len(self._loading) >= self._most:
            self._evict()
        while self._kept and (self._bytes() + expected > limit or self._free() < expected):
            self._evict()
        if (used := self._bytes()) + expected > limit:
            raise OutOfMemory(
                f"{what}: takes about {_gib(expected)} beside {_gib(used)} of reference models in use, beyond the "
                f"{_gib(limit)} that they may take together; raise memory_share, or choose a lower precision"
            )
        if (free := self._free()) < expected:
            raise OutOfMemory(
                f"{what}: takes about {_gib(expected)}, and {_gib(free)} are free; choose a lower precision"
            )

    def _evict(self) -> None:
        key, model = self._kept.popitem(last=False)
        self._evictions += 1
        del model
        if self._alive[key][0]() is not None:  # in use, or in a circle of references
            gc.collect()
        if self._alive[key][0]() is None:
            del self._alive[key]
        else:
            logger.info("a reference model fell out of the cache while it is in use: %s", key)

    def _forget_dead(self) -> None:
        for key in [key for key, (model, _) in self._alive.items() if model() is None]:
            del self._alive[key]

    def _bytes(self) -> int:
        self._forget_dead()
        return sum(size for _, size in self._alive.values()) + sum(self._reserved.values())

    # -- without the lock ----------------------------------------------------------------------------------------------

    def _load(self, load: Callable[[], Model]) -> Model:
        try:
            return load()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("memory is short: reference models that nobody uses are dropped")
        self.release()
        gc.collect()
        return load()


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"
