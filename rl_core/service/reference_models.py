"""Frozen models beside the base models, by the names that the settings give them: one pool for all requests.

Log-probabilities of a reference model for losses that are held to one, where the client leaves them to the service.

The base model of a run needs no second copy: it is what is left when the run's adapter is switched off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.data.batches import build_unscored_batch, plan_micro_batches
from rl_core.errors import BackendError, DataError, PosttrainError, ServiceError, suggest_name
from rl_core.models import causal_lm
from rl_core.models.chunked_head import compute_selected_logprobs, expand_temperatures
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.references.pool import ReferencePool
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.model_evaluation import RowLogits
from rl_core.service.request_checks import CheckedRequest, ModelLimits, refuse_request
from rl_core.service.training_run import TrainingRun
from rl_core.settings import ModelSettings, ReferenceSettings, ServiceEngineSettings


class ServiceReferenceModels:
    """The reference models of a service; each is read at its first use."""

    def __init__(
        self, models: Mapping[str, Any], settings: ReferenceSettings, engine: ServiceEngineSettings
    ) -> None:
        """`models`: name -> model folder or hub name."""
        self.paths = {name: str(place) for name, place in models.items()}
        self._model = ModelSettings(dtype=engine.dtype, device=engine.device)
        self._settings = settings
        self._tokenizers: dict[str, Any] = {}

    @functools.cached_property
    def pool(self) -> ReferencePool:
        """The cache behind them."""
        return ReferencePool(self._settings, self._model)

    def create_reader(self, name: str) -> ReferenceModelReader:
        """A model that reads token rows."""
        return ReferenceModelReader(self, name)

    def compute_logprobs(
        self, name: str, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[np.ndarray]:
        """log p of all tokens but the first, float32 [S - 1] a row. Raises: ServiceError."""
        return self.convert_pool_errors(
            lambda: self.pool.logprobs(self.paths[name], rows, temperature)
        )

    def read_limits(self, name: str, base: SharedBaseModel) -> ModelLimits:
        """Bounds of a model that is compared with those of a base model.

        Raises: ServiceError (user) where token ids do not mean what they do for the base model.
        """
        if name not in self._tokenizers:
            self._tokenizers[name] = self.convert_pool_errors(
                lambda: causal_lm.load_tokenizer(self.paths[name], self._model)
            )
        if self._tokenizers[name].get_vocab() != base.tokenizer.get_vocab():
            raise ServiceError(
                f"reference model '{name}' has another tokenizer than base model '{base.name}': their token ids cannot "
                "be compared",
                "user",
            )
        context = self.convert_pool_errors(
            lambda: causal_lm.read_context_length(self.paths[name], self._model)
        )
        return ModelLimits(int(context), base.limits.vocab_size)

    @staticmethod
    def convert_pool_errors(call: Any) -> Any:
        """The answer of the pool, with its errors as the client's. Raises: ServiceError; BackendError."""
        try:
            return call()
        except DataError as error:
            raise ServiceError(str(error), "user") from error
        except BackendError:
            raise  # transient: the request is tried again
        except PosttrainError as error:
            raise ServiceError(str(error), "server") from error


class ReferenceModelReader:
    """A reference model as `text_scores.LogitReader`."""

    def __init__(self, models: ServiceReferenceModels, name: str) -> None:
        self._models, self._name = models, name

    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """See `LogitReader`; the model is asked for one chunk of logits after the other."""
        return _ReferenceLogits(self._models, self._models.paths[self._name], rows)


class _ReferenceLogits:
    def __init__(
        self, models: ServiceReferenceModels, path: str, rows: Sequence[Sequence[int]]
    ) -> None:
        self._models, self._path, self._rows = models, path, rows

    def compute_logits(self, begin: int, end: int) -> torch.Tensor:
        found = self._models.convert_pool_errors(
            lambda: self._models.pool.logits(self._path, self._rows, begin, end)
        )
        return torch.from_numpy(found)


BASE_REFERENCE = "base"  # the run's own base model


def add_reference_logprobs(
    run: TrainingRun, checked: CheckedRequest, models: ServiceReferenceModels, pass_tokens: int
) -> CheckedRequest:
    """The request with `compute_reference_logprobs` of the reference model that it names, if it names one.

    They depend on the request's own rows alone. Raises: ServiceError.
    """
    name = checked.reference
    if not name:
        return checked
    if any("ref_logprobs" in inputs for inputs in checked.inputs):
        refuse_request(
            "loss_fn_config: reference is given, and so are ref_logprobs; give one of them"
        )
    temperature = checked.options["temperature"]
    if name in (BASE_REFERENCE, run.base.name):
        found = _compute_base_logprobs(run, checked, temperature, pass_tokens)
    elif name in models.paths:
        found = _compute_model_logprobs(run, checked, models, temperature)
    else:
        known = [BASE_REFERENCE, run.base.name, *models.paths]
        refuse_request(
            f"loss_fn_config: there is no reference model '{name[:200]}'; {suggest_name(name, known)}"
        )
    inputs = [
        {**given, "ref_logprobs": values.astype(np.float32)}
        for given, values in zip(checked.inputs, found, strict=True)
    ]
    return dataclasses.replace(checked, inputs=inputs)


@torch.no_grad()
def _compute_base_logprobs(
    run: TrainingRun, checked: CheckedRequest, temperature: float, pass_tokens: int
) -> list[np.ndarray]:
    """By the frozen base, without any adapter."""
    base, found = run.base, [np.zeros(0)] * len(checked.tokens)
    for chosen in plan_micro_batches([len(row) for row in checked.tokens], pass_tokens):
        rows = [checked.tokens[index] for index in chosen]
        batch = build_unscored_batch([row.tolist() for row in rows], base.pad_id).to(base.device)
        states_BSH = compute_hidden_states(base.model, batch)
        states_NH = torch.cat([states_BSH[place, : len(row)] for place, row in enumerate(rows)])
        targets_N = torch.from_numpy(
            np.concatenate([checked.inputs[index]["target_tokens"] for index in chosen])
        )
        logprobs_N, _ = compute_selected_logprobs(
            states_NH,
            base.head.weight,
            base.head.bias,
            targets_N.to(base.device),
            temperatures_N=expand_temperatures([temperature], [len(states_NH)], base.device),
        )
        ends = np.cumsum([len(row) for row in rows])[:-1]
        for index, values in zip(
            chosen, np.split(logprobs_N.float().cpu().numpy(), ends), strict=True
        ):
            found[index] = values
    return found


def _compute_model_logprobs(
    run: TrainingRun, checked: CheckedRequest, models: ServiceReferenceModels, temperature: float
) -> list[np.ndarray]:
    """By a model of the pool, which reads the targets as the tokens that follow."""
    limits = models.read_limits(checked.reference, run.base)
    rows = []
    for index, (tokens, inputs) in enumerate(zip(checked.tokens, checked.inputs, strict=True)):
        targets = inputs["target_tokens"]
        if not np.array_equal(targets[:-1], tokens[1:]):
            refuse_request(
                f"data[{index}]: target_tokens are not the tokens that follow; a reference model scores those alone. "
                "Send ref_logprobs"
            )
        if len(tokens) >= limits.context:
            refuse_request(
                f"data[{index}]: {len(tokens) + 1} tokens with the last target, and '{checked.reference}' takes "
                f"{limits.context}"
            )
        rows.append([*tokens.tolist(), int(targets[-1])])
    return models.compute_logprobs(checked.reference, rows, temperature)
