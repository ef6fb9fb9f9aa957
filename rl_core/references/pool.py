"""Reference models of a process: loaded at the first use, kept in a cache, asked by many threads."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_core.machine_memory import free_memory, machine_memory
from rl_core.models import causal_lm
from rl_core.references.few_bits import is_installed, weight_bytes
from rl_core.references.loading import ReferenceSource, load_model, load_scorer
from rl_core.references.model_cache import GIB, CacheState, ModelCache
from rl_core.references.own_process import ScorerProcess
from rl_core.references.scorer import Answer, Kind, ModelScorer, Rows, SharedScorer
from rl_core.settings import ModelSettings
from rl_core.settings.references import Precision, ReferenceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FrozenModels", "ReferencePool", "frozen_models"]

logger = logging.getLogger(__name__)


class _Kept:
    """Entry of the cache: a model of this process, or a process of its own, behind one queue."""

    def __init__(self, scorer: ModelScorer | ScorerProcess) -> None:
        self.scorer = scorer
        self.shared = SharedScorer(scorer.score)

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return self.scorer.bytes if isinstance(self.scorer, ScorerProcess) else weight_bytes(self.scorer.model)


class ReferencePool:
    """Frozen models by path. Thread-safe."""

    def __init__(self, settings: ReferenceSettings | None = None, model: ModelSettings | None = None) -> None:
        """`model`: dtype and device of all of them."""
        self.settings, self._model = settings or ReferenceSettings(), model or ModelSettings()
        device = causal_lm.device_of(self._model)
        self._cache: ModelCache[tuple[str, ...], _Kept] = ModelCache(
            self.settings.max_models,
            lambda: int(self.settings.memory_share * machine_memory(device)),
            lambda: free_memory(device),
        )

    @property
    def precision(self) -> Precision:
        """The settings' precision, `auto` decided."""
        if self.settings.precision != "auto":
            return self.settings.precision
        if is_installed():
            return "int8"
        _say_full()
        return "full"

    @property
    def state(self) -> CacheState:
        """Models in memory, their bytes, and counts."""
        return self._cache.state

    def logprobs(self, path: str | Path, rows: Rows, temperature: float = 1.0) -> Answer:
        """log p(token | tokens before) of all tokens but the first, nats, at a temperature: float32 [S - 1] a row.

        Requests of other threads for the same model and temperature share passes with this one.
        Raises: DataError for rows that cannot be scored; ModelError where there is no such model; OutOfMemory.
        """
        kept = self._kept(path, "policy")  # a name of its own, so that it counts as used until the end
        return kept.shared.score(rows, temperature)

    def logits(self, path: str | Path, rows: Rows, begin: int, end: int) -> np.ndarray:
        """Logits float32 [end - begin, V] of some positions of the rows that another token follows, one row after the
        other; the states of the rows asked for last are kept, so chunk after chunk is cheap.

        Raises: as `logprobs`.
        """
        kept = self._kept(path, "policy")
        return kept.shared.alone(lambda: kept.scorer.logits(rows, begin, end))

    def scores(self, path: str | Path, rows: Rows) -> list[float]:
        """Scores of a reward model. Raises: as `logprobs`."""
        kept = self._kept(path, "reward_model")
        return [float(score[0]) for score in kept.shared.score(rows)]

    def release(self) -> None:
        """Drop every model that nobody uses."""
        self._cache.release()

    def _kept(self, path: str | Path, kind: Kind) -> _Kept:
        source = ReferenceSource(path=str(path), kind=kind, precision=self.precision, model=self._model)
        expected = source.expected_bytes
        apart = expected > self.settings.own_process_gib * GIB
        return self._cache.get(
            (*source.key, "apart" if apart else ""),
            functools.partial(self._load, source, apart),
            lambda kept: kept.bytes,
            expected,
            f"reference model '{path}' ({source.precision})",
        )

    def _load(self, source: ReferenceSource, apart: bool) -> _Kept:
        if not apart:
            return _Kept(load_scorer(source, self.settings.pass_tokens))
        fields = {
            "path": source.path, "kind": source.kind, "precision": source.precision,
            "model": {"dtype": source.model.dtype, "device": source.model.device,
                      "rope_context": source.model.rope_context,
                      "trust_remote_code": source.model.trust_remote_code},
        }  # fmt: skip
        setup = {"source": fields, "pass_tokens": self.settings.pass_tokens, "threads": torch.get_num_threads()}
        return _Kept(ScorerProcess(setup))


class FrozenModels:
    """Whole frozen models for trainers of this process, which read their weights themselves."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._caches: dict[str, ModelCache[tuple[str, ...], PreTrainedModel]] = {}
        self._settings, self._lock = settings, threading.Lock()

    def get(
        self, path: str | Path, model: ModelSettings, *, kind: Kind = "policy", precision: Precision = "full"
    ) -> PreTrainedModel:
        """The model of a folder or hub name, in eval mode, the same object for all who ask while it is in memory."""
        source = ReferenceSource(path=str(path), kind=kind, precision=precision, model=model)
        device = causal_lm.device_of(model)
        with self._lock:
            cache = self._caches.setdefault(
                device.type,
                ModelCache(
                    self._settings.max_models,
                    lambda: int(self._settings.memory_share * machine_memory(device)),
                    lambda: free_memory(device),
                ),
            )
        return cache.get(
            source.key, lambda: load_model(source)[0], weight_bytes, source.expected_bytes,
            f"reference model '{path}' ({precision})",
        )  # fmt: skip


@functools.cache
def frozen_models() -> FrozenModels:
    """The frozen models of this process's trainings."""
    return FrozenModels(ReferenceSettings())


@functools.cache
def _say_full() -> None:
    logger.warning("reference models keep full precision: the package torchao (posttrain[quantize]) is not installed")
