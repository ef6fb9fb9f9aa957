"""Samplers: weights to sample from, continuations of prompts, and log-probabilities of given tokens.

Sequences of requests to one sampler with equal parameters are decoded together; samplers come one after the other.
Suffixes: N positions, V vocabulary, K tokens at one position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rl_core.data.batches import unscored_batch
from rl_core.environments.step_pool import Turnover
from rl_core.inference.sampling import restricted, sequence_seed
from rl_core.models.chunked_head import default_chunk_tokens, log_softmax_chunk
from rl_core.models.hidden_states import hidden_states
from rl_core.service.answers import SampledSequence, SampleResult, TopLogprobs
from rl_core.service.input_checks import NO_TARGET
from rl_core.service.requests import SampleParameters, SampleRequest
from rl_core.service.served_base import ServedBase
from rl_core.settings import SamplingSettings

__all__ = ["Published", "Sampler", "Weights", "sample_all"]

NO_LOGPROB = -99999.0  # of a place without a token, as clients expect it
_ANY_TEXT = ("\0",)  # makes the engine ask a sequence whether it has ended


Weights = Callable[[], Mapping[str, torch.Tensor]]  # by name, at the time of sampling


@dataclass(slots=True)
class Published:
    """The weights that all in-flight samplers of a run share."""

    newest: Weights

    def __call__(self) -> Mapping[str, torch.Tensor]:
        """The weights now."""
        return self.newest()


@dataclass(slots=True)
class Sampler:
    """A base model with other weights: none, copies of a run's (snapshot), or those last published (in-flight)."""

    sampler_id: str
    base: ServedBase
    weights: Weights


