"""Evaluation of one model, or comparison of two: scores of texts, samples to prompts, differences with intervals.

Texts are scored by next-token likelihood, entropy and exact KL. Logits have the models' precision; everything computed
from them is float64. Suffixes: R texts, N positions that a token follows, C of them at a time, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rl_core.analysis.statistics import (
    bootstrap_ratio,
    compute_distinct_ngrams,
    compute_self_bleu,
    sign_test,
)
from rl_core.cpu.layer_kernels import compute_linear
from rl_core.data.batches import build_unscored_batch, plan_micro_batches
from rl_core.errors import ServiceError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.losses.kl import exact_forward_kl
from rl_core.losses.supervised import token_entropy
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.request_checks import (
    EvaluateRequest,
    ModelLimits,
    check_sample,
    encode_checked_rows,
)
from rl_core.service.requests import SampleRequest
from rl_core.service.responses import (
    DiversityComparison,
    DiversityScores,
    Estimate,
    ModelEvaluation,
    TextComparison,
    TextRow,
    TextScores,
)
from rl_core.service.results import SampledSequence
from rl_core.service.samplers import SampleJob, Sampler, run_sample_jobs
from rl_core.settings import ServiceEngineSettings

CHUNK_CELLS = 1 << 22  # logits of one model at a time: 32 MiB in float64
NGRAM_ORDERS = ("1", "2", "3")  # of distinct-n
MAX_EXPONENT = 700.0  # keeps exp finite

PromptColumns = dict[str, np.ndarray]  # float64 [P] by name: values for each prompt


class RowLogits(Protocol):
    """Token rows that a model has read."""

    def compute_logits(self, begin: int, end: int) -> torch.Tensor:
        """Compute the logits [C, V] of positions `begin` to `end`; a row has one position less than tokens."""


class LogitReader(Protocol):
    """Model that reads token rows."""

    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """Read rows of at least 2 tokens each."""


class BaseModelReader:
    """Reader of a base model, optionally with other weights."""

    def __init__(self, base: SharedBaseModel, weights: Mapping[str, torch.Tensor]) -> None:
        self.base, self._weights = base, weights

    @torch.no_grad()
    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """See `LogitReader`."""
        batch = build_unscored_batch([list(row) for row in rows], self.base.pad_id)
        batch = batch.to(self.base.device)
        with self.base.swap_weights(self._weights) as model:
            states_BSH = compute_hidden_states(model, batch)
            head = model.get_output_embeddings()
            weight_VH, bias_V = head.weight, head.bias
        states_NH = torch.cat([states_BSH[index, : len(row) - 1] for index, row in enumerate(rows)])
        return _HiddenStateLogits(states_NH, weight_VH, bias_V)


class _HiddenStateLogits:
    def __init__(
        self, states_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
    ) -> None:
        self._states_NH, self._weight_VH, self._bias_V = states_NH, weight_VH, bias_V

    @torch.no_grad()
    def compute_logits(self, begin: int, end: int) -> torch.Tensor:
        logits_CV = compute_linear(self._states_NH[begin:end], [self._weight_VH])
        return logits_CV if self._bias_V is None else logits_CV + self._bias_V


class TextSums(NamedTuple):
    """Sums over the scored tokens of each text, float64 [R], nats; those of the other model are None without one."""

    tokens_R: np.ndarray  # int64
    nll_R: np.ndarray
    entropy_R: np.ndarray
    against_nll_R: np.ndarray | None = None
    against_entropy_R: np.ndarray | None = None
    kl_R: np.ndarray | None = None  # KL(model || against)
    reverse_kl_R: np.ndarray | None = None


def score_texts(
    model: LogitReader, against: LogitReader | None, rows: Sequence[Sequence[int]], pass_tokens: int
) -> TextSums:
    """Compute the sums of each text.

    Args:
        rows: of at least 2 tokens each.
        pass_tokens: padded tokens of one pass.
    """
    text_sums: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for indices in plan_micro_batches([len(row) for row in rows], pass_tokens):
        batch = [rows[index] for index in indices]
        logits = model.read_rows(batch)
        other_logits = None if against is None else against.read_rows(batch)
        columns = _score_positions(logits, other_logits, batch)
        ends = np.cumsum([0, *(len(row) - 1 for row in batch)]).tolist()
        for index, (begin, end) in zip(indices, pairwise(ends), strict=True):
            text_sums[index] = columns[:, begin:end].sum(1)
    sums = np.stack(text_sums, 1)
    return TextSums(np.array([len(row) - 1 for row in rows]), *sums)


@torch.no_grad()
def _score_positions(
    model: RowLogits, against: RowLogits | None, rows: Sequence[Sequence[int]]
) -> np.ndarray:
    """Compute the values of every position, [2 or 6, N], in the order of `TextSums`."""
    targets_N = torch.tensor([token for row in rows for token in row[1:]])
    parts: list[torch.Tensor] = []
    begin, size = 0, 1
    while begin < len(targets_N):
        end = min(len(targets_N), begin + size)
        logits_CV = model.compute_logits(begin, end)
        # The width of the vocabulary is known only after the first position.
        size = max(1, CHUNK_CELLS // logits_CV.shape[1])
        columns = _compute_nll_and_entropy(logits_CV, targets_N[begin:end])
        if against is not None:
            other_CV = against.compute_logits(begin, end)
            if other_CV.shape != logits_CV.shape:
                raise ServiceError(
                    f"the models predict {logits_CV.shape[1]} and {other_CV.shape[1]} tokens: their distributions "
                    "cannot be compared",
                    "user",
                )
            columns += _compute_nll_and_entropy(other_CV, targets_N[begin:end])
            p_CV, q_CV = logits_CV.double().cpu(), other_CV.double().cpu()
            columns += [exact_forward_kl(p_CV, q_CV), exact_forward_kl(q_CV, p_CV)]
        parts.append(torch.stack([column.cpu() for column in columns]))
        begin = end
    return torch.cat(parts, 1).numpy()


def _compute_nll_and_entropy(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> list[torch.Tensor]:
    """Return -log p of the targets and the entropy, float64 [C] each."""
    log_p_CV = torch.log_softmax(logits_CV, -1, dtype=torch.float64)
    nll_C = -log_p_CV.gather(1, targets_C.to(log_p_CV.device)[:, None])[:, 0]
    return [nll_C, token_entropy(log_p_CV)]


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """Model to evaluate, under its name in the request."""

    name: str
    base: SharedBaseModel  # with the same tokenizer
    limits: ModelLimits
    reader: LogitReader
    sampler: Sampler | None  # None for a reference model, which cannot be sampled from


def evaluate_models(
    request: EvaluateRequest,
    model: EvaluatedModel,
    against: EvaluatedModel | None,
    settings: ServiceEngineSettings,
) -> ModelEvaluation:
    """Compute the result of a checked request.

    Raises: ServiceError (user) for texts or prompts that cannot be computed.
    """
    limits = _compute_common_limits(model, against)
    texts = encode_checked_rows(request.texts, "texts", model.base.tokenizer, limits, 2)
    prompts = encode_checked_rows(request.prompts, "prompts", model.base.tokenizer, limits, 1)
    interval = _BootstrapInterval(request.resamples, request.seed, request.confidence)
    sums = None
    if texts:
        sums = score_texts(
            model.reader, None if against is None else against.reader, texts, settings.pass_tokens
        )
    samples: list[PromptColumns] = []
    for evaluated in (model, against):
        if prompts and evaluated is not None and evaluated.sampler is not None:
            samples.append(_sample_prompts(evaluated.sampler, prompts, request, settings))
    diversity = [_compute_diversity_scores(columns, interval) for columns in samples]
    comparison = None
    if len(samples) > 1:
        comparison = _compare_diversity(samples[0], samples[1], interval)
    text = None
    if sums is not None:
        text = _compute_text_scores(sums.nll_R, sums.entropy_R, sums, interval)
    return ModelEvaluation(
        model=model.name,
        against=None if against is None else against.name,
        confidence=request.confidence,
        texts=len(texts),
        text_tokens=0 if sums is None else int(sums.tokens_R.sum()),
        prompts=len(prompts),
        samples=request.num_samples if prompts else 0,
        rows=None if sums is None else _build_text_rows(sums),
        text=text,
        against_text=_compute_other_text_scores(sums, interval),
        text_comparison=_compare_text_scores(sums, interval),
        diversity=diversity[0] if diversity else None,
        against_diversity=diversity[1] if len(diversity) > 1 else None,
        diversity_comparison=comparison,
    )


def _compute_common_limits(model: EvaluatedModel, against: EvaluatedModel | None) -> ModelLimits:
    """Return the limits that both models share. Raises: ServiceError (user) for different tokenizers."""
    if against is None:
        return model.limits
    vocabulary, other_vocabulary = (
        evaluated.base.tokenizer.get_vocab() for evaluated in (model, against)
    )
    if vocabulary != other_vocabulary:
        raise ServiceError(
            f"'{model.base.name}' and '{against.base.name}' have different tokenizers: their token ids cannot be "
            "compared",
            "user",
        )
    limits, other = model.limits, against.limits
    return ModelLimits(min(limits.context, other.context), min(limits.vocab_size, other.vocab_size))


@dataclass(frozen=True, slots=True)
class _BootstrapInterval:
    """Bootstrap intervals with the request's parameters."""

    resamples: int
    seed: int
    confidence: float

    def estimate_ratio(self, sums_E: np.ndarray, sizes_E: np.ndarray) -> Estimate:
        """Estimate sum(sums) / sum(sizes) over texts or prompts; without bounds for a single one."""
        ratio = bootstrap_ratio(
            sums_E,
            sizes_E,
            samples=self.resamples,
            seed=self.seed % 2**63,
            confidence=self.confidence,
        )
        if len(sums_E) == 1:
            return Estimate(ratio.difference, None, None)
        return Estimate(ratio.difference, ratio.low, ratio.high)

    def estimate_mean(self, values_E: np.ndarray) -> Estimate:
        """Estimate the mean over texts or prompts."""
        return self.estimate_ratio(values_E, np.ones(len(values_E)))


