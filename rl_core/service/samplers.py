"""Samplers: weights to sample from, continuations of prompts, and log-probabilities of prescribed tokens.

Sequences with equal parameters are decoded together. If the rollout engine supports adapters per slot
(`capabilities.check_slot_adapters`), a batch covers all samplers of a base that have an adapter or no changes;
otherwise it covers one sampler. Suffixes: N positions, V vocabulary, K tokens at one position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_core.data.batches import build_unscored_batch
from rl_core.environments.step_pool import TurnOutcome
from rl_core.inference.sampling import compute_sequence_seed, filter_log_probabilities
from rl_core.models.chunked_head import (
    compute_chunk_tokens,
    compute_log_softmax_chunk,
    expand_temperatures,
)
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.routed_adapters import LowRank
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.request_checks import NO_TARGET
from rl_core.service.requests import SampleParameters, SampleRequest
from rl_core.service.results import SampledSequence, SampleResult, TopLogprobs
from rl_core.service.saved_weights import load_adapter, load_sampling_weights
from rl_core.settings import SamplingSettings

NO_LOGPROB = -99999.0  # at an entry without a token, as clients expect
_ANY_STOP_TEXT = ("\0",)  # makes the engine call a sequence's `should_stop`


@dataclass(slots=True)
class SamplerWeights:
    """Weights that replace or update those of a base model, from a state; None = the base itself."""

    base: SharedBaseModel
    state: Mapping[str, Any] | None = None
    _adapter: dict[str, LowRank] | None = None

    @property
    def adapter(self) -> Mapping[str, LowRank] | None:
        """Low-rank updates of the base ({} for the base itself); None if all weights are replaced."""
        if self.state is None:
            return {}
        if self._adapter is None and self.state["run"]["adapter"] is not None:
            self._adapter = load_adapter(self.state, self.base.device)
        return self._adapter

    def merge_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that differ from the base's, by name."""
        return {} if self.state is None else load_sampling_weights(self.base, self.state)


@dataclass(slots=True)
class PublishedWeights:
    """Weights shared by all in-flight samplers of a run."""

    newest: SamplerWeights


@dataclass(slots=True)
class Sampler:
    """Base model with weights from a source: none, copies of a run's (snapshot) or the last published (in-flight)."""

    sampler_id: str
    base: SharedBaseModel
    source: SamplerWeights | PublishedWeights

    @property
    def weights(self) -> SamplerWeights:
        """Current weights."""
        return self.source.newest if isinstance(self.source, PublishedWeights) else self.source


@dataclass(slots=True)
class _SampledTurn:
    """Sequence of a single turn; a `RolloutSequence`."""

    prompt_ids: list[int]
    seed: int
    has_stop_text: Callable[[list[int]], bool] | None
    adapter: int = -1  # index among the adapters of this decoding; negative = none
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hit_limit: bool = True

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Store the only action."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return whether the newest token completes a stop text."""
        return self.has_stop_text is not None and self.has_stop_text(action_ids)


@dataclass(slots=True)
class SampleJob:
    """Checked request of a sampler, and its sequences."""

    sampler: Sampler
    request: SampleRequest
    prompt: np.ndarray  # int64 [P]
    sequences: list[_SampledTurn] = field(default_factory=list)

    @property
    def needs_distributions(self) -> bool:
        """True if the request asks for distributions at prescribed tokens."""
        request = self.request
        return bool(
            request.prompt_logprobs
            or request.topk_prompt_logprobs
            or request.topk_sample_logprobs
            or request.recorded_tokens
            or request.target_prompt_logprobs is not None
        )


def run_sample_jobs(jobs: Sequence[SampleJob], slots: int) -> list[SampleResult | Exception]:
    """Return the results of requests, in order; a result does not depend on other requests.

    Args:
        slots: sequences decoded together.
    """
    groups: dict[tuple[str, str], list[SampleJob]] = {}
    for job in jobs:
        base = job.sampler.base
        can_share = job.sampler.weights.adapter is not None and base.samples_adapters.allowed
        sampler_key = "" if can_share else job.sampler.sampler_id
        groups.setdefault((base.name, sampler_key), []).append(job)
    results: dict[int, SampleResult | Exception] = {}
    for (_, sampler_key), group in groups.items():
        group_results = _run_job_group(group, slots, merges_weights=bool(sampler_key))
        results |= zip(map(id, group), group_results, strict=True)
    return [results[id(job)] for job in jobs]


def _run_job_group(
    jobs: Sequence[SampleJob], slots: int, *, merges_weights: bool
) -> Sequence[SampleResult | Exception]:
    """Return the results of a group. If it fails, run each sampler separately, so that an error stays with its sampler.

    Args:
        merges_weights: weights replace the base's; all jobs are then of one sampler.
    """
    by_sampler: dict[str, list[SampleJob]] = {}
    for job in jobs:
        by_sampler.setdefault(job.sampler.sampler_id, []).append(job)
    try:
        if merges_weights:
            with jobs[0].sampler.base.swap_weights(jobs[0].sampler.weights.merge_weights()):
                _generate_sequences(jobs, slots, {}, [])
        else:
            _generate_sequences(jobs, slots, *_number_adapters(jobs))
        results: dict[int, SampleResult | Exception] = {}
        for sampler_jobs in by_sampler.values():
            results |= zip(map(id, sampler_jobs), _build_results(sampler_jobs), strict=True)
    except Exception as error:
        if len(by_sampler) == 1:
            return [error] * len(jobs)
        results = {}
        for sampler_jobs in by_sampler.values():
            separate = _run_job_group(sampler_jobs, slots, merges_weights=merges_weights)
            results |= zip(map(id, sampler_jobs), separate, strict=True)
    return [results[id(job)] for job in jobs]


