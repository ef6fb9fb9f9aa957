"""An update of a run under the KL limits that its losses asked for."""

from __future__ import annotations

import numpy as np
import torch

from rl_core.losses.kl import kl_k3
from rl_core.service.batched_pass import PassPart, run_pass
from rl_core.service.losses_by_name import LOSSES
from rl_core.service.requests import OptimStep
from rl_core.service.training_run import KLGuard, TrainingRun

__all__ = ["guarded_step"]


def guarded_step(run: TrainingRun, request: OptimStep) -> dict[str, float]:
    """One update, taken back whole (weights, moments, count) where it goes beyond a limit of KL(old || new).

    Returns: metrics; with limits also `kl_after:max` and `refused:mean`.
    Raises: ServiceError for a gradient that is not finite.
    """
    guards, run.guards = run.guards, []
    if not guards:
        return run.step(request)
    gradient, run.gradient = run.gradient, {}
    before = run.state_dict()
    run.gradient = gradient
    metrics = run.step(request)
    kls = [_mean_kl(run, guard) for guard in guards]
    refused = any(not kl <= guard.limit for kl, guard in zip(kls, guards, strict=True))
    if refused:
        run.load_state_dict(before)
        run.forget_data()
    return metrics | {"kl_after:max": max(kls), "refused:mean": float(refused), "step:max": float(run.steps)}


def _mean_kl(run: TrainingRun, guard: KLGuard) -> float:
    """Mean KL(old || new) over the guard's tokens, k3, nats; 0 without a token."""
    total = count = 0.0
    for index, tokens in enumerate(guard.tokens):
        part = PassPart(
            run, LOSSES["cross_entropy"], {"temperature": guard.temperature}, [tokens],
            [{"target_tokens": guard.targets[index]}],
        )  # fmt: skip
        new = run_pass([part], backward=False)[0].columns[0]["logprobs"]
        mask = guard.masks[index]
        old = torch.from_numpy(np.ascontiguousarray(guard.old_logprobs[index][mask]))
        total += float(kl_k3(old.double(), torch.from_numpy(np.ascontiguousarray(new[mask])).double()).sum())
        count += int(mask.sum())
    return total / count if count else 0.0
