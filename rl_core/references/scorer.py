"""Log-probabilities and reward scores of token rows under one frozen model, for several askers at a time.

Who asks while a pass is under way waits and shares the next one with all others who wait. B rows, S sequence.

Reading a reference model from its files: which one, in which precision, and its bytes before it is read.
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

from rl_core.capabilities import check_chunked_head
from rl_core.cpu.layer_kernels import compute_linear
from rl_core.data.batches import attention_mask, build_unscored_batch, pad_rows, plan_micro_batches
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
# Of each row: log p(token | tokens before), float32 [S - 1], of all tokens but the first; or its score, float32 [1].
RowScores = list[np.ndarray]


class RowScorer(Protocol):
    """Scores of token rows, in order."""

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """Of a policy: log-probabilities at a temperature, nats; of a reward model: scores.

        Raises: DataError for a row without a token, or a token outside of the vocabulary.
        """


class ModelScorer:
    """A model of this process."""

    def __init__(
        self, model: PreTrainedModel, kind: ReferenceKind, pad_id: int, pass_tokens: int
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self._kind, self._pad_id, self._pass_tokens = kind, pad_id, pass_tokens
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._last_read: tuple[list[list[int]], torch.Tensor] | None = (
            None  # rows asked for last, and their states
        )

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """See `Scorer`."""
        self._check_rows(rows)
        if self._kind == "reward_model":
            found = heads.score_rows(
                self.model, rows, pad_id=self._pad_id, max_tokens=self._pass_tokens
            )
            return [np.array([value], dtype=np.float32) for value in found]
        return self._compute_logprobs(rows, temperature)

    def _check_rows(self, rows: TokenRows) -> None:
        for index, row in enumerate(rows):
            if not len(row):
                raise DataError(f"row {index} has no tokens to score")
            if not (min(row) >= 0 and max(row) < self._vocabulary):
                raise DataError(
                    f"row {index} holds token {_find_invalid_token(row, self._vocabulary)}; there are those below "
                    f"{self._vocabulary}"
                )

    @torch.no_grad()
    def compute_logits(self, rows: TokenRows, begin: int, end: int) -> np.ndarray:
        """Logits float32 [end - begin, V] of positions that another token follows, counted over all rows."""
        given = [list(row) for row in rows]
        if self._last_read is None or self._last_read[0] != given:
            self._check_rows(given)
            self._last_read = given, self._compute_states(given)
        found_NX = self._last_read[1][begin:end]
        if check_chunked_head(self.model).allowed:
            head: Any = self.model.get_output_embeddings()
            found_NX = compute_linear(found_NX, [head.weight])
            found_NX = found_NX if head.bias is None else found_NX + head.bias
        return found_NX.float().cpu().numpy()

    def _compute_states(self, rows: list[list[int]]) -> torch.Tensor:
        """Last hidden states [N, H], of which logits are made; the logits [N, V] where the head is no plain one."""
        device, found = next(self.model.parameters()).device, []
        with use_eval_mode(self.model):
            for row in rows:
                batch = build_unscored_batch([row], self._pad_id).to(device)
                if check_chunked_head(self.model).allowed:
                    states_SX = compute_hidden_states(self.model, batch)[0]
                else:
                    states_SX = self.model(
                        **build_model_inputs(self.model, batch), use_cache=False
                    ).logits
                    states_SX = states_SX.reshape(len(row), -1)
                found.append(states_SX[: len(row) - 1])
        return torch.cat(found)

    @torch.no_grad()
    def _compute_logprobs(self, rows: TokenRows, temperature: float) -> RowScores:
        answer = [np.zeros(0, dtype=np.float32)] * len(rows)
        # a first token has no probability
        places = [index for index, row in enumerate(rows) if len(row) > 1]
        device = next(self.model.parameters()).device
        lengths = [len(row) for row in rows]

        def fill(chosen: list[int]) -> None:
            ids_BS = pad_rows([list(rows[index]) for index in chosen], self._pad_id)
            mask_BS = attention_mask([lengths[index] for index in chosen])
            scored_BS = mask_BS.clone()
            scored_BS[:, 0] = False
            temperatures_BS = (
                None if temperature == 1 else torch.full(ids_BS.shape, float(temperature))
            )
            batch = TrainBatch(ids_BS, mask_BS, scored_BS, temperatures_BS=temperatures_BS).to(
                device
            )
            found_BS = completion_logprobs(self.model, batch)[0].float().cpu().numpy()
            for index, found_S in zip(chosen, found_BS, strict=True):
                answer[index] = found_S[1 : lengths[index]].copy()

        batches = [
            [places[i] for i in batch]
            for batch in plan_micro_batches([lengths[i] for i in places], self._pass_tokens)
        ]
        with use_eval_mode(self.model):
            MemoryFit("scoring by a reference model").compute_batches(
                batches, fill, lengths=lengths
            )
        return answer


def _find_invalid_token(row: Sequence[int], vocabulary: int) -> int:
    return next(token for token in row if not 0 <= token < vocabulary)


@dataclass(slots=True)
class _ScoreRequest:
    rows: TokenRows
    temperature: float
    scores: RowScores | None = None
    error: BaseException | None = None


class SharedScorer:
    """One scorer for many threads: requests that wait at the same temperature are computed together."""

    def __init__(self, score: Callable[[TokenRows, float], RowScores]) -> None:
        self._score = score
        self._pending: list[_ScoreRequest] = []
        self._pending_lock, self._pass_lock = threading.Lock(), threading.Lock()
        self.num_passes = 0  # calls of the scorer behind, each of one or more requests

    def score_rows(self, rows: TokenRows, temperature: float = 1.0) -> RowScores:
        """See `Scorer`; an error of one request is that of its asker alone."""
        asked = _ScoreRequest(rows, temperature)
        with self._pending_lock:
            self._pending.append(asked)
        with self._pass_lock:
            if asked.scores is None and asked.error is None:  # else the one before took it along
                with self._pending_lock:
                    chosen = [other for other in self._pending if other.temperature == temperature]
                    self._pending = [
                        other for other in self._pending if other.temperature != temperature
                    ]
                self._score_requests(chosen)
        if asked.error is not None:
            raise asked.error
        assert asked.scores is not None
        return asked.scores

    def run_exclusively(self, call: Callable[[], CallResult]) -> CallResult:
        """A computation of another kind by the same scorer, while no request is computed."""
        with self._pass_lock:
            return call()

    def _score_requests(self, chosen: list[_ScoreRequest]) -> None:
        try:
            self.num_passes += 1
            found = self._score(
                [row for asked in chosen for row in asked.rows], chosen[0].temperature
            )
        except DataError as error:
            if len(chosen) == 1:
                chosen[0].error = error
                return
            for asked in chosen:  # the one at fault is found by computing each alone
                self._score_requests([asked])
        except BaseException as error:
            for asked in chosen:
                asked.error = error
        else:
            place = 0
            for asked in chosen:
                asked.scores = found[place : place + len(asked.rows)]
                place += len(asked.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSource:
    """A frozen model of a folder or hub name."""

    path: str
    kind: ReferenceKind
    precision: Precision
    model: ModelSettings  # dtype, device, positions; adapters are not for frozen models

    @property
    def folder(self) -> Path | None:
        """Its folder; None for a hub name."""
        place = Path(self.path).expanduser()
        return place if place.is_dir() else None

    @property
    def key(self) -> tuple[str, ...]:
        """Name by which it is kept: with the sizes and times of its files, so that a folder that is replaced is new."""
        settings = dataclasses.replace(self.model, path=None, lora=None)
        place, files = self.path, ""
        if (folder := self.folder) is not None:
            stats = [(file.name, file.stat()) for file in sorted(folder.glob("*"))]
            known = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
            place, files = str(folder.resolve()), hashlib.sha256(repr(known).encode()).hexdigest()
        return (place, self.kind, self.precision, repr(settings), files)

    @property
    def estimated_bytes(self) -> int:
        """Bytes that it will take; 0 for a hub name."""
        return estimate_model_bytes(
            self.folder, causal_lm.resolve_dtype(self.model), self.precision
        )


def load_reference_model(source: ReferenceSource) -> tuple[PreTrainedModel, Any]:
    """The frozen model, in eval mode, and its tokenizer. Raises: ModelError, SettingsError."""
    if source.model.lora is not None:
        raise SettingsError("a reference model has no adapters; merge them into its folder")
    load = causal_lm.load_model if source.kind == "policy" else heads.load_reward_model
    device = causal_lm.resolve_device(source.model)
    options = build_quantized_loading_options(source.precision, device, source.folder)
    model, tokenizer = load(source.path, source.model, options=options)
    if options:
        replace_quantized_layers(model, source.precision)
    return model.requires_grad_(False).eval(), tokenizer


def load_scorer(source: ReferenceSource, pass_tokens: int) -> ModelScorer:
    """A scorer over the model. Raises: as `load_reference_model`."""
    model, tokenizer = load_reference_model(source)
    return ModelScorer(model, source.kind, int(tokenizer.pad_token_id), pass_tokens)
