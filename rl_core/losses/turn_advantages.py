"""Advantages by turn: discounted returns of turns, and their comparison within a group of rollouts.

Suffixes: G rollouts of a group, N turns of one rollout, K turns of all rollouts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import GroupMethod, group_advantages


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """Advantages of the turns of one group, and how they were compared."""

    advantages: list[torch.Tensor]  # float [N] of each of G rollouts
    step_advantages_K: (
        torch.Tensor
    )  # float [K], the part by turn, rollout after rollout, unweighted
    set_sizes: list[int]  # of each set of compared turns, in order of first appearance


def discount_turn_rewards(rewards_N: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute the return from each turn of one rollout on: R_n = r_n + gamma R_{n+1}, and 0 after the last turn.

    Args:
        rewards_N: float [N], in the order in which the turns were taken.
        gamma: in [0, 1], per turn.
    Raises: DataError on shape, non-finite rewards, or gamma.
    """
    if rewards_N.ndim != 1 or not bool(torch.isfinite(rewards_N).all()):
        raise DataError(f"turn rewards: {rewards_N.tolist()} must be finite numbers, one a turn")
    if not 0 <= gamma <= 1:
        raise DataError(f"gamma: {gamma} must lie in [0, 1]")
    returns_N, after = torch.empty_like(rewards_N), rewards_N.new_zeros(())
    for turn in reversed(range(len(rewards_N))):
        after = rewards_N[turn] + gamma * after
        returns_N[turn] = after
    return returns_N


def step_advantages(
    returns_K: torch.Tensor, keys: Sequence[Hashable], *, method: GroupMethod = "grpo"
) -> tuple[torch.Tensor, list[int]]:
    """Compute the advantage of each turn relative to the turns of equal key, by `group_advantages`.

    A turn without another one of its key has no baseline: its advantage is 0, as that of a group of one.

    Args:
        returns_K: float [K] of the turns of one group; a rollout may have several of one key.
        keys: [K], equal for turns that are compared.
    Returns: float [K]; the sizes of the sets of compared turns.
    Raises: DataError if the numbers of returns and keys differ, and as `group_advantages`.
    Source: Feng et al. 2025, "Group-in-Group Policy Optimization", arXiv:2505.10978, section 4.3.
    """
    if returns_K.shape != (len(keys),):
        raise DataError(f"returns: shape {tuple(returns_K.shape)} for {len(keys)} keys")
    sets: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        sets.setdefault(key, []).append(index)
    advantages_K = torch.zeros_like(returns_K)
    for indices in sets.values():
        advantages_K[indices] = group_advantages(returns_K[indices][None], method=method)[0]
    return advantages_K, [len(indices) for indices in sets.values()]


def turn_advantages(
    episode_advantages_G: torch.Tensor,
    turn_rewards: Sequence[torch.Tensor],
    keys: Sequence[Sequence[Hashable]],
    *,
    gamma: float = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    method: GroupMethod = "grpo",
) -> TurnAdvantages:
    """Compute the advantages of all turns of one group.

    A_jn = episode_weight A_j + step_weight S_jn, where A_j is the rollout's advantage and S_jn compares the return
    R_jn = sum_{m >= n} gamma^(m - n) r_jm with those of the turns of equal key (`step_advantages`).

    Args:
        episode_advantages_G: float [G].
        turn_rewards: float [N] of each rollout, in the order of its turns; they sum to its reward.
        keys: [N] of each rollout. None = the turn is not the policy's: it is not compared, its step advantage is 0.
    Raises: DataError on lengths, weights, and as `discount_turn_rewards`.
    Source: arXiv:2505.10978, eq. 8 (keys are states, both weights on).
    """
    sizes = [len(rewards_N) for rewards_N in turn_rewards]
    if sizes != [len(row) for row in keys] or episode_advantages_G.shape != (len(sizes),):
        raise DataError(
            f"turns: {sizes} rewards, {[len(row) for row in keys]} keys and "
            f"{tuple(episode_advantages_G.shape)} episode advantages do not match"
        )
    if not all(weight >= 0 and math.isfinite(weight) for weight in (episode_weight, step_weight)):
        raise DataError(f"weights: {episode_weight} and {step_weight} must be finite, not below 0")
    if not sum(sizes):
        return TurnAdvantages(list(turn_rewards), episode_advantages_G.new_zeros(0), [])
    returns_K = torch.cat([discount_turn_rewards(rewards_N, gamma) for rewards_N in turn_rewards])
    flat_keys = [key for row in keys for key in row]
    known = [index for index, key in enumerate(flat_keys) if key is not None]
    steps_K = torch.zeros_like(returns_K)
    steps_K[known], set_sizes = step_advantages(
        returns_K[known], [flat_keys[index] for index in known], method=method
    )
    episodes_K = episode_advantages_G.repeat_interleave(torch.tensor(sizes))
    advantages_K = episode_weight * episodes_K + step_weight * steps_K
    return TurnAdvantages(list(advantages_K.split(sizes)), steps_K, set_sizes)
