"""A loss that clients ask for by name: its inputs, options, formula and metrics.

Suffixes: B rows of one pass, T tokens, K targets at one position.

Inputs and options that several losses have in common.

Metrics of a request, from numpy columns over its tokens; `name:reduction` says how a client adds up parts.

Means, minima and maxima are over the tokens that count: those of nonzero weight, advantage or mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

RequiredOutput = Literal["entropy", "values", "scores"]
# columns over all tokens of a request; `rows` says of which datum
TokenTable = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossInput:
    """An array that comes with every datum."""

    doc: str
    kind: Literal["float", "int"] = "float"
    shape: Literal["tokens", "targets", "one"] = (
        "tokens"  # [T]; that of target_tokens, [T] or [T, K]; [1]
    )
    required: bool = True


@dataclass(frozen=True, slots=True)
class LossOption:
    """A number of `loss_fn_config`, within its limits."""

    default: float
    low: float
    high: float
    doc: str


@dataclass(slots=True)
class LossInputs:
    """Rows of one run as its loss sees them. All [B, T], right-padded with 0, unless said otherwise."""

    mask_BT: torch.Tensor  # bool, True = a position of the datum
    options: Mapping[str, float]
    # optional ones that were not given are left out; of shape "one": [B]
    inputs: Mapping[str, torch.Tensor]
    logprobs: torch.Tensor | None = (
        None  # [B, T] or [B, T, K], nats, with gradient; None = no target_tokens
    )
    entropy_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None  # by the run's value head, with gradient
    scores_B: torch.Tensor | None = (
        None  # by the run's score head at the last position, with gradient
    )
    # what the loss adds to outputs and metrics
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def single_logprobs(self) -> torch.Tensor:
        """Log-probabilities [B, T] of losses with one target a position."""
        assert self.logprobs is not None
        return self.logprobs

    def read_optional_input(self, name: str, default: float) -> torch.Tensor:
        """An optional input, or a tensor full of its default."""
        found = self.inputs.get(name)
        dtype = torch.float32 if self.logprobs is None else self.logprobs.dtype
        return found if found is not None else torch.full_like(self.mask_BT, default, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    """A loss that sums over tokens."""

    name: str
    formula: str  # for the documentation
    inputs: Mapping[str, LossInput]
    options: Mapping[str, LossOption]
    loss: Callable[[LossInputs], torch.Tensor]
    metrics: Callable[[TokenTable, Mapping[str, float]], dict[str, float]]
    needs: frozenset[RequiredOutput] = frozenset()
    is_paired: bool = False  # True = datums come in pairs, which stay together
    kl_limit: str = ""  # the option that limits the KL of the next update; "" = none


TARGET_TOKENS = LossInput(
    "the token that each position predicts; [T, K] for several", "int", "targets"
)
TEMPERATURE = {
    "temperature": LossOption(
        1.0, 1e-3, 1e3, "p is of softmax(logits / temperature): that of sampling, for ratios"
    )
}
POLICY_INPUTS = {
    "target_tokens": LossInput("the token that each position predicts", "int"),
    "logprobs": LossInput("q, of the distribution sampled from, nats"),
    "advantages": LossInput("A; 0 where the policy did not choose the token"),
}
CLIP_INPUTS = {
    "clip_low_threshold": LossInput("of single tokens, in place of the option", required=False),
    "clip_high_threshold": LossInput("of single tokens, in place of the option", required=False),
}


def fill_clip_thresholds(loss_inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds of every token's ratio, of the datum or of the options; noted for the metrics."""
    found = []
    for name in ("clip_low_threshold", "clip_high_threshold"):
        loss_inputs.outputs[name] = loss_inputs.read_optional_input(name, loss_inputs.options[name])
        found.append(loss_inputs.outputs[name])
    return found[0], found[1]


LossMetrics = dict[str, float]
MAX_LOG_RATIO = 20.0  # of a ratio's logarithm, as in `losses.policy`
MAX_PERPLEXITY_NLL = 700.0  # nats; exp(700) is the largest that a double holds


def summarize_values(name: str, values: np.ndarray, *, extremes: bool = True) -> LossMetrics:
    """Mean, and extremes; 0 where there is nothing."""
    if not values.size:
        values = np.zeros(1)
    metrics = {f"{name}:mean": float(values.mean())}
    return (
        metrics | {f"{name}:min": float(values.min()), f"{name}:max": float(values.max())}
        if extremes
        else metrics
    )


def find_counted_tokens(table: TokenTable) -> np.ndarray:
    """True at the tokens that count: the mask's, if one was given, else those of nonzero advantage."""
    return (table["mask"] if "mask" in table else table["advantages"]) != 0


def count_tokens_and_sequences(rows: np.ndarray) -> LossMetrics:
    """Tokens and sequences that count."""
    return {"tokens:sum": float(len(rows)), "sequences:sum": float(len(np.unique(rows)))}


