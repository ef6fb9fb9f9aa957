"""Who deserves what: from rewards to advantages, by algorithm.

Suffixes: P prompts, G rollouts per prompt, R rows of an iteration, S whole sequence.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import GroupMethod, batch_advantages, gae, group_advantages, overlong_penalty
from rl_core.losses.masking import fill_masked
from rl_core.settings import Algorithm, PolicySettings
from rl_core.types import RolloutGroup

__all__ = ["compared_rewards", "estimated_advantages", "fill_masked_rewards", "last_token_rewards", "punish_length"]

# How each algorithm without a critic compares rewards; the others of its name differ in the loss alone.
_METHODS: dict[str, GroupMethod] = {
    "grpo": "grpo", "dapo": "grpo", "gspo": "grpo", "cispo": "grpo", "dr_grpo": "dr_grpo", "rloo": "rloo",
}  # fmt: skip


def punish_length(groups: Iterable[RolloutGroup], settings: PolicySettings) -> dict[str, float]:
    """Add DAPO's penalty for completions that come near the limit to the rewards, in place.

    Returns: reward/overlong, its mean; nothing where the settings ask for none.
    """
    if not settings.overlong_tokens:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts if not rollout.is_masked]
    lengths_B = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
    limit = settings.sampling.max_completion_tokens
    penalties = overlong_penalty(lengths_B, max_tokens=limit, buffer=settings.overlong_tokens).tolist()
    for rollout, penalty in zip(rollouts, penalties, strict=True):
        rollout.reward += penalty
        rollout.trajectory.reward = rollout.reward
        rollout.trajectory.rewards = {**rollout.trajectory.rewards, "overlong": penalty}
    return {"reward/overlong": statistics.fmean(penalties)}


def compared_rewards(rewards_PG: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """Advantage of each rollout, one for all its tokens: against its group, for `reinforce` against the whole batch.

    Args:
        rewards_PG: float [P, G].
    Returns: float [P, G].
    Raises: DataError for an algorithm that needs values.
    """
    if algorithm == "reinforce":
        return batch_advantages(rewards_PG)
    if algorithm not in _METHODS:
        raise DataError(f"algorithm: '{algorithm}' has no advantages without a critic")
    return group_advantages(rewards_PG, method=_METHODS[algorithm])


def fill_masked_rewards(rewards_PG: torch.Tensor, masked_PG: torch.Tensor) -> torch.Tensor:
    """Rewards with that of a masked rollout replaced by the mean of its group's others.

    Its own advantage within the group is then 0, and the others' differences are what they were. A group of which all
    are masked gets the mean of everything that is not.

    Args:
        rewards_PG: float [P, G]; anything finite where masked.
        masked_PG: bool [P, G], True = no reward could be computed.
    """
    if not bool(masked_PG.any()):
        return rewards_PG
    known_PG = torch.where(masked_PG, rewards_PG.new_zeros(()), rewards_PG)
    counts_P1 = (~masked_PG).sum(1, keepdim=True)
    everywhere = known_PG.sum() / counts_P1.sum().clamp(min=1)
    means_P1 = torch.where(counts_P1 > 0, known_PG.sum(1, keepdim=True) / counts_P1.clamp(min=1), everywhere)
    return torch.where(masked_PG, means_P1, rewards_PG)


def last_token_rewards(rewards_R: torch.Tensor, loss_mask_RS: torch.Tensor) -> torch.Tensor:
    """Each row's reward on its last loss token, 0 elsewhere: [R, S].

    Raises: DataError for a row without loss tokens, whose reward would be lost.
    """
    if not bool(loss_mask_RS.any(1).all()):
        raise DataError("loss_mask: a row has no loss token to carry its reward")
    positions_S = torch.arange(loss_mask_RS.shape[1], device=loss_mask_RS.device)
    last_R1 = (positions_S * loss_mask_RS).max(dim=1, keepdim=True).values
    token_rewards_RS = rewards_R.new_zeros(loss_mask_RS.shape)
    return token_rewards_RS.scatter(1, last_R1, rewards_R[:, None])


def estimated_advantages(
    rewards_R: torch.Tensor,
    is_truncated_R: torch.Tensor,
    values_RS: torch.Tensor,
    value_after_R: torch.Tensor,
    loss_mask_RS: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    kl_penalty_RS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over each row's loss tokens: advantages and returns [R, S], not whitened.

    The reward stands on the last loss token. A row that a limit cut off goes on in thought: it is bootstrapped from the
    value of the state that it was cut in; one that the environment ended is worth 0 afterwards.

    Args:
        kl_penalty_RS: taken off each token's reward (kl_coef times k1); None = none.
    """
    token_rewards_RS = last_token_rewards(rewards_R.to(values_RS.dtype), loss_mask_RS)
    if kl_penalty_RS is not None:
        token_rewards_RS = token_rewards_RS - fill_masked(kl_penalty_RS, loss_mask_RS)
    bootstrap_R = torch.where(is_truncated_R, value_after_R, torch.zeros_like(value_after_R))
    return gae(token_rewards_RS, values_RS, loss_mask_RS, gamma=gamma, gae_lambda=gae_lambda, bootstrap_B=bootstrap_R)