def _number_adapters(
    jobs: Sequence[SampleJob],
) -> tuple[dict[str, int], list[Mapping[str, LowRank]]]:
    """Return the index of each sampler's adapter, if it has one, and the adapters."""
    numbers: dict[str, int] = {}
    indices: dict[int, int] = {}  # by weights, which in-flight samplers share
    adapters: list[Mapping[str, LowRank]] = []
    for job in jobs:
        weights = job.sampler.weights
        if not weights.adapter:
            continue
        if id(weights) not in indices:
            indices[id(weights)] = len(adapters)
            adapters.append(weights.adapter)
        numbers[job.sampler.sampler_id] = indices[id(weights)]
    return numbers, adapters


def _build_results(jobs: Sequence[SampleJob]) -> list[SampleResult]:
    """Build the results of decoded requests of one sampler."""
    base = jobs[0].sampler.base
    weights: Mapping[str, torch.Tensor] = {}
    if any(job.needs_distributions for job in jobs):
        weights = jobs[0].sampler.weights.merge_weights()
    with base.swap_weights(weights):
        reader = _DistributionReader(base)
        return [_build_result(reader, job.request, job.prompt, job.sequences) for job in jobs]


def _generate_sequences(
    jobs: Sequence[SampleJob],
    slots: int,
    adapter_numbers: Mapping[str, int],
    adapters: Sequence[Mapping[str, LowRank]],
) -> None:
    """Decode all sequences.

    Args:
        adapter_numbers: index into `adapters`, by sampler.
    """
    base = jobs[0].sampler.base
    groups: dict[SampleParameters, list[_SampledTurn]] = {}
    for job in jobs:
        parameters = job.request.parameters
        has_stop_text = _build_stop_test(base, parameters)
        adapter_number = adapter_numbers.get(job.sampler.sampler_id, -1)
        job.sequences = []
        for index in range(job.request.num_samples):
            seed = compute_sequence_seed("sample", job.request.seed, index)
            turn = _SampledTurn(job.prompt.tolist(), seed, has_stop_text, adapter_number)
            job.sequences.append(turn)
        # A prompt that fills the context gets empty continuations.
        if base.limits.context > len(job.prompt):
            groups.setdefault(parameters, []).extend(job.sequences)
    for parameters, sequences in groups.items():
        base.generate_sequences(
            sequences,
            _build_sampling_settings(base, parameters, slots),
            _list_end_ids(base, parameters),
            adapters,
        )


def _build_sampling_settings(
    base: SharedBaseModel, parameters: SampleParameters, slots: int
) -> SamplingSettings:
    stop, context = parameters.stop or (), base.limits.context
    return SamplingSettings(
        temperature=float(parameters.temperature),
        top_k=max(0, parameters.top_k),
        top_p=float(parameters.top_p),
        max_completion_tokens=min(parameters.max_tokens or context, context, 1_048_576),
        slots=slots,
        stop=_ANY_STOP_TEXT if stop and isinstance(stop[0], str) else (),
    )


def _list_end_ids(base: SharedBaseModel, parameters: SampleParameters) -> list[int]:
    """Return the tokens that end a sequence: the model's, or those that the request sets instead."""
    if parameters.stop is None:
        return list(base.eos_ids)
    return [stop for stop in parameters.stop if not isinstance(stop, str)]


def _build_stop_test(
    base: SharedBaseModel, parameters: SampleParameters
) -> Callable[[list[int]], bool] | None:
    """Build the test for a stop text at the end of the tokens; None without stop texts."""
    texts = [stop for stop in parameters.stop or () if isinstance(stop, str)]
    if not texts:
        return None
    # A token has at least one byte, a character at most four; decoding may strip the first one.
    max_stop_tokens = 4 * max(map(len, texts)) + 8

    def has_stop(ids: list[int]) -> bool:
        text = base.decoder.decode_ids(ids[-max_stop_tokens:])
        return any(stop in text for stop in texts)

    return has_stop