def compute_cross_entropy_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Likelihood of the targets of nonzero weight; every target of a position counts."""
    weights, logprobs = table["weights"], table["logprobs"]
    rows = np.broadcast_to(
        table["rows"][:, None] if weights.ndim == 2 else table["rows"], weights.shape
    )
    used = weights != 0
    w, nll = weights[used], -logprobs[used]
    total = float(np.abs(w).sum())
    mean = summarize_values("nll", nll)
    return {
        **count_tokens_and_sequences(rows[used]),
        **mean,
        "weights:sum": float(w.sum()),
        "positive_weights:sum": float(w[w > 0].sum()),
        "negative_weights:sum": float(w[w < 0].sum()),
        "weight:min": float(w.min(initial=0.0)),
        "weight:max": float(w.max(initial=0.0)),
        "weighted_nll:mean": float((w * nll).sum() / total) if total else 0.0,
        "perplexity:mean": math.exp(min(mean["nll:mean"], MAX_PERPLEXITY_NLL)),
        "probability:mean": float(np.exp(-nll).mean()) if nll.size else 0.0,
        "most_likely:mean": float((nll < math.log(2)).mean()) if nll.size else 0.0,
    }


def compute_policy_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Ratio to the sampler, KL(sampler || policy) at its samples, advantages, likelihoods."""
    used = find_counted_tokens(table)
    p, q = table["logprobs"][used], table["old_logprobs"][used]
    move = p - q
    ratio = np.exp(np.clip(move, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    squares = float((ratio**2).sum())
    return {
        **count_tokens_and_sequences(table["rows"][used]),
        **summarize_values("ratio", ratio),
        **summarize_values("advantage", table["advantages"][used]),
        **summarize_values("advantage_square", table["advantages"][used] ** 2, extremes=False),
        **summarize_values("logprob", p),
        **summarize_values("sampler_logprob", q, extremes=False),
        **summarize_values("sampler_difference", np.abs(move)),
        **summarize_values("update_kl_k1", -move, extremes=False),
        **summarize_values(
            "update_kl", np.expm1(np.clip(move, -10, 10)) - np.clip(move, -10, 10), extremes=False
        ),
        "effective_sample_share:mean": float(ratio.sum()) ** 2 / squares / len(ratio)
        if squares
        else 0.0,
    }


def compute_clipping_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Shares of tokens whose gradient a threshold zeroes, beside `compute_policy_metrics`."""
    used = find_counted_tokens(table)
    ratio = np.exp(
        np.clip(table["logprobs"] - table["old_logprobs"], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    )[used]
    return compute_policy_metrics(table, options) | _compute_clip_fractions(ratio, table, used)


def compute_sequence_clipping_metrics(
    table: TokenTable, options: Mapping[str, float]
) -> LossMetrics:
    """As `compute_clipping_metrics`, by the ratios of whole sequences, with their spread."""
    used, inside = find_counted_tokens(table), table["sequence_ratio_mask"] != 0
    rows = table["rows"]
    moves = np.where(inside, table["logprobs"] - table["old_logprobs"], 0.0)
    size = int(rows.max(initial=-1)) + 1
    means = np.bincount(rows, moves, size) / np.maximum(1, np.bincount(rows, inside, size))
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
    """Entropy of the policy before each token that counts, nats."""
    return summarize_values("entropy", table["entropy"][find_counted_tokens(table)])


def compute_reference_metrics(table: TokenTable) -> LossMetrics:
    """KL(policy || reference) by k3 at the tokens that count; 0 without a reference."""
    used = find_counted_tokens(table)
    if "ref_logprobs" not in table:
        return summarize_values("ref_kl", np.zeros(0), extremes=False)
    d = np.clip((table["logprobs"] - table["ref_logprobs"])[used], -10, 10)
    return summarize_values("ref_kl", np.expm1(-d) + d, extremes=False)


def compute_value_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Error of the values, share of the returns' variance that they explain, share held by the clip."""
    used = find_counted_tokens(table)
    values, returns, old = (table[name][used] for name in ("new_values", "returns", "old_values"))
    error, clip = returns - values, options["value_clip"]
    bounded = old + np.clip(values - old, -clip, clip) if clip > 0 else values
    total = float(returns.var()) if returns.size else 0.0
    return {
        "reward:mean": float(table["rewards"].sum())
        / max(1, len(np.unique(table["rows"]))),  # of a sequence
        **summarize_values("value", values),
        **summarize_values("return", returns),
        "value_loss:mean": float(0.5 * (np.maximum(error**2, (returns - bounded) ** 2)).mean())
        if used.any()
        else 0.0,
        "value_clip_fraction:mean": float(((returns - bounded) ** 2 > error**2).mean())
        if used.any()
        else 0.0,
        "explained_variance:mean": 1.0 - float(error.var()) / max(total, 1e-8)
        if used.any()
        else 0.0,
    }


def compute_pair_metrics(table: TokenTable, options: Mapping[str, float]) -> LossMetrics:
    """Order and size of the scores of pairs; a tie counts half."""
    scores, preferred = table["scores"], table["preferred"] != 0
    chosen, rejected = scores[preferred], scores[~preferred]
    margin = chosen - rejected
    required = table["margin"][preferred] if "margin" in table else np.zeros_like(margin)
    right = (margin > 0) + 0.5 * (margin == 0)
    return {
        "pairs:sum": float(len(margin)),
        **summarize_values("accuracy", right, extremes=False),
        **summarize_values("margin", margin),
        **summarize_values("chosen_score", chosen),
        **summarize_values("rejected_score", rejected),
        **summarize_values("score", scores, extremes=False),
        **summarize_values("ranking_loss", np.logaddexp(0.0, -(margin - required)), extremes=False),
        **summarize_values("met_margin", (margin >= required).astype(float), extremes=False),
    }
