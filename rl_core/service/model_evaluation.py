"""Evaluation of one model, or of two side by side: texts under both, samples of both, differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.analysis.diversity import distinct_ngrams, self_bleu
from rl_core.analysis.statistics import Difference, bootstrap_ratio, sign_test
from rl_core.errors import ServiceError
from rl_core.inference.sampling import sequence_seed
from rl_core.service.answers import SampledSequence
from rl_core.service.evaluation_answers import (
    DiversityComparison,
    DiversityScores,
    Estimate,
    ModelEvaluation,
    TextComparison,
    TextRow,
    TextScores,
)
from rl_core.service.evaluation_requests import EvaluateRequest, checked_rows
from rl_core.service.input_checks import ModelLimits, check_sample
from rl_core.service.requests import SampleRequest
from rl_core.service.samplers import SampleJob, Sampler, sample_all
from rl_core.service.served_base import ServedBase
from rl_core.service.text_scores import LogitReader, TextSums, score_texts
from rl_core.settings import ServiceEngineSettings

__all__ = ["EvaluatedModel", "evaluate_models"]

ORDERS = ("1", "2", "3")  # of distinct-n
LARGEST_EXPONENT = 700.0  # exp stays finite

Columns = dict[str, np.ndarray]  # float64 [P] by name: numbers of each prompt


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model under its name in the request."""

    name: str
    base: ServedBase  # whose tokens it has
    limits: ModelLimits
    reader: LogitReader
    sampler: Sampler | None  # None = a reference model, which is not sampled from


def evaluate_models(
    request: EvaluateRequest, model: EvaluatedModel, against: EvaluatedModel | None, settings: ServiceEngineSettings
) -> ModelEvaluation:
    """The answer to a checked request. Raises: ServiceError (user) for texts or prompts that cannot be computed."""
    limits = _common_limits(model, against)
    texts = checked_rows(request.texts, "texts", model.base.tokenizer, limits, 2)
    prompts = checked_rows(request.prompts, "prompts", model.base.tokenizer, limits, 1)
    interval = _Interval(request.resamples, request.seed, request.confidence)
    sums = None
    if texts:
        sums = score_texts(model.reader, None if against is None else against.reader, texts, settings.pass_tokens)
    samples: list[Columns] = []
    for one in (model, against):
        if prompts and one is not None and one.sampler is not None:
            samples.append(_sampled(one.sampler, prompts, request, settings))
    rows = None if sums is None else _rows(sums)
    return ModelEvaluation(
        model=model.name, against=None if against is None else against.name, confidence=request.confidence,
        texts=len(texts), text_tokens=0 if sums is None else int(sums.tokens_R.sum()), prompts=len(prompts),
        samples=request.num_samples if prompts else 0, rows=rows,
        text=None if sums is None else _scores(sums.nll_R, sums.entropy_R, sums, interval),
        against_text=_against(sums, interval), text_comparison=_compared(sums, interval),
        diversity=_diversity(samples[0], interval) if samples else None,
        against_diversity=_diversity(samples[1], interval) if len(samples) > 1 else None,
        diversity_comparison=_differing(samples[0], samples[1], interval) if len(samples) > 1 else None,
    )  # fmt: skip


def _common_limits(model: EvaluatedModel, against: EvaluatedModel | None) -> ModelLimits:
    """Raises: ServiceError (user) for models of different tokens."""
    if against is None or against.base is model.base:
        return model.limits if against is None else _least(model.limits, against.limits)
    if against.base.tokenizer.get_vocab() != model.base.tokenizer.get_vocab():
        raise ServiceError(
            f"'{model.base.name}' and '{against.base.name}' have different tokenizers: their token ids cannot be "
            "compared",
            "user",
        )
    return _least(model.limits, against.limits)


def _least(one: ModelLimits, other: ModelLimits) -> ModelLimits:
    return ModelLimits(min(one.context, other.context), min(one.vocab_size, other.vocab_size))


# -- intervals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Interval:
    """Bootstrap intervals with the request's parameters."""

    resamples: int
    seed: int
    confidence: float

    def ratio(self, sums_E: np.ndarray, sizes_E: np.ndarray) -> Estimate:
        """Of sum(sums) / sum(sizes), over texts or prompts; no bounds for a single one."""
        found = bootstrap_ratio(
            sums_E, sizes_E, samples=self.resamples, seed=self.seed % 2**63, confidence=self.confidence
        )
        return _estimate(found) if len(sums_E) > 1 else Estimate(found.difference, None, None)

    def mean(self, values_E: np.ndarray) -> Estimate:
        """Of the mean."""
        return self.ratio(values_E, np.ones(len(values_E)))


def _estimate(found: Difference) -> Estimate:
    return Estimate(found.difference, found.low, found.high)