def _build_result(
    reader: _DistributionReader,
    request: SampleRequest,
    prompt: np.ndarray,
    turns: Sequence[_SampledTurn],
) -> SampleResult:
    sequences = []
    for turn in turns:
        tokens = np.concatenate([prompt, np.array(turn.tokens, dtype=np.int64)])
        topk, recorded = (
            reader.read_top_logprobs(tokens, len(prompt) - 1, count, request.parameters)
            if count
            else None
            for count in (request.topk_sample_logprobs, request.recorded_tokens)
        )
        sequence = SampledSequence(
            tokens=np.array(turn.tokens, dtype=np.int32),
            logprobs=np.array(turn.logprobs, dtype=np.float32),
            stop_reason="length" if turn.hit_limit else "stop",
            topk=topk,
            recorded=recorded,
        )
        sequences.append(sequence)
    prompt_logprobs = topk_prompt = target_logprobs = None
    if request.prompt_logprobs:
        first = np.full(1, np.nan, dtype=np.float32)
        next_logprobs = reader.read_token_logprobs(prompt, prompt[1:, None])[:, 0]
        prompt_logprobs = np.concatenate([first, next_logprobs])
    if request.topk_prompt_logprobs:
        topk_prompt = _prepend_empty_position(
            reader.read_top_logprobs(prompt, 0, request.topk_prompt_logprobs, None)
        )
    if request.target_prompt_logprobs is not None:
        target_ids = request.target_prompt_logprobs.astype(np.int64)
        target_logprobs = reader.read_token_logprobs(prompt, np.maximum(target_ids, 0))
        target_logprobs[target_ids == NO_TARGET] = np.nan
    return SampleResult(
        sequences=tuple(sequences),
        prompt_logprobs=prompt_logprobs,
        topk_prompt=topk_prompt,
        target_prompt_logprobs=target_logprobs,
    )


def _prepend_empty_position(top: TopLogprobs) -> TopLogprobs:
    """Prepend an empty entry for the first position, which no token precedes."""
    tokens, logprobs = (np.pad(values, ((1, 0), (0, 0))) for values in (top.tokens, top.logprobs))
    logprobs[0] = NO_LOGPROB
    return TopLogprobs(tokens, logprobs)


class _DistributionReader:
    """Reader of the distributions of the base's current weights along token sequences."""

    def __init__(self, base: SharedBaseModel) -> None:
        self._base = base
        self._last: tuple[bytes, torch.Tensor] | None = None  # last sequence and its hidden states

    @torch.no_grad()
    def _compute_hidden_states(self, tokens: np.ndarray) -> torch.Tensor:
        """Compute the last hidden states [N, H]."""
        key = tokens.tobytes()
        if self._last is None or self._last[0] != key:
            batch = build_unscored_batch([tokens.tolist()], self._base.pad_id).to(self._base.device)
            self._last = key, compute_hidden_states(self._base.model, batch)[0]
        return self._last[1]

    @torch.no_grad()
    def _compute_logprob_chunks(
        self, tokens: np.ndarray, start: int, temperature: float
    ) -> list[tuple[int, torch.Tensor]]:
        """Return (first position, log p [C, V]) for the positions from `start` that another token follows."""
        states_NH = self._compute_hidden_states(tokens)[start : len(tokens) - 1]
        size = compute_chunk_tokens(states_NH.device.type, self._base.head.weight.shape[0])
        chunks, head = [], self._base.head
        for begin in range(0, len(states_NH), size):
            states_CH = states_NH[begin : begin + size]
            temperatures = expand_temperatures([temperature], [len(states_CH)], states_CH.device)
            log_p_CV = compute_log_softmax_chunk(states_CH, head.weight, head.bias, temperatures)
            chunks.append((begin, log_p_CV))
        return chunks

    def read_token_logprobs(self, tokens: np.ndarray, token_ids_NK: np.ndarray) -> np.ndarray:
        """Compute log p of some tokens at each position after the first, float32 [N, K], at temperature 1."""
        logprobs = np.zeros(token_ids_NK.shape, dtype=np.float32)
        for begin, log_p_CV in self._compute_logprob_chunks(tokens, 0, 1.0):
            rows = slice(begin, begin + len(log_p_CV))
            ids = torch.from_numpy(token_ids_NK[rows]).to(log_p_CV.device)
            logprobs[rows] = log_p_CV.gather(1, ids).float().cpu().numpy()
        return logprobs

    def read_top_logprobs(
        self, tokens: np.ndarray, start: int, count: int, parameters: SampleParameters | None
    ) -> TopLogprobs:
        """Find the most likely tokens at each position after `start` under the parameters' sampling distribution."""
        size, count = len(tokens) - 1 - start, min(count, self._base.limits.vocab_size)
        ids = np.zeros((size, count), dtype=np.int32)
        logprobs = np.full((size, count), NO_LOGPROB, dtype=np.float32)
        temperature = parameters.temperature if parameters is not None else 1.0
        for begin, log_p_CV in self._compute_logprob_chunks(tokens, start, temperature or 1.0):
            if parameters is not None and temperature > 0:
                sampling = _build_sampling_settings(self._base, parameters, 1)
                log_p_CV = torch.log_softmax(filter_log_probabilities(log_p_CV, sampling), dim=-1)
            best = log_p_CV.topk(count, dim=-1)
            exists = torch.isfinite(best.values).cpu().numpy()
            rows = slice(begin, begin + len(log_p_CV))
            ids[rows] = np.where(exists, best.indices.cpu().numpy(), 0)
            logprobs[rows] = np.where(exists, best.values.float().cpu().numpy(), NO_LOGPROB)
        return TopLogprobs(ids, logprobs)
