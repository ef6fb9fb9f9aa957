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

NO_LOGPROB = -99999.0  # of a place without a token, as clients expect it
_ANY_STOP_TEXT = ("\0",)  # makes the engine ask a sequence whether it has ended


@dataclass(slots=True)
class SamplerWeights:
    """Weights in place of a base model's, or over them: those of a state, or none."""

    base: SharedBaseModel
    state: Mapping[str, Any] | None = None
    _adapter: dict[str, LowRank] | None = None

    @property
    def adapter(self) -> Mapping[str, LowRank] | None:
        """Low-rank updates of the base ({} = the base itself); None = all its weights are others."""
        if self.state is None:
            return {}
        if self._adapter is None and self.state["run"]["adapter"] is not None:
            self._adapter = load_adapter(self.state, self.base.device)
        return self._adapter

    def merge_weights(self) -> Mapping[str, torch.Tensor]:
        """The weights that differ from the base's, by name."""
        return {} if self.state is None else load_sampling_weights(self.base, self.state)


@dataclass(slots=True)
class PublishedWeights:
    """The weights that all in-flight samplers of a run share."""

    newest: SamplerWeights


@dataclass(slots=True)
class Sampler:
    """A base model with other weights: none, copies of a run's (snapshot), or those last published (in-flight)."""

    sampler_id: str
    base: SharedBaseModel
    source: SamplerWeights | PublishedWeights

    @property
    def weights(self) -> SamplerWeights:
        """The weights now."""
        return self.source.newest if isinstance(self.source, PublishedWeights) else self.source


@dataclass(slots=True)
class _SampledTurn:
    """A `RolloutSequence` of one turn."""

    prompt_ids: list[int]
    seed: int
    has_stop_text: Callable[[list[int]], bool] | None
    adapter: int = -1  # among those of the engine's run; below 0 = none
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hit_limit: bool = True

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Take the only action."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest token completes a stop text."""
        return self.has_stop_text is not None and self.has_stop_text(action_ids)


@dataclass(slots=True)
class SampleJob:
    """A checked request of a sampler, and its sequences."""

    sampler: Sampler
    request: SampleRequest
    prompt: np.ndarray  # int64 [P]
    sequences: list[_SampledTurn] = field(default_factory=list)

    @property
    def needs_distributions(self) -> bool:
        """True = distributions at given tokens are asked for."""
        asked = self.request
        return bool(
            asked.prompt_logprobs
            or asked.topk_prompt_logprobs
            or asked.topk_sample_logprobs
            or asked.target_prompt_logprobs is not None
        )


def run_sample_jobs(jobs: Sequence[SampleJob], slots: int) -> list[SampleResult | Exception]:
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
        for job, answer in zip(
            group, _run_job_group(group, slots, merges_weights=bool(alone)), strict=True
        ):
            answers[id(job)] = answer
    return [answers[id(job)] for job in jobs]


def _run_job_group(
    jobs: Sequence[SampleJob], slots: int, *, merges_weights: bool
) -> Sequence[SampleResult | Exception]:
    """Answers of a group; where that fails, of each sampler alone, so that a fault of one stays its own.

    Args:
        merged: weights are put in the place of the base's; then all jobs are of one sampler.
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
        found = {
            id(job): answer
            for some in by_sampler.values()
            for job, answer in zip(some, _build_results(some), strict=True)
        }
        return [found[id(job)] for job in jobs]
    except Exception as error:
        if len(by_sampler) == 1:
            return [error] * len(jobs)
        alone = {
            id(job): answer
            for some in by_sampler.values()
            for job, answer in zip(
                some, _run_job_group(some, slots, merges_weights=merges_weights), strict=True
            )
        }
        return [alone[id(job)] for job in jobs]


def _number_adapters(
    jobs: Sequence[SampleJob],
) -> tuple[dict[str, int], list[Mapping[str, LowRank]]]:
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


def _build_results(jobs: Sequence[SampleJob]) -> list[SampleResult]:
    """Answers to requests of one sampler that have been played."""
    base = jobs[0].sampler.base
    weights = (
        jobs[0].sampler.weights.merge_weights()
        if any(job.needs_distributions for job in jobs)
        else {}
    )
    with base.swap_weights(weights):
        read = _DistributionReader(base)
        return [_build_result(read, job.request, job.prompt, job.sequences) for job in jobs]


def _generate_sequences(
    jobs: Sequence[SampleJob],
    slots: int,
    adapter_numbers: Mapping[str, int],
    adapters: Sequence[Mapping[str, LowRank]],
) -> None:
    """Decode all sequences. numbers: of the adapters, by sampler."""
    base = jobs[0].sampler.base
    groups: dict[SampleParameters, list[_SampledTurn]] = {}
    for job in jobs:
        parameters = job.request.parameters
        stops, number = (
            _build_stop_test(base, parameters),
            adapter_numbers.get(job.sampler.sampler_id, -1),
        )
        job.sequences = [
            _SampledTurn(
                job.prompt.tolist(),
                compute_sequence_seed("sample", job.request.seed, index),
                stops,
                number,
            )
            for index in range(job.request.num_samples)
        ]
        # else nothing can follow, and each is cut off at once
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
    stop = parameters.stop or ()
    return SamplingSettings(
        temperature=float(parameters.temperature),
        top_k=max(0, parameters.top_k),
        top_p=float(parameters.top_p),
        max_completion_tokens=min(
            parameters.max_tokens or base.limits.context, base.limits.context, 1_048_576
        ),
        slots=slots,
        stop=_ANY_STOP_TEXT if stop and isinstance(stop[0], str) else (),
    )


def _list_end_ids(base: SharedBaseModel, parameters: SampleParameters) -> list[int]:
    """Tokens that end a sequence: the model's own, or those asked for in their place."""
    if parameters.stop is None:
        return list(base.eos_ids)
    return [stop for stop in parameters.stop if not isinstance(stop, str)]


