"""Plain-data requests about saved weights and samplers, and their results.

They complement `rl_core.service.requests`. Paths are
`tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>`; the worker resolves the folders.
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
    ScoreRequest,
)
from rl_core.service.responses import ModelEvaluation, ReferenceScores
from rl_core.service.results import ForwardBackwardResult, OptimStepResult, SampleResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunMessage:
    """Message about one training run."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights(_RunMessage):
    """Request to save a run: with optimizer (`weights`), or as a Hugging Face or peft folder (`external_weights`)."""

    path: str  # destination
    overwrite: bool = False
    ttl_seconds: float | None = None
    external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler(_RunMessage):
    """Request to save weights for sampling: under a path, or for one new sampler."""

    path: str | None = None  # set for a named save
    sampler_id: str | None = None  # set when a sampler is created from the weights
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights(_RunMessage):
    """Request to load saved weights into a run, which is created if it does not exist."""

    path: str
    optimizer: bool
    kind: OptimizerKind | None = None  # optimizer of a new run that loads only the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSampler:
    """Request for a sampler of a base model, or of saved weights."""

    sampler_id: str
    base: str | None = None
    path: str | None = None


class UnloadModel(_RunMessage):
    """Request to end a run; its saved weights stay."""


class ModelCreated(_RunMessage):
    """Confirmation of a new run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    """Path at which weights are now saved."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(_RunMessage):
    """Run that now holds the weights of a path."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpened:
    """Sampler that accepts requests."""

    sampler_id: str


class ModelUnloaded(_RunMessage):
    """Run that has ended."""


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
    | ScoreRequest
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
    | ReferenceScores
)
