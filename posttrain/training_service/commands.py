"""Requests about saved weights and samplers, and their answers: plain data beside `rl_core.service.requests`.

Paths are `tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>`; the worker finds the folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.service.request_checks import EvaluateRequest
from rl_core.service.requests import (
    CreateModel,
    ForwardBackward,
    OptimizerKind,
    OptimStep,
    SampleRequest,
)
from rl_core.service.responses import ModelEvaluation
from rl_core.service.results import ForwardBackwardResult, OptimStepResult, SampleResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunMessage:
    """A training run."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights(_RunMessage):
    """Save a run: with optimizer (`weights`), or as a Hugging Face or peft folder (`external_weights`)."""

    path: str  # where it will be
    overwrite: bool = False
    ttl_seconds: float | None = None
    external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler(_RunMessage):
    """Save weights to sample from: under a path, or for one new sampler."""

    path: str | None = None  # given: a named save
    sampler_id: str | None = None  # given: the sampler that is made of it
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights(_RunMessage):
    """Load saved weights into a run, which is made where it does not exist."""

    path: str
    optimizer: bool
    kind: OptimizerKind | None = None  # of a new run that gets the weights alone


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSampler:
    """A sampler of a base model, or of saved weights."""

    sampler_id: str
    base: str | None = None
    path: str | None = None


class UnloadModel(_RunMessage):
    """End a run; what was saved of it stays."""


class ModelCreated(_RunMessage):
    """A new run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    """A path that now exists."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(_RunMessage):
    """A run that now has the weights of a path."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpened:
    """A sampler that can be asked."""

    sampler_id: str


class ModelUnloaded(_RunMessage):
    """A run that is over."""


Command = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | SampleRequest
    | SaveWeights
    | SaveForSampler
    | LoadWeights
    | OpenSampler
    | UnloadModel
    | EvaluateRequest
)
Result = (
    ForwardBackwardResult
    | OptimStepResult
    | SampleResult
    | ModelCreated
    | WeightsSaved
    | WeightsLoaded
    | SamplerOpened
    | ModelUnloaded
    | ModelEvaluation
)
