"""Metrics of a request, from numpy columns over its tokens; `name:reduction` says how a client adds up parts.

Means, minima and maxima are over the tokens that count: those of nonzero weight, advantage or mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rl_core.service.loss_function import TokenTable

__all__ = [
    "clipping_metrics",
    "cross_entropy_metrics",
    "entropy_metrics",
    "pair_metrics",
    "policy_metrics",
    "reference_metrics",
    "sequence_clipping_metrics",
    "value_metrics",
]

Metrics = dict[str, float]
LOG_LIMIT = 20.0  # of a ratio's logarithm, as in `losses.policy`
PERPLEXITY_LIMIT = 700.0  # nats; exp(700) is the largest that a double holds


def spread(name: str, values: np.ndarray, *, extremes: bool = True) -> Metrics:
    """Mean, and extremes; 0 where there is nothing."""
    if not values.size:
        values = np.zeros(1)
    metrics = {f"{name}:mean": float(values.mean())}
    return metrics | {f"{name}:min": float(values.min()), f"{name}:max": float(values.max())} if extremes else metrics


def counted(table: TokenTable) -> np.ndarray:
    """True at the tokens that count: the mask's, if one was given, else those of nonzero advantage."""
    return (table["mask"] if "mask" in table else table["advantages"]) != 0


def counts(rows: np.ndarray) -> Metrics:
    """Tokens and sequences that count."""
    return {"tokens:sum": float(len(rows)), "sequences:sum": float(len(np.unique(rows)))}


def cross_entropy_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """Likelihood of the targets of nonzero weight; every target of a position counts."""
    weights, logprobs = table["weights"], table["logprobs"]
    rows = np.broadcast_to(table["rows"][:, None] if weights.ndim == 2 else table["rows"], weights.shape)
    used = weights != 0
    w, nll = weights[used], -logprobs[used]
    total = float(np.abs(w).sum())
    mean = spread("nll", nll)
    return {
        **counts(rows[used]),
        **mean,
        "weights:sum": float(w.sum()),
        "positive_weights:sum": float(w[w > 0].sum()),
        "negative_weights:sum": float(w[w < 0].sum()),
        "weight:min": float(w.min(initial=0.0)),
        "weight:max": float(w.max(initial=0.0)),
        "weighted_nll:mean": float((w * nll).sum() / total) if total else 0.0,
        "perplexity:mean": math.exp(min(mean["nll:mean"], PERPLEXITY_LIMIT)),
        "probability:mean": float(np.exp(-nll).mean()) if nll.size else 0.0,
        "most_likely:mean": float((nll < math.log(2)).mean()) if nll.size else 0.0,
    }


def policy_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """Ratio to the sampler, KL(sampler || policy) at its samples, advantages, likelihoods."""
    used = counted(table)
    p, q = table["logprobs"][used], table["old_logprobs"][used]
    move = p - q
    ratio = np.exp(np.clip(move, -LOG_LIMIT, LOG_LIMIT))
    squares = float((ratio**2).sum())
    return {
        **counts(table["rows"][used]),
        **spread("ratio", ratio),
        **spread("advantage", table["advantages"][used]),
        **spread("advantage_square", table["advantages"][used] ** 2, extremes=False),
        **spread("logprob", p),
        **spread("sampler_logprob", q, extremes=False),
        **spread("sampler_difference", np.abs(move)),
        **spread("update_kl_k1", -move, extremes=False),
        **spread("update_kl", np.expm1(np.clip(move, -10, 10)) - np.clip(move, -10, 10), extremes=False),
        "effective_sample_share:mean": float(ratio.sum()) ** 2 / squares / len(ratio) if squares else 0.0,
    }


def clipping_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """Shares of tokens whose gradient a threshold zeroes, beside `policy_metrics`."""
    used = counted(table)
    ratio = np.exp(np.clip(table["logprobs"] - table["old_logprobs"], -LOG_LIMIT, LOG_LIMIT))[used]
    return policy_metrics(table, options) | _clipped(ratio, table, used)


def sequence_clipping_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """As `clipping_metrics`, by the ratios of whole sequences, with their spread."""
    used, inside = counted(table), table["sequence_ratio_mask"] != 0
    rows = table["rows"]
    moves = np.where(inside, table["logprobs"] - table["old_logprobs"], 0.0)
    size = int(rows.max(initial=-1)) + 1
    means = np.bincount(rows, moves, size) / np.maximum(1, np.bincount(rows, inside, size))
    ratio = np.exp(np.clip(means, -LOG_LIMIT, LOG_LIMIT))[rows][used]
    return policy_metrics(table, options) | _clipped(ratio, table, used) | spread("sequence_ratio", ratio)


def _clipped(ratio: np.ndarray, table: TokenTable, used: np.ndarray) -> Metrics:
    advantages = table["advantages"][used]
    low = (ratio < table["clip_low_threshold"][used]) & (advantages < 0)
    high = (ratio > table["clip_high_threshold"][used]) & (advantages > 0)
    return {
        **spread("clip_fraction", (low | high).astype(float), extremes=False),
        **spread("clip_fraction_low", low.astype(float), extremes=False),
        **spread("clip_fraction_high", high.astype(float), extremes=False),
    }


def entropy_metrics(table: TokenTable) -> Metrics:
    """Entropy of the policy before each token that counts, nats."""
    return spread("entropy", table["entropy"][counted(table)])


def reference_metrics(table: TokenTable) -> Metrics:
    """KL(policy || reference) by k3 at the tokens that count; 0 without a reference."""
    used = counted(table)
    if "ref_logprobs" not in table:
        return spread("ref_kl", np.zeros(0), extremes=False)
    d = np.clip((table["logprobs"] - table["ref_logprobs"])[used], -10, 10)
    return spread("ref_kl", np.expm1(-d) + d, extremes=False)


def value_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """Error of the values, share of the returns' variance that they explain, share held by the clip."""
    used = counted(table)
    values, returns, old = (table[name][used] for name in ("new_values", "returns", "old_values"))
    error, clip = returns - values, options["value_clip"]
    bounded = old + np.clip(values - old, -clip, clip) if clip > 0 else values
    total = float(returns.var()) if returns.size else 0.0
    return {
        "reward:mean": float(table["rewards"].sum()) / max(1, len(np.unique(table["rows"]))),  # of a sequence
        **spread("value", values),
        **spread("return", returns),
        "value_loss:mean": float(0.5 * (np.maximum(error**2, (returns - bounded) ** 2)).mean()) if used.any() else 0.0,
        "value_clip_fraction:mean": float(((returns - bounded) ** 2 > error**2).mean()) if used.any() else 0.0,
        "explained_variance:mean": 1.0 - float(error.var()) / max(total, 1e-8) if used.any() else 0.0,
    }


def pair_metrics(table: TokenTable, options: Mapping[str, float]) -> Metrics:
    """Order and size of the scores of pairs; a tie counts half."""
    scores, preferred = table["scores"], table["preferred"] != 0
    chosen, rejected = scores[preferred], scores[~preferred]
    margin = chosen - rejected
    required = table["margin"][preferred] if "margin" in table else np.zeros_like(margin)
    right = (margin > 0) + 0.5 * (margin == 0)
    return {
        "pairs:sum": float(len(margin)),
        **spread("accuracy", right, extremes=False),
        **spread("margin", margin),
        **spread("chosen_score", chosen),
        **spread("rejected_score", rejected),
        **spread("score", scores, extremes=False),
        **spread("ranking_loss", np.logaddexp(0.0, -(margin - required)), extremes=False),
        **spread("met_margin", (margin >= required).astype(float), extremes=False),
    }
