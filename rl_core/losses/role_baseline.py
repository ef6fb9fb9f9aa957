"""Role-conditioned advantages: the reward above a running mean of the rewards of the same role.

Suffix: N rollouts, in the order in which their rewards are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rl_core.errors import DataError


def role_advantages(
    rewards_N: torch.Tensor,
    roles: Sequence[str],
    baselines: Mapping[str, float],
    *,
    decay: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute A = R - b_role, then b_role = decay b_role + (1 - decay) R, one rollout after the other.

    The baseline is read before the rollout's own reward enters it, so it does not depend on the rollout's actions and
    leaves the gradient unbiased. A role without a baseline starts at 0, the sum of a zero-sum game's values.

    Args:
        rewards_N: float [N].
        roles: [N], the game and the player of each rollout.
        baselines: of the roles so far.
        decay: 0 <= decay < 1.
    Returns: float64 [N] advantages; the new baselines.
    Raises: DataError on shape, non-finite rewards, or a decay out of range.
    Source: Liu et al. 2025, SPIRAL, arXiv:2506.24119 (role-conditioned advantage estimation).
    """
    if rewards_N.ndim != 1 or len(roles) != len(rewards_N):
        raise DataError(
            f"roles: {len(roles)} for rewards of shape {tuple(rewards_N.shape)}; one each is needed"
        )
    if not bool(torch.isfinite(rewards_N).all()):
        raise DataError("rewards: one is not finite")
    if not 0 <= decay < 1:
        raise DataError(f"decay: {decay} must be at least 0 and below 1")
    current = dict(baselines)
    advantages = []
    for reward, role in zip(rewards_N.double().tolist(), roles, strict=True):
        baseline = current.get(role, 0.0)
        advantages.append(reward - baseline)
        current[role] = decay * baseline + (1 - decay) * reward
    return torch.tensor(advantages, dtype=torch.float64), current
