"""Requests about saved weights, beside those of the engine (`rl_core.service.requests`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.service.wire.tinker_paths import TinkerPath
from rl_core.service.requests import OptimizerKind

__all__ = ["Evaluate", "LoadWeights", "PublishSampler", "SaveWeights", "UnloadModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """A training run's weights under a path: with the optimizer (`weights`), for samplers (`sampler_weights`), or as a
    Hugging Face folder or adapter (`external_weights`).
    """

    path: TinkerPath
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSampler:
    """A sampler over a training run's present weights."""

    model_id: str
    sampler_id: str
    kind: Literal["snapshot", "inflight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Saved weights into a training run; with `is_new` the run is made as the saved one was."""

    model_id: str
    path: TinkerPath
    optimizer: bool
    is_new: bool
    optimizer_kind: OptimizerKind | None = None  # of a new run, where its state is not loaded; None = as saved


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """The end of a training run."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """A comparison of weights on texts; `body` as the service's REST interface takes it."""

    model_id: str
    body: Mapping[str, Any]
