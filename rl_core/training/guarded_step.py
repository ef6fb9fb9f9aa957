"""Optimizer step within a KL limit: copy the state, step, measure KL(old || new), restore the state beyond the limit.

The policy-gradient trainer, online learning and the training service use it. Each measures the KL in its own way: k3
under the step's dropout masks, over the recorded distributions, or k3 by a forward pass of the service.

A gradient that is not finite is refused elsewhere, before anything changes: `OptimizerStep` counts such steps and gives
up after `max_nonfinite` in a row; the service checks the gradients of several runs, which one compiled call steps
together (`step_runs`), and reports an error to the client of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Restorable(Protocol):
    """Weights with their optimizer."""

    def copy_state(self) -> Any:
        """Return a copy of weights and optimizer that later steps do not change."""

    def restore_state(self, state: Any) -> None:
        """Restore a copy, bit for bit."""


@dataclass(frozen=True, slots=True)
class GuardedResult:
    """Outcome of a guarded step."""

    metrics: dict[str, float]  # of the step
    kls: list[float]  # KL(old || new) after the step, nats per token; as many as limits, or empty
    is_refused: bool  # True = the state is that before the step


def run_guarded_step(
    trained: Restorable,
    run_step: Callable[[], dict[str, float]],
    measure_kls: Callable[[], list[float]],
    limits: Sequence[float],
) -> GuardedResult:
    """Run one step, and restore weights and optimizer if a KL exceeds its limit or is NaN.

    Args:
        run_step: returns the step's metrics.
        measure_kls: called after the step; returns a KL for each limit, or [] if the step changed nothing.
        limits: nats per token.
    Raises: errors of `run_step` and `measure_kls`; the state is then not restored.
    """
    state = trained.copy_state()
    metrics = run_step()
    kls = measure_kls()
    is_refused = bool(kls) and not all(kl <= limit for kl, limit in zip(kls, limits, strict=True))
    if is_refused:
        trained.restore_state(state)
    return GuardedResult(metrics, kls, is_refused)
