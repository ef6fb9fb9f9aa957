"""Next-token distributions of one or two models on the same texts: likelihood, entropy and exact KL of every text.

Logits are those of the models, in their own precision; everything after them is float64. R texts, N positions that a
token follows, C of them at a time, H hidden, V vocabulary.

Evaluation of one model, or of two side by side: texts under both, samples of both, differences with intervals.
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
    Difference,
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


class RowLogits(Protocol):
    """Rows that a model has read."""

    def compute_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits [C, V] of the positions from `begin` to `end`; a row has one position less than tokens."""


class LogitReader(Protocol):
    """A model that reads token rows."""

    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """The rows, each of 2 tokens at least."""


class BaseModelReader:
    """A base model, with other weights if any are given."""

    def __init__(self, base: SharedBaseModel, weights: Mapping[str, torch.Tensor]) -> None:
        self.base, self._weights = base, weights

    @torch.no_grad()
    def read_rows(self, rows: Sequence[Sequence[int]]) -> RowLogits:
        """See `LogitReader`."""
        batch = build_unscored_batch([list(row) for row in rows], self.base.pad_id).to(
            self.base.device
        )
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
    """Sums over the scored tokens of each text, float64 [R], nats; those of the other model None without one."""

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
    """Sums of each text. `rows`: of 2 tokens at least; `pass_tokens`: padded tokens of one pass."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for chosen in plan_micro_batches([len(row) for row in rows], pass_tokens):
        some = [rows[index] for index in chosen]
        numbers = _score_positions(
            model.read_rows(some), None if against is None else against.read_rows(some), some
        )
        ends = np.cumsum([0, *(len(row) - 1 for row in some)]).tolist()
        for index, (begin, end) in zip(chosen, pairwise(ends), strict=True):
            found[index] = numbers[:, begin:end].sum(1)
    sums = np.stack(found, 1)
    return TextSums(np.array([len(row) - 1 for row in rows]), *sums)


@torch.no_grad()
def _score_positions(
    model: RowLogits, against: RowLogits | None, rows: Sequence[Sequence[int]]
) -> np.ndarray:
    """Numbers of every position, [2 or 6, N], in the order of `TextSums`."""
    targets_N = torch.tensor([token for row in rows for token in row[1:]])
    parts: list[torch.Tensor] = []
    begin, size = 0, 1
    while begin < len(targets_N):
        end = min(len(targets_N), begin + size)
        logits_CV = model.compute_logits(begin, end)
        size = max(1, CHUNK_CELLS // logits_CV.shape[1])  # the first position told the width
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
            columns += [
                exact_forward_kl(*pair) for pair in _pair_both_directions(logits_CV, other_CV)
            ]
        parts.append(torch.stack([column.cpu() for column in columns]))
        begin = end
    return torch.cat(parts, 1).numpy()


def _compute_nll_and_entropy(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> list[torch.Tensor]:
    """-log p of the targets, and entropy: float64 [C] each."""
    log_p_CV = torch.log_softmax(logits_CV, -1, dtype=torch.float64)
    nll_C = -log_p_CV.gather(1, targets_C.to(log_p_CV.device)[:, None])[:, 0]
    return [nll_C, token_entropy(log_p_CV)]


def _pair_both_directions(
    left_CV: torch.Tensor, right_CV: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    left_CV, right_CV = left_CV.double().cpu(), right_CV.double().cpu()
    return (left_CV, right_CV), (right_CV, left_CV)


NGRAM_ORDERS = ("1", "2", "3")  # of distinct-n
MAX_EXPONENT = 700.0  # exp stays finite

PromptColumns = dict[str, np.ndarray]  # float64 [P] by name: numbers of each prompt


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model under its name in the request."""

    name: str
    base: SharedBaseModel  # whose tokens it has
    limits: ModelLimits
    reader: LogitReader
    sampler: Sampler | None  # None = a reference model, which is not sampled from


def evaluate_models(
    request: EvaluateRequest,
    model: EvaluatedModel,
    against: EvaluatedModel | None,
    settings: ServiceEngineSettings,
) -> ModelEvaluation:
    """The answer to a checked request. Raises: ServiceError (user) for texts or prompts that cannot be computed."""
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
    for one in (model, against):
        if prompts and one is not None and one.sampler is not None:
            samples.append(_sample_prompts(one.sampler, prompts, request, settings))
    rows = None if sums is None else _build_text_rows(sums)
    return ModelEvaluation(
        model=model.name,
        against=None if against is None else against.name,
        confidence=request.confidence,
        texts=len(texts),
        text_tokens=0 if sums is None else int(sums.tokens_R.sum()),
        prompts=len(prompts),
        samples=request.num_samples if prompts else 0,
        rows=rows,
        text=None
        if sums is None
        else _compute_text_scores(sums.nll_R, sums.entropy_R, sums, interval),
        against_text=_compute_other_text_scores(sums, interval),
        text_comparison=_compare_text_scores(sums, interval),
        diversity=_compute_diversity_scores(samples[0], interval) if samples else None,
        against_diversity=_compute_diversity_scores(samples[1], interval)
        if len(samples) > 1
        else None,
        diversity_comparison=_compare_diversity(samples[0], samples[1], interval)
        if len(samples) > 1
        else None,
    )


