"""Scoring of token rows by one frozen model for several threads: log-probabilities or reward scores.

Requests that arrive during a pass wait and share the next pass. Also here: loading a reference model from its files,
with its precision and estimated size. B rows, S sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from rl_core.capabilities import check_chunked_head, check_prefix_sharing
from rl_core.cpu.layer_kernels import compute_linear
from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import attention_mask, build_unscored_batch, pad_rows, plan_shared_batches
from rl_core.errors import DataError, SettingsError
from rl_core.models import causal_lm, heads
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.hidden_states import build_model_inputs, compute_hidden_states
from rl_core.models.logprobs import completion_logprobs
from rl_core.out_of_memory import MemoryFit
from rl_core.references.quantized import (
    build_quantized_loading_options,
    estimate_model_bytes,
    replace_quantized_layers,
)
from rl_core.settings import ModelSettings
from rl_core.settings.common import Precision
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ReferenceKind = Literal["policy", "reward_model"]
TokenRows = Sequence[Sequence[int]]
CallResult = TypeVar("CallResult")
# For each row: log p(token | tokens before) of all tokens but the first, float32 [S - 1]; or its score, float32 [1].
RowScores = list[np.ndarray]


class RowScorer(Protocol):
    """Scorer of token rows."""

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """Score rows in order: log-probabilities of a policy at a temperature, nats, or scores of a reward model.

        Raises: DataError for a row without tokens, or a token outside the vocabulary.
        """


class ModelScorer:
    """Scorer over a model in this process."""

    def __init__(
        self, model: PreTrainedModel, kind: ReferenceKind, pad_id: int, pass_tokens: int
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self._kind, self._pad_id, self._pass_tokens = kind, pad_id, pass_tokens
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._last_read: tuple[list[list[int]], torch.Tensor] | None = None  # rows and their states

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """See `RowScorer`."""
        self._check_rows(rows)
        if self._kind == "reward_model":
            scores = heads.score_rows(
                self.model, rows, pad_id=self._pad_id, max_tokens=self._pass_tokens
            )
            return [np.array([score], dtype=np.float32) for score in scores]
        return self._compute_logprobs(rows, temperature)

    def _check_rows(self, rows: TokenRows) -> None:
        for index, row in enumerate(rows):
            if not len(row):
                raise DataError(f"row {index} has no tokens to score")
            if not (min(row) >= 0 and max(row) < self._vocabulary):
                invalid = next(token for token in row if not 0 <= token < self._vocabulary)
                raise DataError(
                    f"row {index} holds token {invalid}; valid ones are below {self._vocabulary}"
                )

    @torch.no_grad()
    def compute_logits(self, rows: TokenRows, begin: int, end: int) -> np.ndarray:
        """Compute logits float32 [end - begin, V] of positions that another token follows, counted over all rows."""
        token_rows = [list(row) for row in rows]
        if self._last_read is None or self._last_read[0] != token_rows:
            self._check_rows(token_rows)
            self._last_read = token_rows, self._compute_states(token_rows)
        logits_NV = self._last_read[1][begin:end]
        if check_chunked_head(self.model).allowed:
            head: Any = self.model.get_output_embeddings()
            logits_NV = compute_linear(logits_NV, [head.weight])
            logits_NV = logits_NV if head.bias is None else logits_NV + head.bias
        return logits_NV.float().cpu().numpy()

    def _compute_states(self, rows: list[list[int]]) -> torch.Tensor:
        """Compute the last hidden states [N, H]; for a model with a non-standard head, the logits [N, V]."""
        device, states = next(self.model.parameters()).device, []
        with use_eval_mode(self.model):
            for row in rows:
                batch = build_unscored_batch([row], self._pad_id).to(device)
                if check_chunked_head(self.model).allowed:
                    states_SX = compute_hidden_states(self.model, batch)[0]
                else:
                    inputs = build_model_inputs(self.model, batch)
                    logits = self.model(**inputs, use_cache=False).logits
                    states_SX = logits.reshape(len(row), -1)
                states.append(states_SX[: len(row) - 1])
        return torch.cat(states)

    @torch.no_grad()
    def _compute_logprobs(self, rows: TokenRows, temperature: float) -> RowScores:
        scores = [np.zeros(0, dtype=np.float32)] * len(rows)
        device = next(self.model.parameters()).device
        lengths = [len(row) for row in rows]

        def fill(indices: list[int]) -> None:
            ids_BS = pad_rows([list(rows[index]) for index in indices], self._pad_id)
            mask_BS = attention_mask([lengths[index] for index in indices])
            scored_BS = mask_BS.clone()
            scored_BS[:, 0] = False  # a first token has no probability
            temperatures_BS = None
            if temperature != 1:
                temperatures_BS = torch.full(ids_BS.shape, float(temperature))
            batch = TrainBatch(ids_BS, mask_BS, scored_BS, temperatures_BS=temperatures_BS)
            logprobs_BS = completion_logprobs(self.model, batch.to(device))[0]
            for index, logprobs_S in zip(indices, logprobs_BS.float().cpu().numpy(), strict=True):
                scores[index] = logprobs_S[1 : lengths[index]].copy()

        scorable = [index for index, length in enumerate(lengths) if length > 1]
        fit = MemoryFit("scoring by a reference model")
        with use_eval_mode(self.model):
            encoded_rows = None
            if check_prefix_sharing(self.model).allowed:
                encoded_rows = ([encode_row(rows[index])] for index in scorable)
            plan = plan_shared_batches(
                [lengths[index] for index in scorable], self._pass_tokens, encoded_rows
            )
            batches = [[scorable[i] for i in batch] for batch in plan]
            fit.compute_batches(batches, fill, lengths=lengths)
        return scores


@dataclass(slots=True)
class _ScoreRequest:
    rows: TokenRows
    temperature: float
    scores: RowScores | None = None
    error: BaseException | None = None


class SharedScorer:
    """Scorer shared by many threads: waiting requests at the same temperature are computed together."""

    def __init__(self, score: Callable[[TokenRows, float], RowScores]) -> None:
        self._score = score
        self._pending: list[_ScoreRequest] = []
        self._pending_lock, self._pass_lock = threading.Lock(), threading.Lock()
        self.num_passes = 0  # calls of the underlying scorer, each for one or more requests

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """See `RowScorer`; an error in one request is raised only in its caller."""
        request = _ScoreRequest(rows, temperature)
        with self._pending_lock:
            self._pending.append(request)
        with self._pass_lock:
            # The previous pass may have included the request already.
            if request.scores is None and request.error is None:
                with self._pending_lock:
                    pending = self._pending
                    batch = [other for other in pending if other.temperature == temperature]
                    self._pending = [other for other in pending if other.temperature != temperature]
                self._score_requests(batch)
        if request.error is not None:
            raise request.error
        assert request.scores is not None
        return request.scores

    def run_exclusively(self, call: Callable[[], CallResult]) -> CallResult:
        """Run another computation with the same scorer while no request is computed."""
        with self._pass_lock:
            return call()

    def _score_requests(self, requests: list[_ScoreRequest]) -> None:
        rows = [row for request in requests for row in request.rows]
        try:
            self.num_passes += 1
            scores = self._score(rows, requests[0].temperature)
        except DataError as error:
            if len(requests) == 1:
                requests[0].error = error
                return
            for request in requests:  # compute each alone, so that only the invalid one fails
                self._score_requests([request])
        except BaseException as error:
            for request in requests:
                request.error = error
        else:
            begin = 0
            for request in requests:
                request.scores = scores[begin : begin + len(request.rows)]
                begin += len(request.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSource:
    """Frozen model in a folder or under a hub name."""

    path: str
    kind: ReferenceKind
    precision: Precision
    model: ModelSettings  # dtype, device, positions; without adapters

    @property
    def folder(self) -> Path | None:
        """Folder of the model; None for a hub name."""
        folder = Path(self.path).expanduser()
        return folder if folder.is_dir() else None

    @property
    def key(self) -> tuple[str, ...]:
        """Cache key; includes sizes and times of the files, so that a replaced folder gets a new key."""
        settings = dataclasses.replace(self.model, path=None, lora=None)
        path, files_digest, folder = self.path, "", self.folder
        if folder is not None:
            files = [(file.name, file.stat()) for file in sorted(folder.glob("*"))]
            stamps = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
            path = str(folder.resolve())
            files_digest = hashlib.sha256(repr(stamps).encode()).hexdigest()
        return (path, self.kind, self.precision, repr(settings), files_digest)

    @property
    def estimated_bytes(self) -> int:
        """Bytes that it will use; 0 for a hub name."""
        dtype = causal_lm.resolve_dtype(self.model)
        return estimate_model_bytes(self.folder, dtype, self.precision)


def load_reference_model(source: ReferenceSource) -> tuple[PreTrainedModel, Any]:
    """Load the frozen model in eval mode, and its tokenizer. Raises: ModelError, SettingsError."""
    if source.model.lora is not None:
        raise SettingsError("a reference model cannot have adapters; merge them into its folder")
    load = causal_lm.load_model if source.kind == "policy" else heads.load_reward_model
    device = causal_lm.resolve_device(source.model)
    options = build_quantized_loading_options(source.precision, device, source.folder)
    model, tokenizer = load(source.path, source.model, options=options)
    if options:
        replace_quantized_layers(model, source.precision)
    return model.requires_grad_(False).eval(), tokenizer


def load_scorer(source: ReferenceSource, pass_tokens: int) -> ModelScorer:
    """Load the model as a scorer. Raises: as `load_reference_model`."""
    model, tokenizer = load_reference_model(source)
    return ModelScorer(model, source.kind, int(tokenizer.pad_token_id), pass_tokens)