def _exponentiate_estimate(estimate: Estimate) -> Estimate:
    """Return exp of an estimate; exp is monotone, so it maps the bounds too."""

    def bounded_exp(value: float) -> float:
        return math.exp(min(value, MAX_EXPONENT))

    return Estimate(
        bounded_exp(estimate.value),
        None if estimate.low is None else bounded_exp(estimate.low),
        None if estimate.high is None else bounded_exp(estimate.high),
    )


def _compute_text_scores(
    nll_R: np.ndarray, entropy_R: np.ndarray, sums: TextSums, interval: _BootstrapInterval
) -> TextScores:
    nll = interval.estimate_ratio(nll_R, sums.tokens_R)
    return TextScores(
        nll=nll,
        perplexity=_exponentiate_estimate(nll),
        entropy=interval.estimate_ratio(entropy_R, sums.tokens_R),
    )


def _compute_other_text_scores(
    sums: TextSums | None, interval: _BootstrapInterval
) -> TextScores | None:
    if sums is None or sums.against_nll_R is None or sums.against_entropy_R is None:
        return None
    return _compute_text_scores(sums.against_nll_R, sums.against_entropy_R, sums, interval)


def _compare_text_scores(
    sums: TextSums | None, interval: _BootstrapInterval
) -> TextComparison | None:
    if sums is None or sums.against_nll_R is None or sums.kl_R is None or sums.reverse_kl_R is None:
        return None
    better = int((sums.nll_R < sums.against_nll_R).sum())
    worse = int((sums.nll_R > sums.against_nll_R).sum())
    difference = interval.estimate_ratio(sums.nll_R - sums.against_nll_R, sums.tokens_R)
    return TextComparison(
        kl=interval.estimate_ratio(sums.kl_R, sums.tokens_R),
        reverse_kl=interval.estimate_ratio(sums.reverse_kl_R, sums.tokens_R),
        nll_difference=difference,
        perplexity_ratio=_exponentiate_estimate(difference),
        better=better,
        worse=worse,
        p_value=sign_test(better, worse),
    )


