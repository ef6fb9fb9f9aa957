"""State of the training loop: its progress, what it keeps between two calls, its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rl_core.metrics import MetricHistory

__all__ = ["LoopMemory", "LoopOutcome", "LoopProgress"]

HISTORY = 500  # newest values of each metric that are kept
_REASONS = {
    "iterations": "as many as were set",
    "patience": "then patience ran out: evaluations got no better",
    "callback": "stopped by a callback",
}


@dataclass(frozen=True)
class LoopOutcome:
    """Outcome of a run of the loop; the trainer's model holds the weights that `metrics` were measured on."""

    iterations: int  # done in all, those before a resume included
    steps: int  # optimizer steps in all
    stop_reason: str  # "iterations", "patience", or what the trainer's `finished` or a callback said
    best_metric: float | None  # best value of the chosen metric; None = no metric was chosen
    metrics: dict[str, float]  # last evaluation of the model as it is left
    best_iteration: int | None = None  # the iteration whose weights were restored or kept
    resumed_iteration: int = 0  # 0 = from the start
    seconds: float = 0.0  # of this process
    # the newest values of every metric
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY), repr=False)

    @property
    def ended(self) -> str:
        """Length and reason for people: `142 iterations (success 98% over ten)`."""
        return f"{self.iterations} iterations ({_REASONS.get(self.stop_reason, self.stop_reason)})"


@dataclass
class LoopProgress:
    """The loop's own part of a checkpoint."""

    iteration: int = 0
    evaluated_iteration: int = 0  # the last one that was evaluated
    metrics: dict[str, float] = field(default_factory=dict)  # last evaluation
    best_value: float | None = None
    best_iteration: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    reference: float | None = None  # value at the last improvement that was large enough for patience
    bad_evaluations: int = 0  # evaluations since then
    nonfinite_metrics: int = 0


@dataclass
class LoopMemory:
    """The loop's state between two calls of `run_loop` on one trainer in one process: the second goes on from it."""

    state: LoopProgress = field(default_factory=LoopProgress)
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY))
    best_weights: dict[str, torch.Tensor] | None = None
    is_whole: bool = True  # False = the last iteration was left in its middle, so a checkpoint is the better start