def _build_stop_test(
    base: SharedBaseModel, parameters: SampleParameters
) -> Callable[[list[int]], bool] | None:
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


def _build_result(
    reader: _DistributionReader,
    request: SampleRequest,
    prompt: np.ndarray,
    played: Sequence[_SampledTurn],
) -> SampleResult:
    topk: list[TopLogprobs | None] = [None] * len(played)
    if request.topk_sample_logprobs:
        topk = [
            reader.read_top_logprobs(
                np.concatenate([prompt, np.array(one.tokens, dtype=np.int64)]),
                len(prompt) - 1,
                request.topk_sample_logprobs,
                request.parameters,
            )
            for one in played
        ]
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
        logprobs = np.concatenate(
            [first, reader.read_token_logprobs(prompt, prompt[1:, None])[:, 0]]
        )
    if request.topk_prompt_logprobs:
        top = _prepend_empty_position(
            reader.read_top_logprobs(prompt, 0, request.topk_prompt_logprobs, None)
        )
    if request.target_prompt_logprobs is not None:
        asked = request.target_prompt_logprobs.astype(np.int64)
        targets = reader.read_token_logprobs(prompt, np.maximum(asked, 0))
        targets[asked == NO_TARGET] = np.nan
    return SampleResult(
        sequences=sequences,
        prompt_logprobs=logprobs,
        topk_prompt=top,
        target_prompt_logprobs=targets,
    )


def _prepend_empty_position(top: TopLogprobs) -> TopLogprobs:
    """With a first position before which nothing stands."""
    tokens, logprobs = (np.pad(values, ((1, 0), (0, 0))) for values in (top.tokens, top.logprobs))
    logprobs[0] = NO_LOGPROB
    return TopLogprobs(tokens, logprobs)


class _DistributionReader:
    """Distributions of the base's present weights at the positions of given sequences."""

    def __init__(self, base: SharedBaseModel) -> None:
        self._base = base
        self._last: tuple[bytes, torch.Tensor] | None = (
            None  # states of the sequence that was read last
        )

    @torch.no_grad()
    def _compute_hidden_states(self, tokens: np.ndarray) -> torch.Tensor:
        """Last hidden states [N, H]."""
        key = tokens.tobytes()
        if self._last is None or self._last[0] != key:
            batch = build_unscored_batch([tokens.tolist()], self._base.pad_id).to(self._base.device)
            self._last = key, compute_hidden_states(self._base.model, batch)[0]
        return self._last[1]

    @torch.no_grad()
    def _compute_logprob_chunks(
        self, tokens: np.ndarray, start: int, temperature: float
    ) -> list[tuple[int, torch.Tensor]]:
        """(first position, log p [C, V]) of the positions from `start` that another token follows."""
        states_NH = self._compute_hidden_states(tokens)[start : len(tokens) - 1]
        size = compute_chunk_tokens(states_NH.device.type, self._base.head.weight.shape[0])
        found, head = [], self._base.head
        for begin in range(0, len(states_NH), size):
            part = states_NH[begin : begin + size]
            temperatures = expand_temperatures([temperature], [len(part)], part.device)
            found.append(
                (begin, compute_log_softmax_chunk(part, head.weight, head.bias, temperatures))
            )
        return found

    def read_token_logprobs(self, tokens: np.ndarray, token_ids_NK: np.ndarray) -> np.ndarray:
        """Log p of some tokens at each position after the first, float32 [N, K], at temperature 1."""
        found = np.zeros(token_ids_NK.shape, dtype=np.float32)
        for begin, log_p_CV in self._compute_logprob_chunks(tokens, 0, 1.0):
            part = slice(begin, begin + len(log_p_CV))
            ids = torch.from_numpy(token_ids_NK[part]).to(log_p_CV.device)
            found[part] = log_p_CV.gather(1, ids).float().cpu().numpy()
        return found

    def read_top_logprobs(
        self, tokens: np.ndarray, start: int, count: int, parameters: SampleParameters | None
    ) -> TopLogprobs:
        """Most likely tokens at each position after `start`, of the distribution that the parameters sample from."""
        size = len(tokens) - 1 - start
        ids, logprobs = (
            np.zeros((size, count), dtype=np.int32),
            np.full((size, count), NO_LOGPROB, dtype=np.float32),
        )
        temperature = parameters.temperature if parameters is not None else 1.0
        for begin, log_p_CV in self._compute_logprob_chunks(tokens, start, temperature or 1.0):
            if parameters is not None and temperature > 0:
                kept = _build_sampling_settings(self._base, parameters, 1)
                log_p_CV = torch.log_softmax(filter_log_probabilities(log_p_CV, kept), dim=-1)
            best = log_p_CV.topk(count, dim=-1)
            there = torch.isfinite(best.values).cpu().numpy()
            part = slice(begin, begin + len(log_p_CV))
            ids[part] = np.where(there, best.indices.cpu().numpy(), 0)
            logprobs[part] = np.where(there, best.values.float().cpu().numpy(), NO_LOGPROB)
        return TopLogprobs(ids, logprobs)
