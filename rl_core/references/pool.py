"""Cache of loaded models, bounded by number and by bytes.

What falls out of the cache and is still used elsewhere keeps its memory, so it counts until its last user drops it; it
comes back without being loaded again.

Reference models of a process: loaded at the first use, kept in a cache, asked by many threads.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from rl_core.errors import OutOfMemory
from rl_core.machine_memory import measure_free_memory, measure_machine_memory
from rl_core.models import causal_lm
from rl_core.out_of_memory import is_out_of_memory, register_memory_holder
from rl_core.references.quantized import count_weight_bytes, is_torchao_installed
from rl_core.references.scorer import (
    ModelScorer,
    ReferenceKind,
    ReferenceSource,
    RowScores,
    SharedScorer,
    TokenRows,
    load_reference_model,
    load_scorer,
)
from rl_core.references.scorer_process import ScorerProcess
from rl_core.settings import ModelSettings
from rl_core.settings.common import Precision, ReferenceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def __init__(self, max_models: int, limit: Callable[[], int], free: Callable[[], int]) -> None:
        """`most`: models that are kept. `limit`: bytes of all models alive. `free`: bytes that the machine has left."""
        self._max_models, self._limit, self._free = max_models, limit, free
        self._lock = threading.Lock()
        self._cached: OrderedDict[Key, Model] = OrderedDict()  # the newest last
        self._alive: dict[Key, tuple[weakref.ref[Model], int]] = {}
        self._loading: dict[Key, Future[Model]] = {}
        self._reserved: dict[Key, int] = {}  # bytes of models that are being loaded
        self._hits = self._loads = self._evictions = 0
        register_memory_holder(self)

    def get_or_load(
        self,
        key: Key,
        load: Callable[[], Model],
        size: Callable[[Model], int],
        expected: int,
        description: str,
    ) -> Model:
        """The model of a key: kept, still alive, being loaded by another thread, or loaded now.

        Args:
            size: bytes of a loaded model. expected: the same before it is loaded. what: for messages.
        Raises: OutOfMemory where it does not fit beside those in use; what `load` raises, to all who wait for it.
        """
        with self._lock:
            if (found := self._find_model(key)) is not None:
                self._hits += 1
                return found
            if waiting := self._loading.get(key):
                self._hits += 1
            else:
                self._make_room(expected, description)
                mine = self._loading[key] = Future()
                self._reserved[key] = expected
        if waiting:
            return waiting.result()
        try:
            model = self._load_with_retry(load)
            with self._lock:
                self._add_loaded_model(key, model, size(model))
            mine.set_result(model)
            return model
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._loading[key], self._reserved[key]

    def release_models(self) -> None:
        """Drop every model, as memory is short; those in use stay with their users."""
        with self._lock:
            while self._cached:
                self._evict_oldest()

    @property
    def state(self) -> CacheState:
        """Present content and counts."""
        with self._lock:
            self._forget_dead()
            return CacheState(
                kept=len(self._cached),
                alive=len(self._alive),
                bytes=self._count_bytes(),
                limit=self._limit(),
                hits=self._hits,
                loads=self._loads,
                evictions=self._evictions,
            )

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _find_model(self, key: Key) -> Model | None:
        model = self._cached.get(key)
        if model is None and key in self._alive and (model := self._alive[key][0]()) is not None:
            self._cache_model(key, model)
        elif model is not None:
            self._cached.move_to_end(key)
        return model

    def _cache_model(self, key: Key, model: Model) -> None:
        self._cached[key] = model
        while len(self._cached) > self._max_models:
            self._evict_oldest()

    def _add_loaded_model(self, key: Key, model: Model, size: int) -> None:
        self._alive[key] = (weakref.ref(model), size)
        self._loads += 1
        self._cache_model(key, model)
        self._reserved[key] = 0
        while len(self._cached) > 1 and self._count_bytes() > self._limit():  # larger than expected
            self._evict_oldest()

    def _make_room(self, expected: int, description: str) -> None:
        limit = self._limit()
        if expected > limit:
            raise OutOfMemory(
                f"{description}: takes about {_format_gib(expected)}, and reference models may take {_format_gib(limit)} together; choose a "
                "lower precision (int8, int4), or raise memory_share"
            )
        while self._cached and len(self._cached) + len(self._loading) >= self._max_models:
            self._evict_oldest()
        while self._cached and (self._count_bytes() + expected > limit or self._free() < expected):
            self._evict_oldest()
        if (used := self._count_bytes()) + expected > limit:
            raise OutOfMemory(
                f"{description}: takes about {_format_gib(expected)} beside {_format_gib(used)} of reference models in use, beyond the "
                f"{_format_gib(limit)} that they may take together; raise memory_share, or choose a lower precision"
            )
        if (free := self._free()) < expected:
            raise OutOfMemory(
                f"{description}: takes about {_format_gib(expected)}, and {_format_gib(free)} are free; choose a lower precision"
            )

    def _evict_oldest(self) -> None:
        key, model = self._cached.popitem(last=False)
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

    def _count_bytes(self) -> int:
        self._forget_dead()
        return sum(size for _, size in self._alive.values()) + sum(self._reserved.values())

    # -- without the lock ----------------------------------------------------------------------------------------------

    def _load_with_retry(self, load: Callable[[], Model]) -> Model:
        try:
            return load()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("memory is short: reference models that nobody uses are dropped")
        self.release_models()
        gc.collect()
        return load()


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


class _CachedScorer:
    """Entry of the cache: a model of this process, or a process of its own, behind one queue."""

    def __init__(self, scorer: ModelScorer | ScorerProcess) -> None:
        self.scorer = scorer
        self.shared = SharedScorer(scorer.score_rows)

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return (
            self.scorer.bytes
            if isinstance(self.scorer, ScorerProcess)
            else count_weight_bytes(self.scorer.model)
        )


class ReferencePool:
    """Frozen models by path. Thread-safe."""

    def __init__(
        self, settings: ReferenceSettings | None = None, model: ModelSettings | None = None
    ) -> None:
        """`model`: dtype and device of all of them."""
        self.settings, self._model = settings or ReferenceSettings(), model or ModelSettings()
        device = causal_lm.resolve_device(self._model)
        self._cache: ModelCache[tuple[str, ...], _CachedScorer] = ModelCache(
            self.settings.max_models,
            lambda: int(self.settings.memory_share * measure_machine_memory(device)),
            lambda: measure_free_memory(device),
        )

    @property
    def precision(self) -> Precision:
        """The settings' precision, `auto` decided."""
        if self.settings.precision != "auto":
            return self.settings.precision
        if is_torchao_installed():
            return "int8"
        _warn_full_precision()
        return "full"

    @property
    def state(self) -> CacheState:
        """Models in memory, their bytes, and counts."""
        return self._cache.state

    def logprobs(self, path: str | Path, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """log p(token | tokens before) of all tokens but the first, nats, at a temperature: float32 [S - 1] a row.

        Requests of other threads for the same model and temperature share passes with this one.
        Raises: DataError for rows that cannot be scored; ModelError where there is no such model; OutOfMemory.
        """
        # a name of its own, so that it counts as used until the end
        kept = self._get_scorer(path, "policy")
        return kept.shared.score_rows(rows, temperature)

    def logits(self, path: str | Path, rows: TokenRows, begin: int, end: int) -> np.ndarray:
        """Logits float32 [end - begin, V] of some positions of the rows that another token follows, one row after the
        other; the states of the rows asked for last are kept, so chunk after chunk is cheap.

        Raises: as `logprobs`.
        """
        kept = self._get_scorer(path, "policy")
        return kept.shared.run_exclusively(lambda: kept.scorer.compute_logits(rows, begin, end))

    def scores(self, path: str | Path, rows: TokenRows) -> list[float]:
        """Scores of a reward model. Raises: as `logprobs`."""
        kept = self._get_scorer(path, "reward_model")
        return [float(score[0]) for score in kept.shared.score_rows(rows)]

    def release_models(self) -> None:
        """Drop every model that nobody uses."""
        self._cache.release_models()

    def _get_scorer(self, path: str | Path, kind: ReferenceKind) -> _CachedScorer:
        source = ReferenceSource(
            path=str(path), kind=kind, precision=self.precision, model=self._model
        )
        expected = source.estimated_bytes
        apart = expected > self.settings.own_process_gib * GIB
        return self._cache.get_or_load(
            (*source.key, "apart" if apart else ""),
            functools.partial(self._load_scorer, source, apart),
            lambda kept: kept.bytes,
            expected,
            f"reference model '{path}' ({source.precision})",
        )

    def _load_scorer(self, source: ReferenceSource, apart: bool) -> _CachedScorer:
        if not apart:
            return _CachedScorer(load_scorer(source, self.settings.pass_tokens))
        fields = {
            "path": source.path,
            "kind": source.kind,
            "precision": source.precision,
            "model": {
                "dtype": source.model.dtype,
                "device": source.model.device,
                "rope_context": source.model.rope_context,
                "trust_remote_code": source.model.trust_remote_code,
            },
        }
        setup = {
            "source": fields,
            "pass_tokens": self.settings.pass_tokens,
            "threads": torch.get_num_threads(),
        }
        return _CachedScorer(ScorerProcess(setup))


class FrozenModelCache:
    """Whole frozen models for trainers of this process, which read their weights themselves."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._caches: dict[str, ModelCache[tuple[str, ...], PreTrainedModel]] = {}
        self._settings, self._lock = settings, threading.Lock()

    def load_model(
        self,
        path: str | Path,
        model: ModelSettings,
        *,
        kind: ReferenceKind = "policy",
        precision: Precision = "full",
    ) -> PreTrainedModel:
        """The model of a folder or hub name, in eval mode, the same object for all who ask while it is in memory."""
        source = ReferenceSource(path=str(path), kind=kind, precision=precision, model=model)
        device = causal_lm.resolve_device(model)
        with self._lock:
            cache = self._caches.setdefault(
                device.type,
                ModelCache(
                    self._settings.max_models,
                    lambda: int(self._settings.memory_share * measure_machine_memory(device)),
                    lambda: measure_free_memory(device),
                ),
            )
        return cache.get_or_load(
            source.key,
            lambda: load_reference_model(source)[0],
            count_weight_bytes,
            source.estimated_bytes,
            f"reference model '{path}' ({precision})",
        )


@functools.cache
def get_frozen_models() -> FrozenModelCache:
    """The frozen models of this process's trainings."""
    return FrozenModelCache(ReferenceSettings())


@functools.cache
def _warn_full_precision() -> None:
    logger.warning(
        "reference models keep full precision: the package torchao (posttrain[quantize]) is not installed"
    )
