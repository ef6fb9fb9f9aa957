"""Losses that clients request by name: their inputs, options, formula and metrics.

Suffixes: B rows of one pass, T tokens, K targets at one position.

Metrics of a request are computed from numpy columns over its tokens; the `reduction` of `name:reduction` tells clients
how to combine parts of a request. Means, minima and maxima are over the tokens that count: those of nonzero weight,
advantage or mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

RequiredOutput = Literal["entropy", "values", "scores"]
# Columns over all tokens of a request; `rows` holds the index of the datum.
TokenTable = Mapping[str, np.ndarray]
LossMetrics = dict[str, float]

MAX_LOG_RATIO = 20.0  # of a ratio's logarithm, as in `losses.policy`
MAX_PERPLEXITY_NLL = 700.0  # nats; exp(700) is close to the largest double


@dataclass(frozen=True, slots=True)
class LossInput:
    """Array that comes with every datum."""

    doc: str
    kind: Literal["float", "int"] = "float"
    # tokens: [T]. targets: the shape of target_tokens, [T] or [T, K]. columns: [T, K], one K per request. one: [1].
    shape: Literal["tokens", "targets", "columns", "one"] = "tokens"
    required: bool = True
    fill: float | None = (
        None  # for datums without it, if others have it; None = all or none must have it
    )


@dataclass(frozen=True, slots=True)
class LossOption:
    """Number in `loss_fn_config` with its bounds."""

    default: float
    low: float
    high: float
    doc: str


@dataclass(slots=True)
class LossInputs:
    """Inputs of a loss for the rows of one run. All [B, T], right-padded with 0, unless noted otherwise."""

    mask_BT: torch.Tensor  # bool, True = a position of the datum
    options: Mapping[str, float]
    inputs: Mapping[str, torch.Tensor]  # without absent optional inputs; of shape "one": [B]
    # [B, T] or [B, T, K], nats, with gradient; None without target_tokens. [B, T, 1 + K] with `scored_tokens`
    logprobs: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None  # of the run's value head, with gradient
    scores_B: torch.Tensor | None = None  # of its score head, last position, with gradient
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)  # set by the loss, for metrics

    @property
    def single_logprobs(self) -> torch.Tensor:
        """Log-probabilities [B, T] for losses with one target per position."""
        assert self.logprobs is not None
        return self.logprobs

    def read_optional_input(self, name: str, default: float) -> torch.Tensor:
        """Return an optional input, or a tensor filled with its default."""
        tensor = self.inputs.get(name)
        if tensor is not None:
            return tensor
        dtype = torch.float32 if self.logprobs is None else self.logprobs.dtype
        return torch.full_like(self.mask_BT, default, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    """Loss that sums over tokens."""

    name: str
    formula: str  # for the documentation
    inputs: Mapping[str, LossInput]
    options: Mapping[str, LossOption]
    loss: Callable[[LossInputs], torch.Tensor]
    metrics: Callable[[TokenTable, Mapping[str, float]], dict[str, float]]
    needs: frozenset[RequiredOutput] = frozenset()
    is_paired: bool = False  # datums come in pairs that stay together
    kl_limit: str = ""  # name of the option that limits the KL of the next update; "" = none
    # Input of tokens [T, K] whose log-probabilities follow that of the target in `LossInputs.logprobs`; "" = none
    scored_tokens: str = ""


TARGET_TOKENS = LossInput(
    "the token that each position predicts; [T, K] for several", "int", "targets"
)
TEMPERATURE = {
    "temperature": LossOption(
        1.0, 1e-3, 1e3, "p is of softmax(logits / temperature); for ratios, that of sampling"
    )
}
POLICY_INPUTS = {
    "target_tokens": LossInput("the token that each position predicts", "int"),
    "logprobs": LossInput("q, of the distribution sampled from, nats"),
    "advantages": LossInput("A; 0 where the policy did not choose the token"),
}
CLIP_INPUTS = {
    "clip_low_threshold": LossInput("per token, overrides the option", required=False),
    "clip_high_threshold": LossInput("per token, overrides the option", required=False),
}


def fill_clip_thresholds(loss_inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return low and high threshold of every token's ratio, from the datum or the options; add them to the outputs."""
    thresholds = []
    for name in ("clip_low_threshold", "clip_high_threshold"):
        loss_inputs.outputs[name] = loss_inputs.read_optional_input(name, loss_inputs.options[name])
        thresholds.append(loss_inputs.outputs[name])
    return thresholds[0], thresholds[1]


