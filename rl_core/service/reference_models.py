"""Reference models of the service: frozen models by the names in the settings, in one pool for all requests.

They supply reference log-probabilities for losses that need them when the client sends none. The base model of a run
needs no second copy: it is the run's model with the adapter switched off.
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
from rl_core.service.request_checks import (
    MAX_EVALUATED_TOKENS,
    CheckedRequest,
    ModelLimits,
    refuse_request,
)
from rl_core.service.requests import ScoreRequest
from rl_core.service.responses import ReferenceScores
from rl_core.service.training_run import TrainingRun
from rl_core.settings import ModelSettings, ReferenceSettings, ServiceEngineSettings
from rl_core.settings.common import MIN_TEMPERATURE

BASE_REFERENCE = "base"  # the base model of the run
MAX_SCORE_TEMPERATURE = 1e3


class ServiceReferenceModels:
    """Reference models of a service; each is loaded at its first use."""

    def __init__(
        self,
        models: Mapping[str, Any],
        settings: ReferenceSettings,
        engine: ServiceEngineSettings,
        reward_models: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            models, reward_models: name -> model folder or hub name.
        """
        self.paths = {name: str(path) for name, path in models.items()}
        self.reward_paths = {name: str(path) for name, path in (reward_models or {}).items()}
        self._max_rows = engine.max_data
        self._model = ModelSettings(dtype=engine.dtype, device=engine.device)
        self._settings = settings
        self._tokenizers: dict[str, Any] = {}

    @functools.cached_property
    def pool(self) -> ReferencePool:
        """Cache of the loaded models."""
        return ReferencePool(self._settings, self._model)

    def create_reader(self, name: str) -> ReferenceModelReader:
        """Return a reader of token rows for a model."""
        return ReferenceModelReader(self, name)

    def compute_logprobs(
        self, name: str, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[np.ndarray]:
        """Compute log p of all tokens but the first, float32 [S - 1] per row. Raises: ServiceError."""
        return self.convert_pool_errors(
            lambda: self.pool.logprobs(self.paths[name], rows, temperature)
        )

    def score_rows(self, request: ScoreRequest) -> ReferenceScores:
        """Compute the log-probabilities or scores of a client's rows in one request to the pool.

        Raises: ServiceError with the row and what was expected; BackendError.
        """
        name = request.model
        known = {**self.paths, **self.reward_paths}
        if name not in known:
            refuse_request(
                f"references: there is no model '{name[:200]}' here; {suggest_name(name, known)}"
            )
        context = self.convert_pool_errors(
            lambda: causal_lm.read_context_length(known[name], self._model)
        )
        rows = self._check_rows(request, name, int(context))
        if name in self.paths:
            logprobs = self.compute_logprobs(name, rows, request.temperature)
            values = [row.astype(float).tolist() for row in logprobs]
            return ReferenceScores(model=name, kind="policy", logprobs=values)
        if request.temperature != 1:
            refuse_request(
                f"temperature: '{name}' is a reward model, whose scores have no temperature"
            )
        scores = self.convert_pool_errors(lambda: self.pool.scores(self.reward_paths[name], rows))
        return ReferenceScores(model=name, kind="reward_model", scores=scores)

    def _check_rows(self, request: ScoreRequest, name: str, context: int) -> list[list[int]]:
        """Check number and length of the rows; the pool checks the tokens."""
        if not 1 <= len(request.rows) <= self._max_rows:
            refuse_request(
                f"rows: {len(request.rows)}, expected 1 to {self._max_rows} (engine.max_data)"
            )
        total = sum(map(len, request.rows))
        if total > MAX_EVALUATED_TOKENS:
            refuse_request(
                f"rows: {total} tokens, at most {MAX_EVALUATED_TOKENS} in one request; split it"
            )
        for index, row in enumerate(request.rows):
            if not 1 <= len(row) <= context:
                refuse_request(
                    f"rows[{index}]: {len(row)} tokens, and '{name}' takes 1 to {context}"
                )
        if not MIN_TEMPERATURE <= request.temperature <= MAX_SCORE_TEMPERATURE:
            refuse_request(
                f"temperature: {request.temperature!r}, expected {MIN_TEMPERATURE:g} to {MAX_SCORE_TEMPERATURE:g}"
            )
        return [row.tolist() for row in request.rows]

    def read_limits(self, name: str, base: SharedBaseModel) -> ModelLimits:
        """Return the limits of a model that is compared with a base model.

        Raises: ServiceError (user) if its token ids differ from those of the base model.
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
        """Call the pool, converting its errors to the client's. Raises: ServiceError; BackendError."""
        try:
            return call()
        except DataError as error:
            raise ServiceError(str(error), "user") from error
        except BackendError:
            raise  # transient; the request will be retried
        except PosttrainError as error:
            raise ServiceError(str(error), "server") from error


class ReferenceModelReader:
    """Reader of a reference model; a `model_evaluation.LogitReader`."""

    def __init__(self, models: ServiceReferenceModels, name: str) -> None:
        self._models, self._name = models, name

    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """See `LogitReader`; logits are computed chunk by chunk on request."""
        return _ReferenceLogits(self._models, self._models.paths[self._name], rows)


class _ReferenceLogits:
    def __init__(
        self, models: ServiceReferenceModels, path: str, rows: Sequence[Sequence[int]]
    ) -> None:
        self._models, self._path, self._rows = models, path, rows

    def compute_logits(self, begin: int, end: int) -> torch.Tensor:
        logits = self._models.convert_pool_errors(
            lambda: self._models.pool.logits(self._path, self._rows, begin, end)
        )
        return torch.from_numpy(logits)


def add_reference_logprobs(
    run: TrainingRun, checked: CheckedRequest, models: ServiceReferenceModels, pass_tokens: int
) -> CheckedRequest:
    """Add the log-probabilities of the reference model that the request names, if any, to its inputs.

    They depend only on the request's own rows. Raises: ServiceError.
    """
    name = checked.reference
    if not name:
        return checked
    if any("ref_logprobs" in inputs for inputs in checked.inputs):
        refuse_request(
            "loss_fn_config: reference and ref_logprobs are both set; send only one of them"
        )
    temperature = checked.options["temperature"]
    if name in (BASE_REFERENCE, run.base.name):
        logprobs = _compute_base_logprobs(run, checked, temperature, pass_tokens)
    elif name in models.paths:
        logprobs = _compute_model_logprobs(run, checked, models, temperature)
    else:
        known = [BASE_REFERENCE, run.base.name, *models.paths]
        refuse_request(
            f"loss_fn_config: there is no reference model '{name[:200]}'; {suggest_name(name, known)}"
        )
    inputs = [
        {**datum_inputs, "ref_logprobs": values.astype(np.float32)}
        for datum_inputs, values in zip(checked.inputs, logprobs, strict=True)
    ]
    return dataclasses.replace(checked, inputs=inputs)


@torch.no_grad()
def _compute_base_logprobs(
    run: TrainingRun, checked: CheckedRequest, temperature: float, pass_tokens: int
) -> list[np.ndarray]:
    """Compute log-probabilities of the targets under the frozen base, without an adapter."""
    base, logprobs = run.base, [np.zeros(0)] * len(checked.tokens)
    for indices in plan_micro_batches([len(row) for row in checked.tokens], pass_tokens):
        rows = [checked.tokens[index] for index in indices]
        batch = build_unscored_batch([row.tolist() for row in rows], base.pad_id).to(base.device)
        states_BSH = compute_hidden_states(base.model, batch)
        states_NH = torch.cat([states_BSH[i, : len(row)] for i, row in enumerate(rows)])
        targets = [checked.inputs[index]["target_tokens"] for index in indices]
        targets_N = torch.from_numpy(np.concatenate(targets))
        logprobs_N, _ = compute_selected_logprobs(
            states_NH,
            base.head.weight,
            base.head.bias,
            targets_N.to(base.device),
            temperatures_N=expand_temperatures([temperature], [len(states_NH)], base.device),
        )
        ends = np.cumsum([len(row) for row in rows])[:-1]
        row_logprobs = np.split(logprobs_N.float().cpu().numpy(), ends)
        for index, values in zip(indices, row_logprobs, strict=True):
            logprobs[index] = values
    return logprobs


def _compute_model_logprobs(
    run: TrainingRun, checked: CheckedRequest, models: ServiceReferenceModels, temperature: float
) -> list[np.ndarray]:
    """Compute log-probabilities under a model of the pool, which scores the tokens that follow."""
    limits = models.read_limits(checked.reference, run.base)
    rows = []
    for index, (tokens, inputs) in enumerate(zip(checked.tokens, checked.inputs, strict=True)):
        targets = inputs["target_tokens"]
        if not np.array_equal(targets[:-1], tokens[1:]):
            refuse_request(
                f"data[{index}]: target_tokens are not the next tokens, which are all that a reference model scores. "
                "Send ref_logprobs"
            )
        if len(tokens) >= limits.context:
            refuse_request(
                f"data[{index}]: {len(tokens) + 1} tokens with the last target, and '{checked.reference}' takes "
                f"{limits.context}"
            )
        rows.append([*tokens.tolist(), int(targets[-1])])
    return models.compute_logprobs(checked.reference, rows, temperature)
