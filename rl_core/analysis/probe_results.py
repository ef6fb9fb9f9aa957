"""Results of teacher-forced measurements, written by `rl_core.probe`, read by results and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rl_core.analysis.calibration import Calibration

__all__ = ["ModelProbe", "Probes"]


@dataclass(frozen=True)
class ModelProbe:
    """Teacher-forced measurements of one model; None = not measured."""

    perplexity: float | None = None  # exp of the mean nats per token of held-out demonstrations
    demonstrations: int = 0  # number of these
    entropy: float | None = None  # nats per sampled token, over the model's own trajectories
    kl_to_first: float | None = None  # KL(model || first model), nats per sampled token, over the same trajectories
    coherence: float | None = None  # mean score of the reward component `coherence`, on the first model's hidden states
    trajectories: int = 0  # number of own trajectories read
    entropy_by_turn: list[float] = field(default_factory=list)
    kl_by_turn: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Scalars for tracking and tables."""
        names = ("perplexity", "entropy", "kl_to_first", "coherence")
        return {name: float(value) for name in names if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""
        return asdict(self)


@dataclass(frozen=True)
class Probes:
    """All measurements made with the models themselves."""

    models: dict[str, ModelProbe] = field(default_factory=dict)
    reward_model: Calibration | None = None
    notes: list[str] = field(default_factory=list)
