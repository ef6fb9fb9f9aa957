"""Log-probabilities and reward scores of token rows under one frozen model, for several askers at a time.

Who asks while a pass is under way waits and shares the next one with all others who wait. B rows, S sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from rl_core.capabilities import plain_head
from rl_core.cpu.kernels import linear
from rl_core.data.batches import attention_mask, micro_batches, pad_rows, unscored_batch
from rl_core.errors import DataError
from rl_core.memory import MemoryFit
from rl_core.models import heads
from rl_core.models.causal_lm import evaluating
from rl_core.models.hidden_states import hidden_states, model_inputs
from rl_core.models.logprobs import completion_logprobs
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Answer", "ModelScorer", "Rows", "Scorer", "SharedScorer"]

Kind = Literal["policy", "reward_model"]
Rows = Sequence[Sequence[int]]
Result = TypeVar("Result")
# Of each row: log p(token | tokens before), float32 [S - 1], of all tokens but the first; or its score, float32 [1].
Answer = list[np.ndarray]


class Scorer(Protocol):
    """Scores of token rows, in order."""

    def score(self, rows: Rows, temperature: float = 1.0) -> Answer:
        """Of a policy: log-probabilities at a temperature, nats; of a reward model: scores.

        Raises: DataError for a row without a token, or a token outside of the vocabulary.
        """


class ModelScorer:
    """A model of this process."""

    def __init__(self, model: PreTrainedModel, kind: Kind, pad_id: int, pass_tokens: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self._kind, self._pad_id, self._pass_tokens = kind, pad_id, pass_tokens
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._read: tuple[list[list[int]], torch.Tensor] | None = None  # rows asked for last, and their states

    def score(self, rows: Rows, temperature: float = 1.0) -> Answer:
        """See `Scorer`."""
        self._check(rows)
        if self._kind == "reward_model":
            found = heads.score(self.model, rows, pad_id=self._pad_id, max_tokens=self._pass_tokens)
            return [np.array([value], dtype=np.float32) for value in found]
        return self._logprobs(rows, temperature)

    def _check(self, rows: Rows) -> None:
        for index, row in enumerate(rows):
            if not len(row):
                raise DataError(f"row {index} has no tokens to score")
            if not (min(row) >= 0 and max(row) < self._vocabulary):
                raise DataError(f"row {index} holds token {_outside(row, self._vocabulary)}; there are those below "
                                f"{self._vocabulary}")  # fmt: skip

    @torch.no_grad()
    def logits(self, rows: Rows, begin: int, end: int) -> np.ndarray:
        """Logits float32 [end - begin, V] of positions that another token follows, counted over all rows."""
        given = [list(row) for row in rows]
        if self._read is None or self._read[0] != given:
            self._check(given)
            self._read = given, self._states(given)
        found_NX = self._read[1][begin:end]
        if plain_head(self.model).allowed:
            head: Any = self.model.get_output_embeddings()
            found_NX = linear(found_NX, [head.weight])
            found_NX = found_NX if head.bias is None else found_NX + head.bias
        return found_NX.float().cpu().numpy()

    def _states(self, rows: list[list[int]]) -> torch.Tensor:
        """Last hidden states [N, H], of which logits are made; the logits [N, V] where the head is no plain one."""
        device, found = next(self.model.parameters()).device, []
        with evaluating(self.model):
            for row in rows:
                batch = unscored_batch([row], self._pad_id).to(device)
                if plain_head(self.model).allowed:
                    states_SX = hidden_states(self.model, batch)[0]
                else:
                    states_SX = self.model(**model_inputs(self.model, batch), use_cache=False).logits
                    states_SX = states_SX.reshape(len(row), -1)
                found.append(states_SX[: len(row) - 1])
        return torch.cat(found)

    @torch.no_grad()
    def _logprobs(self, rows: Rows, temperature: float) -> Answer:
        answer = [np.zeros(0, dtype=np.float32)] * len(rows)
        places = [index for index, row in enumerate(rows) if len(row) > 1]  # a first token has no probability
        device = next(self.model.parameters()).device
        lengths = [len(row) for row in rows]

        def fill(chosen: list[int]) -> None:
            ids_BS = pad_rows([list(rows[index]) for index in chosen], self._pad_id)
            mask_BS = attention_mask([lengths[index] for index in chosen])
            scored_BS = mask_BS.clone()
            scored_BS[:, 0] = False
            temperatures_BS = None if temperature == 1 else torch.full(ids_BS.shape, float(temperature))
            batch = TrainBatch(ids_BS, mask_BS, scored_BS, temperatures_BS=temperatures_BS).to(device)
            found_BS = completion_logprobs(self.model, batch)[0].float().cpu().numpy()
            for index, found_S in zip(chosen, found_BS, strict=True):
                answer[index] = found_S[1 : lengths[index]].copy()

        batches = [
            [places[i] for i in batch] for batch in micro_batches([lengths[i] for i in places], self._pass_tokens)
        ]
        with evaluating(self.model):
            MemoryFit("scoring by a reference model").compute(batches, fill, lengths=lengths)
        return answer


def _outside(row: Sequence[int], vocabulary: int) -> int:
    return next(token for token in row if not 0 <= token < vocabulary)


@dataclass(slots=True)
class _Question:
    rows: Rows
    temperature: float
    answer: Answer | None = None
    error: BaseException | None = None


class SharedScorer:
    """One scorer for many threads: requests that wait at the same temperature are computed together."""

    def __init__(self, score: Callable[[Rows, float], Answer]) -> None:
        self._score = score
        self._waiting: list[_Question] = []
        self._list, self._turn = threading.Lock(), threading.Lock()
        self.passes = 0  # calls of the scorer behind, each of one or more requests

    def score(self, rows: Rows, temperature: float = 1.0) -> Answer:
        """See `Scorer`; an error of one request is that of its asker alone."""
        asked = _Question(rows, temperature)
        with self._list:
            self._waiting.append(asked)
        with self._turn:
            if asked.answer is None and asked.error is None:  # else the one before took it along
                with self._list:
                    chosen = [other for other in self._waiting if other.temperature == temperature]
                    self._waiting = [other for other in self._waiting if other.temperature != temperature]
                self._compute(chosen)
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        return asked.answer

    def alone(self, call: Callable[[], Result]) -> Result:
        """A computation of another kind by the same scorer, while no request is computed."""
        with self._turn:
            return call()

    def _compute(self, chosen: list[_Question]) -> None:
        try:
            self.passes += 1
            found = self._score([row for asked in chosen for row in asked.rows], chosen[0].temperature)
        except DataError as error:
            if len(chosen) == 1:
                chosen[0].error = error
                return
            for asked in chosen:  # the one at fault is found by computing each alone
                self._compute([asked])
        except BaseException as error:
            for asked in chosen:
                asked.error = error
        else:
            place = 0
            for asked in chosen:
                asked.answer = found[place : place + len(asked.rows)]
                place += len(asked.rows)
