"""Updates of runs under the KL limits that their losses asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rl_core.losses.kl import kl_k3
from rl_core.service.batched_pass import PassPart, run_pass
from rl_core.service.losses_by_name import LOSSES
from rl_core.service.requests import OptimStep
from rl_core.service.run_updates import step_runs
from rl_core.service.training_run import KLGuard, TrainingRun

__all__ = ["guarded_steps"]


def guarded_steps(runs: Sequence[TrainingRun], requests: Sequence[OptimStep]) -> list[dict[str, float] | Exception]:
    """An update for each request, those of several runs together; a run's second one follows its first.

    Returns: metrics in order, or what failed: a ServiceError for a gradient that is not finite.
    """
    found: dict[int, dict[str, float] | Exception] = {}
    while len(found) < len(runs):
        first: dict[int, int] = {}  # by the run
        for index, run in enumerate(runs):
            if index not in found:
                first.setdefault(id(run), index)
        free = [index for index in first.values() if not runs[index].guards]
        stepped = step_runs([runs[index] for index in free], [requests[index] for index in free])
        found |= zip(free, stepped, strict=True)
        for index in first.values():
            if index not in found:
                try:
                    found[index] = _limited_step(runs[index], requests[index])
                except Exception as error:
                    found[index] = error
    return [found[index] for index in range(len(runs))]


def _limited_step(run: TrainingRun, request: OptimStep) -> dict[str, float]:
    """One update, taken back whole (weights, moments, count) where it goes beyond a limit of KL(old || new).

    Returns: metrics, with `kl_after:max` and `refused:mean`. Raises: what `step_runs` gives.
    """
    guards, run.guards = run.guards, []
    gradient, run.gradient = run.gradient, {}
    before = run.state_dict()
    run.gradient = gradient
    (metrics,) = step_runs([run], [request])
    if isinstance(metrics, Exception):
        raise metrics
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
