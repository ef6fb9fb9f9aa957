"""Updates of several runs at once, each by its own gradient and settings.

Steps of AdamW are one call of compiled code where there is some; torch makes the first one of a parameter,
which makes its moments, and those of Muon. A run's step is the same bits whatever is stepped beside it.

Updates of runs under the KL limits that their losses asked for.
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
from rl_core.training.optimizers import compute_total_norm

UpdateMetrics = dict[str, float]


@dataclass(slots=True)
class _RunUpdate:
    """One run's."""

    run: TrainingRun
    request: OptimStep
    gradient: Mapping[str, torch.Tensor]
    rows: np.ndarray | None  # for compiled code; None = torch makes the step
    norm: float = 0.0

    @property
    def gradient_scale(self) -> float:
        """Factor of the gradient by which its norm is at most that of the request; torch's, in float32."""
        clip = self.request.adam.grad_clip_norm
        if clip <= 0 or not self.gradient:
            return 1.0
        return float(torch.clamp(clip / (torch.tensor(self.norm) + 1e-6), max=1.0))


def step_runs(
    runs: Sequence[TrainingRun], requests: Sequence[OptimStep]
) -> list[UpdateMetrics | Exception]:
    """One update of each of several runs by its gradient so far, which is then forgotten.

    Args:
        runs: each once.
    Returns: metrics in order, or what failed: a ServiceError (user) for a gradient that is not finite; nothing of that
        run is changed but that its gradient is forgotten.
    """
    updates = []
    for run, request in zip(runs, requests, strict=True):
        gradient = run.take_gradient()
        updates.append(_RunUpdate(run, request, gradient, run.build_adamw_rows(gradient)))
    compiled = [update for update in updates if update.rows is not None]
    code = adamw.load_adamw()
    if code is not None and compiled:
        norms = code.compute_norms([update.rows for update in compiled if update.rows is not None])
        for update, norm in zip(compiled, norms.tolist(), strict=True):
            update.norm = norm
        finite = [update for update in compiled if math.isfinite(update.norm)]
        if finite:
            code.step(
                [update.rows for update in finite if update.rows is not None],
                list(map(_build_adamw_settings, finite)),
            )
    return [_finish_update(update) for update in updates]


def _finish_update(update: _RunUpdate) -> UpdateMetrics | Exception:
    """Metrics of an update, which torch makes now if it has not been made."""
    run, request = update.run, update.request
    try:
        if update.rows is None:
            used = [update.gradient[name] for name in run.parameters if name in update.gradient]
            norm = compute_total_norm(used)
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
    bad = next(
        (name for name, part in update.gradient.items() if not bool(torch.isfinite(part).all())),
        "its norm",
    )
    return ServiceError(
        f"optim_step: the gradient is not finite (first: {bad}); the update was left out and the gradient "
        "forgotten. Lower the learning rate, or look at the data of this step",
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
    """An update for each request, those of several runs together; a run's second one follows its first.

    Returns: metrics in order, or what failed: a ServiceError for a gradient that is not finite.
    """
    found: dict[int, dict[str, float] | Exception] = {}
    while len(found) < len(runs):
        first: dict[int, int] = {}  # by the run
        for index, run in enumerate(runs):
            if index not in found:
                first.setdefault(id(run), index)
        free = [index for index in first.values() if not runs[index].kl_limit_checks]
        stepped = step_runs([runs[index] for index in free], [requests[index] for index in free])
        found |= zip(free, stepped, strict=True)
        for index in first.values():
            if index not in found:
                try:
                    found[index] = _step_within_kl_limits(runs[index], requests[index])
                except Exception as error:
                    found[index] = error
    return [found[index] for index in range(len(runs))]


def _step_within_kl_limits(run: TrainingRun, request: OptimStep) -> dict[str, float]:
    """One update, taken back whole (weights, moments, count) where it goes beyond a limit of KL(old || new).

    Returns: metrics, with `kl_after:max` and `refused:mean`. Raises: what `step_runs` gives.
    """
    guards, run.kl_limit_checks = run.kl_limit_checks, []
    gradient, run.gradient = run.gradient, {}
    before = run.state_dict()
    run.gradient = gradient
    (metrics,) = step_runs([run], [request])
    if isinstance(metrics, Exception):
        raise metrics
    kls = [_measure_mean_kl(run, guard) for guard in guards]
    refused = any(not kl <= guard.limit for kl, guard in zip(kls, guards, strict=True))
    if refused:
        run.load_state_dict(before)
        run.reset_data_digest()
    return metrics | {
        "kl_after:max": max(kls),
        "refused:mean": float(refused),
        "step:max": float(run.steps),
    }


def _measure_mean_kl(run: TrainingRun, check: KLLimitCheck) -> float:
    """Mean KL(old || new) over the guard's tokens, k3, nats; 0 without a token."""
    total = count = 0.0
    for index, tokens in enumerate(check.tokens):
        part = PassPart(
            run,
            LOSSES["cross_entropy"],
            {"temperature": check.temperature},
            [tokens],
            [{"target_tokens": check.targets[index]}],
        )
        new = run_pass([part], backward=False)[0].columns[0]["logprobs"]
        mask = check.masks[index]
        old = torch.from_numpy(np.ascontiguousarray(check.old_logprobs[index][mask]))
        total += float(
            kl_k3(old.double(), torch.from_numpy(np.ascontiguousarray(new[mask])).double()).sum()
        )
        count += int(mask.sum())
    return total / count if count else 0.0
