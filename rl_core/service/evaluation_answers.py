"""Answers to evaluations as plain data, which the engine makes, the server describes and the client reads.

Standard library only: clients import it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DiversityComparison",
    "DiversityScores",
    "Estimate",
    "ModelEvaluation",
    "TextComparison",
    "TextRow",
    "TextScores",
]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its interval; without bounds where there is only one text or prompt."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text: sums over its scored tokens, nats."""

    tokens: int
    nll: float
    against_nll: float | None = None
    kl: float | None = None  # KL(model || against)
    reverse_kl: float | None = None


@dataclass(frozen=True, slots=True)
class TextScores:
    """A model on the texts; intervals over texts."""

    nll: Estimate  # -log p of the next token, nats per token
    perplexity: Estimate  # exp(nll)
    entropy: Estimate  # of the predicted distribution, nats per token


@dataclass(frozen=True, slots=True)
class TextComparison:
    """The model against the other on the same texts; the KL is exact, over the whole vocabulary."""

    kl: Estimate  # KL(model || against), nats per token
    reverse_kl: Estimate  # KL(against || model)
    nll_difference: Estimate  # model - against, nats per token; paired
    perplexity_ratio: Estimate  # exp(nll_difference)
    better: int  # texts that the model finds likelier
    worse: int
    p_value: float  # two-sided exact sign test of better against worse


@dataclass(frozen=True, slots=True)
class DiversityScores:
    """Samples of one model; means over prompts, of its samples' words."""

    distinct: dict[str, Estimate]  # "1", "2", "3": distinct n-grams over all
    self_bleu: Estimate | None  # None = one sample of each prompt
    unique: Estimate  # different samples over all
    tokens: Estimate  # of a sample
    entropy: Estimate  # -log p of sampled tokens under the distribution sampled from, nats per token
    ended: Estimate  # share of samples that ended by themselves


@dataclass(frozen=True, slots=True)
class DiversityComparison:
    """Differences model - against over the same prompts, paired."""

    distinct: dict[str, Estimate]
    self_bleu: Estimate | None
    unique: Estimate
    tokens: Estimate
    entropy: Estimate
    ended: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """Scores of a model, and of another beside it. None = not asked for."""

    model: str
    against: str | None
    confidence: float
    texts: int
    text_tokens: int  # that are scored: all but the first of each text
    prompts: int
    samples: int  # of each prompt
    text: TextScores | None = None
    against_text: TextScores | None = None
    text_comparison: TextComparison | None = None
    rows: list[TextRow] | None = None  # in the order of the texts
    diversity: DiversityScores | None = None
    against_diversity: DiversityScores | None = None  # None also for a reference model, which is not sampled from
    diversity_comparison: DiversityComparison | None = None
