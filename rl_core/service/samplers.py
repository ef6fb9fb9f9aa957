"""Samplers: weights to sample from, continuations of prompts, and log-probabilities of given tokens.

Sequences with equal parameters are decoded together: those of all samplers of a base that have adapters or nothing over
it, where the rollout engine takes adapters slot by slot (`capabilities.slot_adapters`); else those of one sampler.
Suffixes: N positions, V vocabulary, K tokens at one position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_core.data.batches import unscored_batch
from rl_core.environments.step_pool import Turnover
from rl_core.inference.sampling import restricted, sequence_seed
from rl_core.models.chunked_head import default_chunk_tokens, log_softmax_chunk, temperatures_of
from rl_core.models.hidden_states import hidden_states
from rl_core.models.routed_adapters import LowRank
from rl_core.service.answers import SampledSequence, SampleResult, TopLogprobs
from rl_core.service.input_checks import NO_TARGET
from rl_core.service.requests import SampleParameters, SampleRequest
from rl_core.service.saved_weights import adapter_in, sampling_weights
from rl_core.service.served_base import ServedBase
from rl_core.settings import SamplingSettings

__all__ = ["Published", "SampleJob", "Sampler", "Weights", "sample_all"]

NO_LOGPROB = -99999.0  # of a place without a token, as clients expect it
_ANY_TEXT = ("\0",)  # makes the engine ask a sequence whether it has ended


@dataclass(slots=True)
class Weights:
    """Weights in place of a base model's, or over them: those of a state, or none."""

    base: ServedBase
    state: Mapping[str, Any] | None = None
    _adapter: dict[str, LowRank] | None = None

    @property
    def adapter(self) -> Mapping[str, LowRank] | None:
        """Low-rank updates of the base ({} = the base itself); None = all its weights are others."""
        if self.state is None:
            return {}
        if self._adapter is None and self.state["run"]["adapter"] is not None:
            self._adapter = adapter_in(self.state, self.base.device)
        return self._adapter

    def merged(self) -> Mapping[str, torch.Tensor]:
        """The weights that differ from the base's, by name."""
        return {} if self.state is None else sampling_weights(self.base, self.state)


@dataclass(slots=True)
class Published:
    """The weights that all in-flight samplers of a run share."""

    newest: Weights


@dataclass(slots=True)
class Sampler:
    """A base model with other weights: none, copies of a run's (snapshot), or those last published (in-flight)."""

    sampler_id: str
    base: ServedBase
    source: Weights | Published

    @property
    def weights(self) -> Weights:
        """The weights now."""
        return self.source.newest if isinstance(self.source, Published) else self.source


@dataclass(slots=True)
class _Sequence:
    """A `RolloutSequence` of one turn."""

    prompt_ids: list[int]
    seed: int
    stops: Callable[[list[int]], bool] | None
    adapter: int = -1  # among those of the engine's run; below 0 = none
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


@dataclass(slots=True)
class SampleJob:
    """A checked request of a sampler, and its sequences."""

    sampler: Sampler
    request: SampleRequest
    prompt: np.ndarray  # int64 [P]
    sequences: list[_Sequence] = field(default_factory=list)

    @property
    def reads(self) -> bool:
        """True = distributions at given tokens are asked for."""
        asked = self.request
        return bool(
            asked.prompt_logprobs or asked.topk_prompt_logprobs or asked.topk_sample_logprobs
            or asked.target_prompt_logprobs is not None
        )  # fmt: skip


def sample_all(jobs: Sequence[SampleJob], slots: int) -> list[SampleResult | Exception]:
    """Answers to requests, in order; a request's do not depend on the others.

    Args:
        slots: sequences decoded together.
    """
    groups: dict[tuple[str, str], list[SampleJob]] = {}
    for job in jobs:
        base = job.sampler.base
        joint = job.sampler.weights.adapter is not None and base.samples_adapters.allowed
        groups.setdefault((base.name, "" if joint else job.sampler.sampler_id), []).append(job)
    answers: dict[int, SampleResult | Exception] = {}
    for (_, alone), group in groups.items():
        for job, answer in zip(group, _answers(group, slots, merged=bool(alone)), strict=True):
            answers[id(job)] = answer
    return [answers[id(job)] for job in jobs]


def _answers(jobs: Sequence[SampleJob], slots: int, *, merged: bool) -> Sequence[SampleResult | Exception]:
    """Answers of a group; where that fails, of each sampler alone, so that a fault of one stays its own.

    Args:
        merged: weights are put in the place of the base's; then all jobs are of one sampler.
    """
    by_sampler: dict[str, list[SampleJob]] = {}
    for job in jobs:
        by_sampler.setdefault(job.sampler.sampler_id, []).append(job)
    try:
        if merged:
            with jobs[0].sampler.base.holding(jobs[0].sampler.weights.merged()):
                _play(jobs, slots, {}, [])
        else:
            _play(jobs, slots, *_adapters(jobs))
        found = {id(job): answer for some in by_sampler.values() for job, answer in zip(some, _read(some), strict=True)}
        return [found[id(job)] for job in jobs]
    except Exception as error:
        if len(by_sampler) == 1:
            return [error] * len(jobs)
        alone = {
            id(job): answer
            for some in by_sampler.values()
            for job, answer in zip(some, _answers(some, slots, merged=merged), strict=True)
        }
        return [alone[id(job)] for job in jobs]


def _adapters(jobs: Sequence[SampleJob]) -> tuple[dict[str, int], list[Mapping[str, LowRank]]]:
    """The number of each sampler's adapter, where it has one, and the adapters."""
    numbers: dict[str, int] = {}
    places: dict[int, int] = {}  # of weights: in-flight samplers share theirs
    adapters: list[Mapping[str, LowRank]] = []
    for job in jobs:
        weights = job.sampler.weights
        if not weights.adapter:
            continue
        if id(weights) not in places:
            places[id(weights)] = len(adapters)
            adapters.append(weights.adapter)
        numbers[job.sampler.sampler_id] = places[id(weights)]
    return numbers, adapters


def _read(jobs: Sequence[SampleJob]) -> list[SampleResult]:
    """Answers to requests of one sampler that have been played."""
    base = jobs[0].sampler.base
    weights = jobs[0].sampler.weights.merged() if any(job.reads for job in jobs) else {}
    with base.holding(weights):
        read = _DistributionReader(base)
        return [_answer(read, job.request, job.prompt, job.sequences) for job in jobs]


def _play(
    jobs: Sequence[SampleJob], slots: int, numbers: Mapping[str, int], adapters: Sequence[Mapping[str, LowRank]]
) -> None:
    """Decode all sequences. numbers: of the adapters, by sampler."""
    base = jobs[0].sampler.base
    groups: dict[SampleParameters, list[_Sequence]] = {}
    for job in jobs:
        parameters = job.request.parameters
        stops, number = _stop_texts(base, parameters), numbers.get(job.sampler.sampler_id, -1)
        job.sequences = [
            _Sequence(job.prompt.tolist(), sequence_seed("sample", job.request.seed, index), stops, number)
            for index in range(job.request.num_samples)
        ]
        if base.limits.context > len(job.prompt):  # else nothing can follow, and each is cut off at once
            groups.setdefault(parameters, []).extend(job.sequences)
    for parameters, sequences in groups.items():
        base.play(sequences, _settings(base, parameters, slots), _end_ids(base, parameters), adapters)


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


def _answer(
    read: _DistributionReader, request: SampleRequest, prompt: np.ndarray, played: Sequence[_Sequence]
) -> SampleResult:
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


class _DistributionReader:
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
            temperatures = temperatures_of([temperature], [len(part)], part.device)
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
