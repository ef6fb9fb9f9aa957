"""Pool of a process's reference models: loaded at first use, cached by number and bytes, shared by many threads.

A model that is evicted from the cache but still in use keeps its memory, so it counts until its last user drops it; it
returns to the cache without being loaded again.
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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
    """Content of a cache, and counts since its creation."""

    kept: int  # models in the cache
    alive: int  # these and evicted ones that are still in use
    bytes: int  # of all models alive
    limit: int  # bytes
    hits: int
    loads: int
    evictions: int


class ModelCache(Generic[Key, Model]):
    """Cache of models by key that evicts the least recently used first.

    Thread-safe; concurrent requests load a model once.
    """

    def __init__(self, max_models: int, limit: Callable[[], int], free: Callable[[], int]) -> None:
        """Configure the cache.

        Args:
            max_models: models in the cache.
            limit: returns the maximum bytes of all models alive.
            free: returns the free bytes of the machine.
        """
        self._max_models, self._limit, self._free = max_models, limit, free
        self._lock = threading.Lock()
        self._cached: OrderedDict[Key, Model] = OrderedDict()  # newest last
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
        """Return the model of a key: cached, still alive, being loaded by another thread, or loaded now.

        Args:
            size: returns the bytes of a loaded model.
            expected: estimated bytes.
            description: for messages.
        Raises: OutOfMemory if it does not fit in addition to models in use; errors of `load`, to all waiting threads.
        """
        with self._lock:
            cached = self._find_model(key)
            if cached is not None:
                self._hits += 1
                return cached
            pending = self._loading.get(key)
            if pending:
                self._hits += 1
            else:
                self._make_room(expected, description)
                future = self._loading[key] = Future()
                self._reserved[key] = expected
        if pending:
            return pending.result()
        try:
            model = self._load_with_retry(load)
            with self._lock:
                self._add_loaded_model(key, model, size(model))
            future.set_result(model)
            return model
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._loading[key], self._reserved[key]

    def release_models(self) -> None:
        """Drop every model because memory is short; models in use stay with their users."""
        with self._lock:
            while self._cached:
                self._evict_oldest()

    @property
    def state(self) -> CacheState:
        """Current content and counts."""
        with self._lock:
            self._drop_dead()
            return CacheState(
                kept=len(self._cached),
                alive=len(self._alive),
                bytes=self._count_bytes(),
                limit=self._limit(),
                hits=self._hits,
                loads=self._loads,
                evictions=self._evictions,
            )

    # Methods up to `_count_bytes` require the lock.

    def _find_model(self, key: Key) -> Model | None:
        model = self._cached.get(key)
        if model is not None:
            self._cached.move_to_end(key)
            return model
        if key in self._alive:
            model = self._alive[key][0]()
            if model is not None:
                self._cache_model(key, model)
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
        # The model may be larger than expected.
        while len(self._cached) > 1 and self._count_bytes() > self._limit():
            self._evict_oldest()

    def _make_room(self, expected: int, description: str) -> None:
        limit = self._limit()
        needs = f"{description}: needs about {_format_gib(expected)}"
        if expected > limit:
            raise OutOfMemory(
                f"{needs}, and all reference models may use {_format_gib(limit)} together; choose a lower precision "
                "(int8, int4), or raise memory_share"
            )
        while self._cached and len(self._cached) + len(self._loading) >= self._max_models:
            self._evict_oldest()
        while self._cached and (self._count_bytes() + expected > limit or self._free() < expected):
            self._evict_oldest()
        used = self._count_bytes()
        if used + expected > limit:
            raise OutOfMemory(
                f"{needs} in addition to {_format_gib(used)} of reference models in use, more than the "
                f"{_format_gib(limit)} that they may use together; raise memory_share, or choose a lower precision"
            )
        free = self._free()
        if free < expected:
            raise OutOfMemory(
                f"{needs}, and {_format_gib(free)} are free; choose a lower precision"
            )

    def _evict_oldest(self) -> None:
        key, model = self._cached.popitem(last=False)
        self._evictions += 1
        del model
        if self._alive[key][0]() is not None:  # in use, or in a reference cycle
            gc.collect()
        if self._alive[key][0]() is None:
            del self._alive[key]
        else:
            logger.info("a reference model was evicted from the cache while in use: %s", key)

    def _drop_dead(self) -> None:
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}

    def _count_bytes(self) -> int:
        self._drop_dead()
        return sum(size for _, size in self._alive.values()) + sum(self._reserved.values())

    def _load_with_retry(self, load: Callable[[], Model]) -> Model:
        try:
            return load()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("memory is short: dropping unused reference models")
        self.release_models()
        gc.collect()
        return load()


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _build_cache(
    settings: ReferenceSettings, device: torch.device
) -> ModelCache[tuple[str, ...], Any]:
    return ModelCache(
        settings.max_models,
        lambda: int(settings.memory_share * measure_machine_memory(device)),
        lambda: measure_free_memory(device),
    )


class _CachedScorer:
    """Entry of the cache: a model in this process or in a separate one, behind one queue."""

    def __init__(self, scorer: ModelScorer | ScorerProcess) -> None:
        self.scorer = scorer
        self.shared = SharedScorer(scorer.score_rows)

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        if isinstance(self.scorer, ScorerProcess):
            return self.scorer.bytes
        return count_weight_bytes(self.scorer.model)


class ReferencePool:
    """Pool of frozen models by path. Thread-safe."""

    def __init__(
        self, settings: ReferenceSettings | None = None, model: ModelSettings | None = None
    ) -> None:
        """Configure the pool.

        Args:
            model: dtype and device of all models.
        """
        self.settings, self._model = settings or ReferenceSettings(), model or ModelSettings()
        device = causal_lm.resolve_device(self._model)
        self._cache: ModelCache[tuple[str, ...], _CachedScorer] = _build_cache(
            self.settings, device
        )

    @property
    def precision(self) -> Precision:
        """Precision of the settings, with `auto` resolved."""
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
        """Compute log p(token | tokens before) of all tokens but the first, nats, float32 [S - 1] per row.

        Requests of other threads for the same model and temperature share passes with this one.
        Raises: DataError for rows that cannot be scored; ModelError if there is no such model; OutOfMemory.
        """
        cached = self._get_scorer(path, "policy")  # a local variable, so that it stays in use
        return cached.shared.score_rows(rows, temperature)

    def logits(self, path: str | Path, rows: TokenRows, begin: int, end: int) -> np.ndarray:
        """Compute the logits float32 [end - begin, V] of positions that another token follows, counted over all rows.

        The hidden states of the last rows are cached, so reading chunk after chunk is cheap. Raises: as `logprobs`.
        """
        cached = self._get_scorer(path, "policy")
        return cached.shared.run_exclusively(lambda: cached.scorer.compute_logits(rows, begin, end))

    def scores(self, path: str | Path, rows: TokenRows) -> list[float]:
        """Compute the scores of a reward model. Raises: as `logprobs`."""
        cached = self._get_scorer(path, "reward_model")
        return [float(score[0]) for score in cached.shared.score_rows(rows)]

    def release_models(self) -> None:
        """Drop every model that is not in use."""
        self._cache.release_models()

    def _get_scorer(self, path: str | Path, kind: ReferenceKind) -> _CachedScorer:
        source = ReferenceSource(
            path=str(path), kind=kind, precision=self.precision, model=self._model
        )
        expected = source.estimated_bytes
        is_separate = expected > self.settings.separate_process_gib * GIB
        return self._cache.get_or_load(
            (*source.key, "separate" if is_separate else ""),
            functools.partial(self._load_scorer, source, is_separate),
            lambda cached: cached.bytes,
            expected,
            f"reference model '{path}' ({source.precision})",
        )

    def _load_scorer(self, source: ReferenceSource, is_separate: bool) -> _CachedScorer:
        if not is_separate:
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
    """Cache of complete frozen models for trainers of this process, which read their weights directly."""

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
        """Return the model of a folder or hub name in eval mode; the same object while it is in memory."""
        source = ReferenceSource(path=str(path), kind=kind, precision=precision, model=model)
        device = causal_lm.resolve_device(model)
        with self._lock:
            if device.type not in self._caches:
                self._caches[device.type] = _build_cache(self._settings, device)
            cache = self._caches[device.type]
        return cache.get_or_load(
            source.key,
            lambda: load_reference_model(source)[0],
            count_weight_bytes,
            source.estimated_bytes,
            f"reference model '{path}' ({precision})",
        )


@functools.cache
def get_frozen_models() -> FrozenModelCache:
    """Return the cache of frozen models for the trainings of this process."""
    return FrozenModelCache(ReferenceSettings())


@functools.cache
def _warn_full_precision() -> None:
    logger.warning(
        "reference models keep full precision: the package torchao (posttrain[quantize]) is not installed"
    )