def _build_text_rows(sums: TextSums) -> list[TextRow]:
    columns = (sums.tokens_R, sums.nll_R, sums.against_nll_R, sums.kl_R, sums.reverse_kl_R)
    lists = [
        [None] * len(sums.tokens_R) if column is None else column.tolist() for column in columns
    ]
    return [TextRow(*row) for row in zip(*lists, strict=True)]


def _sample_prompts(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    request: EvaluateRequest,
    settings: ServiceEngineSettings,
) -> PromptColumns:
    """Sample from each prompt and compute the values of its samples."""
    requests = [
        SampleRequest(
            sampler_id=sampler.sampler_id,
            prompt=np.array(prompt, dtype=np.int64),
            num_samples=request.num_samples,
            seed=compute_sequence_seed("evaluate", request.seed, index) % 2**63,
            parameters=request.parameters,
        )
        for index, prompt in enumerate(prompts)
    ]
    jobs = [
        SampleJob(sampler, sample, check_sample(sample, sampler.base.limits, settings))
        for sample in requests
    ]
    values = []
    for result in run_sample_jobs(jobs, settings.slots):
        if isinstance(result, Exception):
            raise result
        values.append(_compute_prompt_values(sampler.base, result.sequences))
    return {name: np.array([row[name] for row in values]) for name in values[0]}