@dataclass(slots=True)
class _Sequence:
    """A `RolloutSequence` of one turn."""

    prompt_ids: list[int]
    seed: int
    stops: Callable[[list[int]], bool] | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hit_limit: bool = True

    def advance(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> Turnover:
        """Take the only action."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest token completes a stop text."""
        return self.stops is not None and self.stops(action_ids)


def sample_all(
    sampler: Sampler, requests: Sequence[SampleRequest], prompts: Sequence[np.ndarray], slots: int
) -> list[SampleResult]:
    """Answers to checked requests of one sampler, in order.

    Args:
        prompts: int64 [P] of each request. slots: sequences decoded together.
    """
    base = sampler.base
    played: list[list[_Sequence]] = []
    groups: dict[SampleParameters, list[_Sequence]] = {}
    for request, prompt in zip(requests, prompts, strict=True):
        stops = _stop_texts(base, request.parameters)
        room = base.limits.context - len(prompt)
        sequences = [
            _Sequence(prompt.tolist(), sequence_seed("sample", request.seed, index), stops)
            for index in range(request.num_samples)
        ]
        played.append(sequences)
        if room > 0:  # else nothing can follow, and each is cut off at once
            groups.setdefault(request.parameters, []).extend(sequences)
    with base.holding(sampler.weights()):
        for parameters, sequences in groups.items():
            backend = base.backend(_end_ids(base, parameters))
            backend.run(sequences, _settings(base, parameters, slots))
        read = _Reader(base)
        return [
            _answer(read, request, prompt, sequences)
            for request, prompt, sequences in zip(requests, prompts, played, strict=True)
        ]


def _settings(base: ServedBase, parameters: SampleParameters, slots: int) -> SamplingSettings:
    stop = parameters.stop or ()
    return SamplingSettings(
        temperature=float(parameters.temperature),
        top_k=max(0, parameters.top_k),
        top_p=float(parameters.top_p),
        max_completion_tokens=min(parameters.max_tokens or base.limits.context, base.limits.context, 1_048_576),
        slots=slots,
        stop=_ANY_TEXT if stop and isinstance(stop[0], str) else (),
    )


def _end_ids(base: ServedBase, parameters: SampleParameters) -> list[int]:
    """Tokens that end a sequence: the model's own, or those asked for in their place."""
    if parameters.stop is None:
        return list(base.eos_ids)
    return [stop for stop in parameters.stop if not isinstance(stop, str)]


def _stop_texts(base: ServedBase, parameters: SampleParameters) -> Callable[[list[int]], bool] | None:
    """The test for a stop text among the newest tokens; None = there are no such texts."""
    texts = [stop for stop in parameters.stop or () if isinstance(stop, str)]
    if not texts:
        return None
    # A token has at least one byte, a character at most four; decoding may strip the first of them.
    longest = 4 * max(map(len, texts)) + 8

    def has_stop(ids: list[int]) -> bool:
        text = base.tokenizer.decode(ids[-longest:], skip_special_tokens=False)
        return any(stop in text for stop in texts)

    return has_stop


def _answer(read: _Reader, request: SampleRequest, prompt: np.ndarray, played: Sequence[_Sequence]) -> SampleResult:
    topk: list[TopLogprobs | None] = [None] * len(played)
    if request.topk_sample_logprobs:
        topk = [
            read.top(
                np.concatenate([prompt, np.array(one.tokens, dtype=np.int64)]), len(prompt) - 1,
                request.topk_sample_logprobs, request.parameters,
            )
            for one in played
        ]  # fmt: skip
    sequences = tuple(
        SampledSequence(
            tokens=np.array(one.tokens, dtype=np.int32),
            logprobs=np.array(one.logprobs, dtype=np.float32),
            stop_reason="length" if one.hit_limit else "stop",
            topk=best,
        )
        for one, best in zip(played, topk, strict=True)
    )
    logprobs = top = targets = None
    if request.prompt_logprobs:
        first = np.full(1, np.nan, dtype=np.float32)
        logprobs = np.concatenate([first, read.chosen(prompt, prompt[1:, None])[:, 0]])
    if request.topk_prompt_logprobs:
        top = _after_nothing(read.top(prompt, 0, request.topk_prompt_logprobs, None))
    if request.target_prompt_logprobs is not None:
        asked = request.target_prompt_logprobs.astype(np.int64)
        targets = read.chosen(prompt, np.maximum(asked, 0))
        targets[asked == NO_TARGET] = np.nan
    return SampleResult(sequences=sequences, prompt_logprobs=logprobs, topk_prompt=top, target_prompt_logprobs=targets)


def _after_nothing(top: TopLogprobs) -> TopLogprobs:
    """With a first position before which nothing stands."""
    tokens, logprobs = (np.pad(values, ((1, 0), (0, 0))) for values in (top.tokens, top.logprobs))
    logprobs[0] = NO_LOGPROB
    return TopLogprobs(tokens, logprobs)


class _Reader:
    """Distributions of the base's present weights at the positions of given sequences."""

    def __init__(self, base: ServedBase) -> None:
        self._base = base
        self._last: tuple[bytes, torch.Tensor] | None = None  # states of the sequence that was read last

    @torch.no_grad()
    def _states(self, tokens: np.ndarray) -> torch.Tensor:
        """Last hidden states [N, H]."""
        key = tokens.tobytes()
        if self._last is None or self._last[0] != key:
            batch = unscored_batch([tokens.tolist()], self._base.pad_id).to(self._base.device)
            self._last = key, hidden_states(self._base.model, batch)[0]
        return self._last[1]

    @torch.no_grad()
    def _chunks(self, tokens: np.ndarray, start: int, temperature: float) -> list[tuple[int, torch.Tensor]]:
        """(first position, log p [C, V]) of the positions from `start` that another token follows."""
        states_NH = self._states(tokens)[start : len(tokens) - 1]
        size = default_chunk_tokens(states_NH.device.type, self._base.head.weight.shape[0])
        found, head = [], self._base.head
        for begin in range(0, len(states_NH), size):
            part = states_NH[begin : begin + size]
            temperatures = None if temperature == 1 else part.new_full((len(part),), temperature)
            found.append((begin, log_softmax_chunk(part, head.weight, head.bias, temperatures)))
        return found

    def chosen(self, tokens: np.ndarray, asked_NK: np.ndarray) -> np.ndarray:
        """Log p of some tokens at each position after the first, float32 [N, K], at temperature 1."""
        found = np.zeros(asked_NK.shape, dtype=np.float32)
        for begin, log_p_CV in self._chunks(tokens, 0, 1.0):
            part = slice(begin, begin + len(log_p_CV))
            ids = torch.from_numpy(asked_NK[part]).to(log_p_CV.device)
            found[part] = log_p_CV.gather(1, ids).float().cpu().numpy()
        return found

    def top(self, tokens: np.ndarray, start: int, count: int, parameters: SampleParameters | None) -> TopLogprobs:
        """Most likely tokens at each position after `start`, of the distribution that the parameters sample from."""
        size = len(tokens) - 1 - start
        ids, logprobs = np.zeros((size, count), dtype=np.int32), np.full((size, count), NO_LOGPROB, dtype=np.float32)
        temperature = parameters.temperature if parameters is not None else 1.0
        for begin, log_p_CV in self._chunks(tokens, start, temperature or 1.0):
            if parameters is not None and temperature > 0:
                kept = _settings(self._base, parameters, 1)
                log_p_CV = torch.log_softmax(restricted(log_p_CV, kept), dim=-1)
            best = log_p_CV.topk(count, dim=-1)
            there = torch.isfinite(best.values).cpu().numpy()
            part = slice(begin, begin + len(log_p_CV))
            ids[part] = np.where(there, best.indices.cpu().numpy(), 0)
            logprobs[part] = np.where(there, best.values.float().cpu().numpy(), NO_LOGPROB)
        return TopLogprobs(ids, logprobs)
