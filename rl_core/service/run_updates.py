"""Updates of several runs at once, each by its own gradient and settings.

Steps of AdamW are one call of compiled code where there is some; torch makes the first one of a parameter,
which makes its moments, and those of Muon. A run's step is the same bits whatever is stepped beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.cpu import adamw
from rl_core.errors import ServiceError
from rl_core.service.requests import OptimStep
from rl_core.service.training_run import TrainingRun
from rl_core.training.gradient_norm import total_norm

__all__ = ["step_runs"]

Metrics = dict[str, float]


@dataclass(slots=True)
class _Update:
    """One run's."""

    run: TrainingRun
    request: OptimStep
    gradient: Mapping[str, torch.Tensor]
    rows: np.ndarray | None  # for compiled code; None = torch makes the step
    norm: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of the gradient by which its norm is at most that of the request; torch's, in float32."""
        clip = self.request.adam.grad_clip_norm
        if clip <= 0 or not self.gradient:
            return 1.0
        return float(torch.clamp(clip / (torch.tensor(self.norm) + 1e-6), max=1.0))


def step_runs(runs: Sequence[TrainingRun], requests: Sequence[OptimStep]) -> list[Metrics | Exception]:
    """One update of each of several runs by its gradient so far, which is then forgotten.

    Args:
        runs: each once.
    Returns: metrics in order, or what failed: a ServiceError (user) for a gradient that is not finite; nothing of that
        run is changed but that its gradient is forgotten.
    """
    updates = []
    for run, request in zip(runs, requests, strict=True):
        gradient = run.take_gradient()
        updates.append(_Update(run, request, gradient, run.compiled_rows(gradient)))
    compiled = [update for update in updates if update.rows is not None]
    code = adamw.load()
    if code is not None and compiled:
        norms = code.norms([update.rows for update in compiled if update.rows is not None])
        for update, norm in zip(compiled, norms.tolist(), strict=True):
            update.norm = norm
        finite = [update for update in compiled if math.isfinite(update.norm)]
        if finite:
            code.step([update.rows for update in finite if update.rows is not None], list(map(_settings, finite)))
    return [_finished(update) for update in updates]


def _finished(update: _Update) -> Metrics | Exception:
    """Metrics of an update, which torch makes now if it has not been made."""
    run, request = update.run, update.request
    try:
        if update.rows is None:
            used = [update.gradient[name] for name in run.parameters if name in update.gradient]
            norm = total_norm(used)
            update.norm = float(norm)
            if math.isfinite(update.norm):
                run.step_by_torch(request, update.gradient, norm)
    except Exception as error:
        return error
    if not math.isfinite(update.norm):
        return _refusal(update)
    run.count_step()
    return {
        "grad_norm:mean": update.norm,
        "clipped:mean": float(0 < request.adam.grad_clip_norm < update.norm),
        "learning_rate:mean": request.adam.learning_rate,
        "empty:mean": float(not update.gradient),
        "step:max": float(run.steps),
    }


def _refusal(update: _Update) -> ServiceError:
    update.run.forget_data()
    bad = next((name for name, part in update.gradient.items() if not bool(torch.isfinite(part).all())), "its norm")
    return ServiceError(
        f"optim_step: the gradient is not finite (first: {bad}); the update was left out and the gradient "
        "forgotten. Lower the learning rate, or look at the data of this step",
        "user",
    )


def _settings(update: _Update) -> adamw.AdamwSettings:
    adam = update.request.adam
    return adamw.AdamwSettings(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, update.scale)