def _exp(found: Estimate) -> Estimate:
    """exp is monotone, so it maps the bounds as well."""

    def of(value: float) -> float:
        return math.exp(min(value, LARGEST_EXPONENT))

    return Estimate(
        of(found.value), None if found.low is None else of(found.low), None if found.high is None else of(found.high)
    )


# -- texts -------------------------------------------------------------------------------------------------------------


def _scores(nll_R: np.ndarray, entropy_R: np.ndarray, sums: TextSums, interval: _Interval) -> TextScores:
    nll = interval.ratio(nll_R, sums.tokens_R)
    return TextScores(nll=nll, perplexity=_exp(nll), entropy=interval.ratio(entropy_R, sums.tokens_R))


def _against(sums: TextSums | None, interval: _Interval) -> TextScores | None:
    if sums is None or sums.against_nll_R is None or sums.against_entropy_R is None:
        return None
    return _scores(sums.against_nll_R, sums.against_entropy_R, sums, interval)


def _compared(sums: TextSums | None, interval: _Interval) -> TextComparison | None:
    if sums is None or sums.against_nll_R is None or sums.kl_R is None or sums.reverse_kl_R is None:
        return None
    better = int((sums.nll_R < sums.against_nll_R).sum())
    worse = int((sums.nll_R > sums.against_nll_R).sum())
    difference = interval.ratio(sums.nll_R - sums.against_nll_R, sums.tokens_R)
    return TextComparison(
        kl=interval.ratio(sums.kl_R, sums.tokens_R), reverse_kl=interval.ratio(sums.reverse_kl_R, sums.tokens_R),
        nll_difference=difference, perplexity_ratio=_exp(difference), better=better, worse=worse,
        p_value=sign_test(better, worse),
    )  # fmt: skip


def _rows(sums: TextSums) -> list[TextRow]:
    columns = (sums.tokens_R, sums.nll_R, sums.against_nll_R, sums.kl_R, sums.reverse_kl_R)
    lists = [[None] * len(sums.tokens_R) if column is None else column.tolist() for column in columns]
    return [TextRow(*row) for row in zip(*lists, strict=True)]


# -- samples -----------------------------------------------------------------------------------------------------------


def _sampled(
    sampler: Sampler, prompts: Sequence[Sequence[int]], request: EvaluateRequest, settings: ServiceEngineSettings
) -> Columns:
    """Numbers of the samples of each prompt."""
    asked = [
        SampleRequest(
            sampler_id=sampler.sampler_id, prompt=np.array(prompt, dtype=np.int64), num_samples=request.num_samples,
            seed=sequence_seed("evaluate", request.seed, index) % 2**63, parameters=request.parameters,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    jobs = [SampleJob(sampler, one, check_sample(one, sampler.base.limits, settings)) for one in asked]
    numbers = []
    for answer in sample_all(jobs, settings.slots):
        if isinstance(answer, Exception):
            raise answer
        numbers.append(_of_prompt(sampler.base, answer.sequences))
    return {name: np.array([one[name] for one in numbers]) for name in numbers[0]}


def _of_prompt(base: ServedBase, sequences: Sequence[SampledSequence]) -> Mapping[str, float]:
    texts = [str(base.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=True)) for one in sequences]
    words = [text.split() for text in texts]
    count = len(sequences)
    found = {f"distinct {order}": distinct_ngrams(words, int(order)) for order in ORDERS}
    if count > 1:
        found["self_bleu"] = self_bleu(words)
    return found | {
        "unique": len({tuple(one.tokens.tolist()) for one in sequences}) / count,
        "all_tokens": float(sum(len(one.tokens) for one in sequences)),
        "tokens": sum(len(one.tokens) for one in sequences) / count,
        "surprise": -float(sum(one.logprobs.astype(np.float64).sum() for one in sequences)),
        "ended": sum(one.stop_reason == "stop" for one in sequences) / count,
    }


def _diversity(columns: Columns, interval: _Interval) -> DiversityScores:
    return DiversityScores(**_estimates(lambda name: interval.mean(columns[name]), columns),
                           entropy=interval.ratio(columns["surprise"], _sizes(columns)))  # fmt: skip


def _differing(ours: Columns, others: Columns, interval: _Interval) -> DiversityComparison:
    """Differences prompt by prompt; that of the entropy is of each prompt's mean per token."""
    entropy = interval.mean(ours["surprise"] / _sizes(ours) - others["surprise"] / _sizes(others))
    return DiversityComparison(
        **_estimates(lambda name: interval.mean(ours[name] - others[name]), ours), entropy=entropy
    )


def _sizes(columns: Columns) -> np.ndarray:
    return np.maximum(columns["all_tokens"], 1.0)  # a prompt that fills the context has none


def _estimates(of: Callable[[str], Estimate], columns: Columns) -> dict[str, Any]:
    return {
        "distinct": {order: of(f"distinct {order}") for order in ORDERS},
        "self_bleu": of("self_bleu") if "self_bleu" in columns else None,
        **{name: of(name) for name in ("unique", "tokens", "ended")},
    }