def _compute_prompt_values(
    base: SharedBaseModel, sequences: Sequence[SampledSequence]
) -> Mapping[str, float]:
    token_ids = [tuple(sequence.tokens.tolist()) for sequence in sequences]
    texts = [str(base.tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in token_ids]
    words = [text.split() for text in texts]
    count, num_tokens = len(sequences), sum(map(len, token_ids))
    values = {
        f"distinct {order}": compute_distinct_ngrams(words, int(order)) for order in NGRAM_ORDERS
    }
    if count > 1:
        values["self_bleu"] = compute_self_bleu(words)
    logprob_sums = [sequence.logprobs.astype(np.float64).sum() for sequence in sequences]
    return values | {
        "unique": len(set(token_ids)) / count,
        "all_tokens": float(num_tokens),
        "tokens": num_tokens / count,
        "surprise": -float(sum(logprob_sums)),
        "ended": sum(sequence.stop_reason == "stop" for sequence in sequences) / count,
    }


def _compute_diversity_scores(
    columns: PromptColumns, interval: _BootstrapInterval
) -> DiversityScores:
    return DiversityScores(
        **_collect_estimates(lambda name: interval.estimate_mean(columns[name]), columns),
        entropy=interval.estimate_ratio(columns["surprise"], _count_prompt_tokens(columns)),
    )


def _compare_diversity(
    model_columns: PromptColumns, against_columns: PromptColumns, interval: _BootstrapInterval
) -> DiversityComparison:
    """Compare two models prompt by prompt; the entropy's difference is between each prompt's means per token."""

    def estimate_difference(name: str) -> Estimate:
        return interval.estimate_mean(model_columns[name] - against_columns[name])

    entropy = model_columns["surprise"] / _count_prompt_tokens(model_columns)
    against_entropy = against_columns["surprise"] / _count_prompt_tokens(against_columns)
    return DiversityComparison(
        **_collect_estimates(estimate_difference, model_columns),
        entropy=interval.estimate_mean(entropy - against_entropy),
    )


def _count_prompt_tokens(columns: PromptColumns) -> np.ndarray:
    # A prompt that fills the context has no sampled tokens.
    return np.maximum(columns["all_tokens"], 1.0)


def _collect_estimates(
    estimate: Callable[[str], Estimate], columns: PromptColumns
) -> dict[str, Any]:
    return {
        "distinct": {order: estimate(f"distinct {order}") for order in NGRAM_ORDERS},
        "self_bleu": estimate("self_bleu") if "self_bleu" in columns else None,
        **{name: estimate(name) for name in ("unique", "tokens", "ended")},
    }
