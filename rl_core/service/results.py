"""Results of the training engine: plain data, numpy arrays, and metric names for trackers.

Metrics are named `name:reduction` (`clip_fraction:mean`), because clients combine parts of a request by the reduction;
trackers get the names that trainers log (`train/...`, `policy/...`, `value/...`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_core.service.requests import AdapterConfig, OptimizerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseInfo:
    """Description of a base model."""

    name: str
    path: str  # of model and tokenizer
    context: int  # tokens of the longest sequence
    vocab_size: int
    batches_runs: bool  # rows of several runs share a pass
    note: str  # the reason, as text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Description of a training run."""

    model_id: str
    base: str
    adapter: AdapterConfig | None  # None = all weights are trained
    optimizer: OptimizerKind
    steps: int  # updates so far
    num_trained: int  # trained values, without the heads that some losses use
    data_digest: str  # SHA-256 of the training data so far, in order; "" if none


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """Loss, per-token outputs of every datum in order, and metrics `name:reduction` including `loss:sum`."""

    # "logprobs": float32 with the shape of target_tokens; further outputs depend on the loss
    outputs: tuple[Mapping[str, np.ndarray], ...]
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Sum over all tokens."""
        return self.metrics["loss:sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepResult:
    """Metrics `name:reduction` of an update."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Most likely tokens at some positions, in descending order; padded with token 0 and -99999 up to k."""

    tokens: np.ndarray  # int32 [n, k]
    logprobs: np.ndarray  # float32 [n, k], nats


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """Continuation, including the token that ended it."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], nats, of the sampling distribution
    stop_reason: Literal["stop", "length"]
    topk: TopLogprobs | None = None
    recorded: TopLogprobs | None = None  # what the loss stable_reinforce needs; not for the client


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Continuations of a prompt and log-probabilities of the prompt."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None  # float32 [P]; NaN at position 0
    topk_prompt: TopLogprobs | None = None  # [P, k]; empty at position 0
    target_prompt_logprobs: np.ndarray | None = None  # float32 [P - 1, K]; NaN if not requested


_TRACKER_NAMES = {
    "loss:sum": "train/loss_sum",
    "loss_per_token:mean": "train/loss",
    "loss_per_pair:mean": "train/loss",
    "nll:mean": "train/nll",
    "tokens:sum": "train/tokens",
    "sequences:sum": "train/sequences",
    "grad_norm:mean": "train/grad_norm",
    "learning_rate:mean": "train/learning_rate",
    "advantage:mean": "train/advantages_mean",
    "accuracy:mean": "train/accuracy",
    "margin:mean": "train/margin",
    "ranking_loss:mean": "train/ranking_loss",
    "reward:mean": "reward/mean",
    "entropy:mean": "policy/entropy",
    "update_kl:mean": "policy/update_kl",
    "update_kl_k1:mean": "policy/update_kl_k1",
    "kl_after:max": "policy/kl_after_max",
    "refused:mean": "policy/refused_steps",
    "ref_kl:mean": "policy/ref_kl",
    "clip_fraction:mean": "policy/clip_fraction",
    "clip_fraction_low:mean": "policy/clip_fraction_low",
    "clip_fraction_high:mean": "policy/clip_fraction_high",
    "ratio:mean": "policy/ratio_mean",
    "ratio:max": "policy/ratio_max",
    "sampler_difference:max": "policy/sampler_difference_max",
    "effective_sample_share:mean": "policy/effective_sample_share",
    "value_loss:mean": "value/loss",
    "value_clip_fraction:mean": "value/clip_fraction",
    "explained_variance:mean": "value/explained_variance",
    "return:mean": "value/returns_mean",
    "value:mean": "value/values_mean",
}


def rename_metrics_for_trackers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a result's metrics under the names that trainers log.

    The standard deviation of advantages is computed from their mean and mean square. `policy/loss` is the loss per
    token of a policy loss (one that has a ratio).
    """
    renamed = {
        _TRACKER_NAMES[name]: float(value)
        for name, value in metrics.items()
        if name in _TRACKER_NAMES
    }
    if "advantage_square:mean" in metrics:
        square, mean = metrics["advantage_square:mean"], metrics["advantage:mean"]
        renamed["train/advantages_std"] = math.sqrt(max(0.0, square - mean**2))
    if "ratio:mean" in metrics and "train/loss" in renamed:
        renamed["policy/loss"] = renamed["train/loss"]
    return renamed
