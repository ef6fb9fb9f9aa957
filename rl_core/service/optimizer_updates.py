"""Updates of several runs together, each by its own gradient and settings and within its KL limits.

AdamW steps are one call of compiled code if available. torch makes the first step of a parameter, which creates its
moments, and all steps of Muon. A run's step is bitwise identical whatever other runs are stepped with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.cpu import adamw
from rl_core.errors import ServiceError
from rl_core.losses.kl import kl_k3
from rl_core.service.batched_pass import PassPart, run_pass
from rl_core.service.loss_registry import LOSSES
from rl_core.service.requests import OptimStep
from rl_core.service.training_run import KLLimitCheck, TrainingRun
from rl_core.training.guarded_step import run_guarded_step
from rl_core.training.optimizers import compute_total_norm

UpdateMetrics = dict[str, float]


@dataclass(slots=True)
class _RunUpdate:
    """Update of one run."""

    run: TrainingRun
    request: OptimStep
    gradient: Mapping[str, torch.Tensor]
    rows: np.ndarray | None  # for compiled code; None if torch makes the step
    norm: float = 0.0

    @property
    def gradient_scale(self) -> float:
        """Factor that limits the gradient's norm to the request's; computed as torch does, in float32."""
        clip = self.request.adam.grad_clip_norm
        if clip <= 0 or not self.gradient:
            return 1.0
        return float(torch.clamp(clip / (torch.tensor(self.norm) + 1e-6), max=1.0))


def step_runs(
    runs: Sequence[TrainingRun], requests: Sequence[OptimStep]
) -> list[UpdateMetrics | Exception]:
    """Update several runs, each by the gradient accumulated so far, which is then discarded.

    Args:
        runs: distinct runs.
    Returns: metrics in order, or the error: a ServiceError (user) for a gradient that is not finite. A failed run keeps
        everything but its gradient.
    """
    updates = []
    for run, request in zip(runs, requests, strict=True):
        gradient = run.take_gradient()
        updates.append(_RunUpdate(run, request, gradient, run.build_adamw_rows(gradient)))
    compiled = [update for update in updates if update.rows is not None]
    compiled_adamw = adamw.load_adamw()
    if compiled_adamw is not None and compiled:
        norms = compiled_adamw.compute_norms(
            [update.rows for update in compiled if update.rows is not None]
        )
        for update, norm in zip(compiled, norms.tolist(), strict=True):
            update.norm = norm
        finite_updates = [update for update in compiled if math.isfinite(update.norm)]
        if finite_updates:
            rows = [update.rows for update in finite_updates if update.rows is not None]
            compiled_adamw.step(rows, list(map(_build_adamw_settings, finite_updates)))
    return [_finish_update(update) for update in updates]


def _finish_update(update: _RunUpdate) -> UpdateMetrics | Exception:
    """Return the metrics of an update; torch makes the update here unless compiled code has made it."""
    run, request = update.run, update.request
    try:
        if update.rows is None:
            gradients = [
                update.gradient[name] for name in run.parameters if name in update.gradient
            ]
            norm = compute_total_norm(gradients)
            update.norm = float(norm)
            if math.isfinite(update.norm):
                run.step_torch_optimizer(request, update.gradient, norm)
    except Exception as error:
        return error
    if not math.isfinite(update.norm):
        return _refuse_nonfinite_update(update)
    run.count_step()
    return {
        "grad_norm:mean": update.norm,
        "clipped:mean": float(0 < request.adam.grad_clip_norm < update.norm),
        "learning_rate:mean": request.adam.learning_rate,
        "empty:mean": float(not update.gradient),
        "step:max": float(run.steps),
    }


def _refuse_nonfinite_update(update: _RunUpdate) -> ServiceError:
    update.run.reset_data_digest()
    bad_names = (
        name for name, part in update.gradient.items() if not bool(torch.isfinite(part).all())
    )
    return ServiceError(
        f"optim_step: the gradient is not finite (first: {next(bad_names, 'its norm')}); the update was skipped and "
        "the gradient discarded. Lower the learning rate, or check the data of this step",
        "user",
    )


def _build_adamw_settings(update: _RunUpdate) -> adamw.AdamwSettings:
    adam = update.request.adam
    return adamw.AdamwSettings(
        adam.learning_rate,
        adam.beta1,
        adam.beta2,
        adam.eps,
        adam.weight_decay,
        update.gradient_scale,
    )


def step_runs_within_kl_limits(
    runs: Sequence[TrainingRun], requests: Sequence[OptimStep]
) -> list[dict[str, float] | Exception]:
    """Make an update for each request, those of several runs together; updates of one run follow each other.

    Returns: metrics in order, or the error: a ServiceError for a gradient that is not finite.
    """
    results: dict[int, dict[str, float] | Exception] = {}
    while len(results) < len(runs):
        first_pending: dict[int, int] = {}  # index of each run's first request without a result
        for index, run in enumerate(runs):
            if index not in results:
                first_pending.setdefault(id(run), index)
        unlimited = [i for i in first_pending.values() if not runs[i].kl_limit_checks]
        metrics = step_runs([runs[i] for i in unlimited], [requests[i] for i in unlimited])
        results |= zip(unlimited, metrics, strict=True)
        for index in first_pending.values():
            if index not in results:
                try:
                    results[index] = _step_within_kl_limits(runs[index], requests[index])
                except Exception as error:
                    results[index] = error
    return [results[index] for index in range(len(runs))]


def _step_within_kl_limits(run: TrainingRun, request: OptimStep) -> dict[str, float]:
    """Make one update; roll it back completely (weights, moments, count) if it exceeds a limit of KL(old || new).

    Returns: metrics, including `kl_after:max` and `refused:mean`. Raises: errors that `step_runs` returns.
    """
    checks, run.kl_limit_checks = run.kl_limit_checks, []

    def run_step() -> UpdateMetrics:
        (metrics,) = step_runs([run], [request])
        if isinstance(metrics, Exception):
            raise metrics
        return metrics

    result = run_guarded_step(
        run,
        run_step,
        lambda: [_measure_mean_kl(run, check) for check in checks],
        [check.limit for check in checks],
    )
    return result.metrics | {
        "kl_after:max": max(result.kls),
        "refused:mean": float(result.is_refused),
        "step:max": float(run.steps),
    }


def _measure_mean_kl(run: TrainingRun, check: KLLimitCheck) -> float:
    """Measure the mean KL(old || new) over the check's tokens, k3, nats; 0 without a token."""
    total = count = 0.0
    for index, tokens in enumerate(check.tokens):
        options = {"temperature": check.temperature}
        inputs = {"target_tokens": check.targets[index]}
        part = PassPart(run, LOSSES["cross_entropy"], options, [tokens], [inputs])
        new_logprobs = run_pass([part], backward=False)[0].columns[0]["logprobs"]
        mask = check.masks[index]
        old = torch.from_numpy(np.ascontiguousarray(check.old_logprobs[index][mask]))
        new = torch.from_numpy(np.ascontiguousarray(new_logprobs[mask]))
        total += float(kl_k3(old.double(), new.double()).sum())
        count += int(mask.sum())
    return total / count if count else 0.0