def _compute_common_limits(model: EvaluatedModel, against: EvaluatedModel | None) -> ModelLimits:
    """Raises: ServiceError (user) for models of different tokens."""
    if against is None or against.base is model.base:
        return (
            model.limits if against is None else _take_smaller_limits(model.limits, against.limits)
        )
    if against.base.tokenizer.get_vocab() != model.base.tokenizer.get_vocab():
        raise ServiceError(
            f"'{model.base.name}' and '{against.base.name}' have different tokenizers: their token ids cannot be "
            "compared",
            "user",
        )
    return _take_smaller_limits(model.limits, against.limits)


def _take_smaller_limits(one: ModelLimits, other: ModelLimits) -> ModelLimits:
    return ModelLimits(min(one.context, other.context), min(one.vocab_size, other.vocab_size))


# -- intervals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BootstrapInterval:
    """Bootstrap intervals with the request's parameters."""

    resamples: int
    seed: int
    confidence: float

    def estimate_ratio(self, sums_E: np.ndarray, sizes_E: np.ndarray) -> Estimate:
        """Of sum(sums) / sum(sizes), over texts or prompts; no bounds for a single one."""
        found = bootstrap_ratio(
            sums_E,
            sizes_E,
            samples=self.resamples,
            seed=self.seed % 2**63,
            confidence=self.confidence,
        )
        return (
            _convert_difference(found)
            if len(sums_E) > 1
            else Estimate(found.difference, None, None)
        )

    def estimate_mean(self, values_E: np.ndarray) -> Estimate:
        """Of the mean."""
        return self.estimate_ratio(values_E, np.ones(len(values_E)))


def _convert_difference(found: Difference) -> Estimate:
    return Estimate(found.difference, found.low, found.high)


def _exponentiate_estimate(found: Estimate) -> Estimate:
    """exp is monotone, so it maps the bounds as well."""

    def of(value: float) -> float:
        return math.exp(min(value, MAX_EXPONENT))

    return Estimate(
        of(found.value),
        None if found.low is None else of(found.low),
        None if found.high is None else of(found.high),
    )


# -- texts -------------------------------------------------------------------------------------------------------------


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


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_prompts(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    request: EvaluateRequest,
    settings: ServiceEngineSettings,
) -> PromptColumns:
    """Numbers of the samples of each prompt."""
    asked = [
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
        SampleJob(sampler, one, check_sample(one, sampler.base.limits, settings)) for one in asked
    ]
    numbers = []
    for answer in run_sample_jobs(jobs, settings.slots):
        if isinstance(answer, Exception):
            raise answer
        numbers.append(_compute_prompt_numbers(sampler.base, answer.sequences))
    return {name: np.array([one[name] for one in numbers]) for name in numbers[0]}


def _compute_prompt_numbers(
    base: SharedBaseModel, sequences: Sequence[SampledSequence]
) -> Mapping[str, float]:
    texts = [
        str(base.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=True))
        for one in sequences
    ]
    words = [text.split() for text in texts]
    count = len(sequences)
    found = {
        f"distinct {order}": compute_distinct_ngrams(words, int(order)) for order in NGRAM_ORDERS
    }
    if count > 1:
        found["self_bleu"] = compute_self_bleu(words)
    return found | {
        "unique": len({tuple(one.tokens.tolist()) for one in sequences}) / count,
        "all_tokens": float(sum(len(one.tokens) for one in sequences)),
        "tokens": sum(len(one.tokens) for one in sequences) / count,
        "surprise": -float(sum(one.logprobs.astype(np.float64).sum() for one in sequences)),
        "ended": sum(one.stop_reason == "stop" for one in sequences) / count,
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
    """Differences prompt by prompt; that of the entropy is of each prompt's mean per token."""
    entropy = interval.estimate_mean(
        model_columns["surprise"] / _count_prompt_tokens(model_columns)
        - against_columns["surprise"] / _count_prompt_tokens(against_columns)
    )
    return DiversityComparison(
        **_collect_estimates(
            lambda name: interval.estimate_mean(model_columns[name] - against_columns[name]),
            model_columns,
        ),
        entropy=entropy,
    )


def _count_prompt_tokens(columns: PromptColumns) -> np.ndarray:
    return np.maximum(columns["all_tokens"], 1.0)  # a prompt that fills the context has none


def _collect_estimates(
    estimate: Callable[[str], Estimate], columns: PromptColumns
) -> dict[str, Any]:
    return {
        "distinct": {order: estimate(f"distinct {order}") for order in NGRAM_ORDERS},
        "self_bleu": estimate("self_bleu") if "self_bleu" in columns else None,
        **{name: estimate(name) for name in ("unique", "tokens", "ended")},
    }
