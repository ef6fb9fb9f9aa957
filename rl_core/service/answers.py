"""Answers of the training engine: plain data and numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_core.service.requests import AdapterConfig, OptimizerKind

__all__ = [
    "BaseInfo",
    "ForwardBackwardResult",
    "ModelInfo",
    "OptimStepResult",
    "SampleResult",
    "SampledSequence",
    "TopLogprobs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseInfo:
    """A base model."""

    name: str
    path: str  # of model and tokenizer
    context: int  # tokens of the longest sequence
    vocab_size: int
    batches_runs: bool  # True = rows of several runs share a pass
    note: str  # why, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A training run."""

    model_id: str
    base: str
    adapter: AdapterConfig | None  # None = all weights are trained
    optimizer: OptimizerKind
    steps: int  # updates so far
    num_trained: int  # numbers that are trained, heads of some losses aside
    data_digest: str  # SHA-256 of the data that the weights have learned from, in order; "" = none yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """Loss, per-token outputs of every datum in order, and metrics `name:reduction`, `loss:sum` among them."""

    outputs: tuple[Mapping[str, np.ndarray], ...]  # "logprobs" float32 of the shape of target_tokens, and more by loss
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
    """Most likely tokens at some positions, in falling order; where there are fewer than k: token 0 and -99999."""

    tokens: np.ndarray  # int32 [n, k]
    logprobs: np.ndarray  # float32 [n, k], nats


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One continuation, with the token that ended it."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], nats, of the distribution sampled from
    stop_reason: Literal["stop", "length"]
    topk: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Continuations of a prompt and log-probabilities of the prompt."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None  # float32 [P]; NaN at position 0, which nothing precedes
    topk_prompt: TopLogprobs | None = None  # [P, k]; nothing at position 0
    target_prompt_logprobs: np.ndarray | None = None  # float32 [P - 1, K]; NaN where nothing was asked
