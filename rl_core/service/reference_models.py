"""Frozen models beside the base models, by the names that the settings give them: one pool for all requests."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.errors import BackendError, DataError, PosttrainError, ServiceError
from rl_core.models import causal_lm
from rl_core.references.pool import ReferencePool
from rl_core.service.input_checks import ModelLimits
from rl_core.service.served_base import ServedBase
from rl_core.service.text_scores import OpenRows
from rl_core.settings import ModelSettings, ReferenceSettings, ServiceEngineSettings

__all__ = ["ReferenceModels"]


class ReferenceModels:
    """The reference models of a service; each is read at its first use."""

    def __init__(self, models: Mapping[str, Any], settings: ReferenceSettings, engine: ServiceEngineSettings) -> None:
        """`models`: name -> model folder or hub name."""
        self.names = {name: str(place) for name, place in models.items()}
        self._model = ModelSettings(dtype=engine.dtype, device=engine.device)
        self._settings = settings
        self._tokenizers: dict[str, Any] = {}

    @functools.cached_property
    def pool(self) -> ReferencePool:
        """The cache behind them."""
        return ReferencePool(self._settings, self._model)

    def reader(self, name: str) -> PoolReader:
        """A model that reads token rows."""
        return PoolReader(self, name)

    def logprobs(self, name: str, rows: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
        """log p of all tokens but the first, float32 [S - 1] a row. Raises: ServiceError."""
        return self.asked(lambda: self.pool.logprobs(self.names[name], rows, temperature))

    def limits(self, name: str, base: ServedBase) -> ModelLimits:
        """Bounds of a model that is compared with those of a base model.

        Raises: ServiceError (user) where token ids do not mean what they do for the base model.
        """
        if name not in self._tokenizers:
            self._tokenizers[name] = self.asked(lambda: causal_lm.load_tokenizer(self.names[name], self._model))
        if self._tokenizers[name].get_vocab() != base.tokenizer.get_vocab():
            raise ServiceError(
                f"reference model '{name}' has another tokenizer than base model '{base.name}': their token ids cannot "
                "be compared",
                "user",
            )
        context = self.asked(lambda: causal_lm.context_length(self.names[name], self._model))
        return ModelLimits(int(context), base.limits.vocab_size)

    @staticmethod
    def asked(call: Any) -> Any:
        """The answer of the pool, with its errors as the client's. Raises: ServiceError; BackendError."""
        try:
            return call()
        except DataError as error:
            raise ServiceError(str(error), "user") from error
        except BackendError:
            raise  # transient: the request is tried again
        except PosttrainError as error:
            raise ServiceError(str(error), "server") from error


class PoolReader:
    """A reference model as `text_scores.LogitReader`."""

    def __init__(self, models: ReferenceModels, name: str) -> None:
        self._models, self._name = models, name

    def read(self, rows: Sequence[Sequence[int]]) -> OpenRows:
        """See `LogitReader`; the model is asked for one chunk of logits after the other."""
        return _PooledLogits(self._models, self._models.names[self._name], rows)


class _PooledLogits:
    def __init__(self, models: ReferenceModels, path: str, rows: Sequence[Sequence[int]]) -> None:
        self._models, self._path, self._rows = models, path, rows

    def logits(self, begin: int, end: int) -> torch.Tensor:
        found = self._models.asked(lambda: self._models.pool.logits(self._path, self._rows, begin, end))
        return torch.from_numpy(found)