def summarize_values(name: str, values: np.ndarray, *, extremes: bool = True) -> LossMetrics:
    """Return the mean, and optionally extremes; 0 for an empty array."""
    if not values.size:
        values = np.zeros(1)
    metrics = {f"{name}:mean": float(values.mean())}
    if extremes:
        metrics |= {f"{name}:min": float(values.min()), f"{name}:max": float(values.max())}
    return metrics


def find_counted_tokens(table: TokenTable) -> np.ndarray:
    """Return True for tokens that count: by the mask if present, otherwise those of nonzero advantage."""
    return (table["mask"] if "mask" in table else table["advantages"]) != 0


def count_tokens_and_sequences(rows: np.ndarray) -> LossMetrics:
    """Count the tokens and sequences of the rows."""
    return {"tokens:sum": float(len(rows)), "sequences:sum": float(len(np.unique(rows)))}


def compute_cross_entropy_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Compute the likelihood of targets with nonzero weight; every target of a position counts."""
    weights, logprobs = table["weights"], table["logprobs"]
    rows = table["rows"][:, None] if weights.ndim == 2 else table["rows"]
    rows = np.broadcast_to(rows, weights.shape)
    used = weights != 0
    w, nll = weights[used], -logprobs[used]
    total = float(np.abs(w).sum())
    nll_metrics = summarize_values("nll", nll)
    return {
        **count_tokens_and_sequences(rows[used]),
        **nll_metrics,
        "weights:sum": float(w.sum()),
        "positive_weights:sum": float(w[w > 0].sum()),
        "negative_weights:sum": float(w[w < 0].sum()),
        "weight:min": float(w.min(initial=0.0)),
        "weight:max": float(w.max(initial=0.0)),
        "weighted_nll:mean": float((w * nll).sum() / total) if total else 0.0,
        "perplexity:mean": math.exp(min(nll_metrics["nll:mean"], MAX_PERPLEXITY_NLL)),
        "probability:mean": float(np.exp(-nll).mean()) if nll.size else 0.0,
        "most_likely:mean": float((nll < math.log(2)).mean()) if nll.size else 0.0,
    }


def compute_policy_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Compute ratio to the sampler, KL(sampler || policy) at its samples, advantages and likelihoods."""
    used = find_counted_tokens(table)
    p, q = table["logprobs"][used], table["old_logprobs"][used]
    log_ratio = p - q
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    squares = float((ratio**2).sum())
    bounded = np.clip(log_ratio, -10, 10)
    k3 = np.expm1(bounded) - bounded
    sample_share = float(ratio.sum()) ** 2 / squares / len(ratio) if squares else 0.0
    return {
        **count_tokens_and_sequences(table["rows"][used]),
        **summarize_values("ratio", ratio),
        **summarize_values("advantage", table["advantages"][used]),
        **summarize_values("advantage_square", table["advantages"][used] ** 2, extremes=False),
        **summarize_values("logprob", p),
        **summarize_values("sampler_logprob", q, extremes=False),
        **summarize_values("sampler_difference", np.abs(log_ratio)),
        **summarize_values("update_kl_k1", -log_ratio, extremes=False),
        **summarize_values("update_kl", k3, extremes=False),
        "effective_sample_share:mean": sample_share,
    }


