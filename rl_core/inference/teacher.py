"""Teachers for distillation: log-probabilities of the student's tokens, from a local model or a server.

B rows, S tokens of a whole sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.json_client import RequestLimits, build_openai_address, post_with_retries
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.settings import TeacherSettings
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Teacher(Protocol):
    """A model that computes log-probabilities of tokens sampled by another model."""

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute log p(token | earlier tokens) in nats, float [B, S]; 0 where the batch's mask is False."""


class LocalTeacher:
    """A frozen model in this process; it uses the batch's temperatures."""

    def __init__(self, model: PreTrainedModel, *, context: int | None = None) -> None:
        """Freeze the model.

        Args:
            context: its longest sequence in tokens; None = unknown.
        """
        self.model = model.requires_grad_(False).eval()
        self.context = context

    @torch.no_grad()
    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """See `Teacher`.

        Raises: DataError if a row is longer than the context.
        """
        self.check_lengths(batch)
        device = next(self.model.parameters()).device
        with use_eval_mode(self.model):
            return completion_logprobs(self.model, batch.to(device))[0].to(
                batch.input_ids_BS.device
            )

    def check_lengths(self, batch: TrainBatch) -> None:
        """Raise DataError if a row is longer than the context."""
        longest = max((len(ids) for _, ids in _iter_sequences(batch)), default=0)
        if self.context is not None and longest > self.context:
            raise DataError(
                f"a rollout has {longest} tokens, and the teacher's context is {self.context}; "
                "lower sampling.max_completion_tokens, or use a teacher with a longer context"
            )


class ServedTeacher:
    """A model behind an OpenAI-compatible `/v1/completions` that returns log-probs of the token ids it is sent.

    A request without an answer, or with a transient error, is retried a bounded number of times. An answer without a
    finite log-prob for every token is an error; missing values are never filled in.
    """

    def __init__(self, settings: TeacherSettings) -> None:
        """Check the settings; send nothing.

        Raises: SettingsError without an address or a model name.
        """
        if settings.url is None or settings.model is None:
            raise SettingsError(
                "teacher: a served teacher needs url and model (the model's name on the server)"
            )
        self.settings = settings
        self.url = build_openai_address(settings.url, "completions")

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """See `Teacher`.

        Raises: BackendError without a complete answer; DataError for a temperature other than 1.
        """
        if batch.temperatures_BS is not None:
            raise DataError(
                "a served teacher returns log-probs at temperature 1 only; set sampling.temperature to 1"
            )
        mask_BS = batch.loss_mask_BS.cpu()
        sequences = list(_iter_sequences(batch))
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            answers = pool.map(self._fetch_row_logprobs, [ids for _, ids in sequences])
        values_by_row: list[list[float | None]] = [[] for _ in range(len(mask_BS))]
        for (index, _), values in zip(sequences, answers, strict=True):
            values_by_row[index] += values
        logprobs_BS = torch.zeros(mask_BS.shape, dtype=torch.float32)
        for index, values in enumerate(values_by_row):
            for position in mask_BS[index].nonzero().flatten().tolist():
                value = values[position]
                if value is None or not math.isfinite(value):
                    raise BackendError(
                        f"{self.url}: log-prob {value} of token {position} of a row of {len(values)}"
                    )
                logprobs_BS[index, position] = value
        return logprobs_BS.to(batch.input_ids_BS.device)

    def _fetch_row_logprobs(self, ids: list[int]) -> list[float | None]:
        """Request the log-prob of each token; None for the first, which has no context."""
        request: dict[str, Any] = {
            "model": self.settings.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
        }
        is_echo = self.settings.api == "echo"
        request |= {"echo": True, "logprobs": 1} if is_echo else {"prompt_logprobs": 0}
        answer = self._send_request(request)
        try:
            choice = answer["choices"][0]
            values = (
                _parse_echoed_logprobs(choice, len(ids))
                if is_echo
                else _parse_prompt_logprobs(choice, ids)
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BackendError(
                f"{self.url}: the answer lacks the log-probs of {len(ids)} tokens in the format of api "
                f"'{self.settings.api}' ({type(error).__name__}: {error}); set teacher.api to what the server offers"
            ) from error
        return values

    def _send_request(self, request: dict[str, Any]) -> Any:
        """Send a request and return the server's answer.

        Raises: BackendError after the last retry, or immediately if the server rejects the request.
        """
        settings = self.settings
        limits = RequestLimits(settings.timeout_s, settings.retries, settings.retry_delay_s)
        try:
            return post_with_retries(self.url, request, limits, parse_response=_require_mapping)
        except BackendError as error:
            if "did not answer" not in str(error):
                raise
            raise BackendError(
                f"{error}; start the teacher's server, or raise teacher.retries or teacher.timeout_s; rerun the same "
                "command to resume"
            ) from error


def _require_mapping(answer: Any) -> dict[str, Any]:
    """Return the answer. Raises: ValueError for one that is no JSON object, such as the page of a gateway."""
    if not isinstance(answer, dict):
        raise ValueError(f"no JSON object but {str(answer)[:60]!r}")
    return answer


def _parse_echoed_logprobs(choice: dict[str, Any], count: int) -> list[float | None]:
    """Parse OpenAI's echoed prompt and the sampled token after it."""
    values = choice["logprobs"]["token_logprobs"]
    if len(values) not in (count, count + 1):
        raise ValueError(f"{len(values)} log-probs for a prompt of {count} tokens")
    return [None if value is None else float(value) for value in values[:count]]


def _parse_prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> list[float | None]:
    """Parse vLLM's prompt_logprobs: a mapping from token ids at each position, None at the first."""
    positions = choice["prompt_logprobs"]
    if len(positions) != len(ids):
        raise ValueError(f"{len(positions)} positions for a prompt of {len(ids)} tokens")
    return [
        None if position is None else float(position[str(token)]["logprob"])
        for token, position in zip(ids, positions, strict=True)
    ]


def compute_vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute the SHA-256 over every token and its id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def has_equal_vocabulary(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> bool:
    """Return whether both tokenizers map the same tokens to the same ids."""
    return compute_vocabulary_digest(policy) == compute_vocabulary_digest(teacher)


def _iter_sequences(batch: TrainBatch) -> Iterator[tuple[int, list[int]]]:
    """Yield (row, token ids) of every sequence in order; a row holds several if its context restarts."""
    for index, ids_S in enumerate(batch.input_ids_BS):
        length = int(batch.attention_mask_BS[index].sum())
        starts = [0]
        if batch.position_ids_BS is not None:
            starts = (batch.position_ids_BS[index, :length] == 0).nonzero().flatten().tolist()
        for start, stop in pairwise([*starts, length]):
            yield index, ids_S[start:stop].tolist()