def compute_clipping_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Compute the policy metrics and the shares of tokens whose gradient a threshold sets to zero."""
    used = find_counted_tokens(table)
    log_ratio = table["logprobs"] - table["old_logprobs"]
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))[used]
    return compute_policy_metrics(table, options) | _compute_clip_fractions(ratio, table, used)


def compute_sequence_clipping_metrics(
    table: TokenTable, options: Mapping[str, float]
) -> LossMetrics:
    """Compute `compute_clipping_metrics` with the ratios of sequences, and the spread of those ratios."""
    used, in_ratio = find_counted_tokens(table), table["sequence_ratio_mask"] != 0
    rows = table["rows"]
    log_ratio = np.where(in_ratio, table["logprobs"] - table["old_logprobs"], 0.0)
    size = int(rows.max(initial=-1)) + 1
    num_tokens = np.bincount(rows, in_ratio, size)
    means = np.bincount(rows, log_ratio, size) / np.maximum(1, num_tokens)
    ratio = np.exp(np.clip(means, -MAX_LOG_RATIO, MAX_LOG_RATIO))[rows][used]
    return (
        compute_policy_metrics(table, options)
        | _compute_clip_fractions(ratio, table, used)
        | summarize_values("sequence_ratio", ratio)
    )


def _compute_clip_fractions(ratio: np.ndarray, table: TokenTable, used: np.ndarray) -> LossMetrics:
    advantages = table["advantages"][used]
    low = (ratio < table["clip_low_threshold"][used]) & (advantages < 0)
    high = (ratio > table["clip_high_threshold"][used]) & (advantages > 0)
    return {
        **summarize_values("clip_fraction", (low | high).astype(float), extremes=False),
        **summarize_values("clip_fraction_low", low.astype(float), extremes=False),
        **summarize_values("clip_fraction_high", high.astype(float), extremes=False),
    }


def compute_entropy_metrics(table: TokenTable) -> LossMetrics:
    """Compute the policy's entropy before each token that counts, nats."""
    return summarize_values("entropy", table["entropy"][find_counted_tokens(table)])


def compute_reference_metrics(table: TokenTable) -> LossMetrics:
    """Compute KL(policy || reference) by k3 at the tokens that count; 0 without a reference."""
    used = find_counted_tokens(table)
    if "ref_logprobs" not in table:
        return summarize_values("ref_kl", np.zeros(0), extremes=False)
    d = np.clip((table["logprobs"] - table["ref_logprobs"])[used], -10, 10)
    return summarize_values("ref_kl", np.expm1(-d) + d, extremes=False)


def compute_value_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Compute the error of the values, their explained share of the returns' variance, and the clipped share."""
    used = find_counted_tokens(table)
    values, returns, old = (table[name][used] for name in ("new_values", "returns", "old_values"))
    error, clip = returns - values, options["value_clip"]
    clipped_values = old + np.clip(values - old, -clip, clip) if clip > 0 else values
    clipped_error = returns - clipped_values
    loss = clip_fraction = explained = 0.0
    if used.any():
        loss = float(0.5 * np.maximum(error**2, clipped_error**2).mean())
        clip_fraction = float((clipped_error**2 > error**2).mean())
        explained = 1.0 - float(error.var()) / max(float(returns.var()), 1e-8)
    num_sequences = max(1, len(np.unique(table["rows"])))
    return {
        "reward:mean": float(table["rewards"].sum()) / num_sequences,
        **summarize_values("value", values),
        **summarize_values("return", returns),
        "value_loss:mean": loss,
        "value_clip_fraction:mean": clip_fraction,
        "explained_variance:mean": explained,
    }


def compute_pair_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Compute order and size of the scores of pairs; a tie counts half."""
    scores, preferred = table["scores"], table["preferred"] != 0
    chosen, rejected = scores[preferred], scores[~preferred]
    margin = chosen - rejected
    required = table["margin"][preferred] if "margin" in table else np.zeros_like(margin)
    accuracy = (margin > 0) + 0.5 * (margin == 0)
    return {
        "pairs:sum": float(len(margin)),
        **summarize_values("accuracy", accuracy, extremes=False),
        **summarize_values("margin", margin),
        **summarize_values("chosen_score", chosen),
        **summarize_values("rejected_score", rejected),
        **summarize_values("score", scores, extremes=False),
        **summarize_values("ranking_loss", np.logaddexp(0.0, -(margin - required)), extremes=False),
        **summarize_values("met_margin", (margin >= required).astype(float), extremes=False),
    }
