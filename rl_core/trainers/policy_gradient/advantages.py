"""Advantage estimation per algorithm: group-relative, batch-normalised, or GAE with a critic.

Suffixes: P prompts, G rollouts per prompt, R rows of an iteration, S whole sequence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from rl_core.distributed import ProcessGroup
from rl_core.environments.environment import warn_once
from rl_core.errors import DataError
from rl_core.losses.advantages import (
    GroupMethod,
    batch_advantages,
    decoupled_advantages,
    gae,
    group_advantages,
    maxrl_advantages,
    role_advantages,
    vtrace,
)
from rl_core.losses.masking import fill_masked
from rl_core.settings import Algorithm, PolicySettings, RoleBaselineSettings
from rl_core.trainers.policy_gradient.custom_functions import CustomAdvantages
from rl_core.trainers.policy_gradient.samples import TrainingSample

logger = logging.getLogger(__name__)

# Group baseline of each algorithm without a critic; algorithms that share one differ only in the loss.
_GROUP_METHODS: dict[str, GroupMethod] = {
    "grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "sapo": "grpo",
    "dppo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
}

# From this share of successes on, equal rewards mean that the prompts are learned, not that rewards fail.
LEARNED_SUCCESS_RATE = 0.9
_HARDER_PROMPTS_ADVICE = (
    "These prompts are learned: continue with harder ones (levels, a curriculum), or end the stage earlier "
    "(iterations; eval_every with patience)"
)
_REWARD_CHECK_ADVICE = (
    "Check the reward function on a completion; start with easier prompts, SFT, a reward with partial credit, or a "
    "larger group_size"
)


def select_group_method(algorithm: Algorithm) -> GroupMethod:
    """Return the baseline and scale of an algorithm that compares groups.

    Raises: DataError for another algorithm.
    """
    if algorithm not in _GROUP_METHODS:
        raise DataError(f"algorithm: '{algorithm}' compares no groups")
    return _GROUP_METHODS[algorithm]


def compute_relative_advantages(
    groups: Sequence[torch.Tensor],
    algorithm: Algorithm,
    *,
    components: Sequence[Sequence[Mapping[str, tuple[float, float]]]] | None = None,
    maxrl_order: int | None = None,
) -> list[torch.Tensor]:
    """Compute the advantage of each rollout, shared by its tokens: relative to its group, for `reinforce` to the
    batch, for `gdpo` to both.

    Args:
        groups: float [G] rewards of each group; groups may differ in size.
        components: of each rollout, value and weight by name, for `gdpo`; None = the reward is the only one.
        maxrl_order: see `losses.advantages.maxrl_advantages`.
    Returns: float [G] for each group.
    Raises: DataError for an algorithm that needs values, or an empty group.
    """
    if algorithm not in ("reinforce", "maxrl", "gdpo") and algorithm not in _GROUP_METHODS:
        raise DataError(f"algorithm: '{algorithm}' has no advantages without a critic")
    if not groups:
        return []
    sizes = [len(rewards_G) for rewards_G in groups]
    if algorithm == "gdpo":
        summed = [
            _sum_decoupled_advantages(rewards_G, components[index] if components else ())
            for index, rewards_G in enumerate(groups)
        ]
        return list(batch_advantages(torch.cat(summed)[None])[0].split(sizes))
    if algorithm == "maxrl":
        _warn_about_negative_rewards(groups)
        return [maxrl_advantages(rewards_G[None], order=maxrl_order)[0] for rewards_G in groups]
    if algorithm == "reinforce":
        return list(batch_advantages(torch.cat(list(groups))[None])[0].split(sizes))
    advantages: list[torch.Tensor] = list(groups)
    for size in dict.fromkeys(sizes):  # groups of one size in one tensor
        members = [index for index, other in enumerate(sizes) if other == size]
        rewards_PG = torch.stack([groups[index] for index in members])
        advantages_PG = group_advantages(rewards_PG, method=_GROUP_METHODS[algorithm])
        for index, advantages_G in zip(members, advantages_PG, strict=True):
            advantages[index] = advantages_G
    return advantages


def _sum_decoupled_advantages(
    rewards_G: torch.Tensor, components: Sequence[Mapping[str, tuple[float, float]]]
) -> torch.Tensor:
    """Compute the weighted sum of the components' advantages in a group; the reward is one component if none is known.

    A component that some rollouts of the group lack counts 0 there.
    """
    weights = {name: weight for parts in components for name, (_, weight) in parts.items()}
    if not weights:
        return decoupled_advantages(rewards_G[:, None], rewards_G.new_ones(1))
    rewards_GK = rewards_G.new_tensor(
        [[parts.get(name, (0.0, 0.0))[0] for name in weights] for parts in components]
    )
    return decoupled_advantages(rewards_GK, rewards_G.new_tensor(list(weights.values())))


def _warn_about_negative_rewards(groups: Sequence[torch.Tensor]) -> None:
    """Warn, once in this process, if a reward is no probability of success."""
    if any(bool((rewards_G < 0).any()) for rewards_G in groups):
        warn_once(
            "algorithm: maxrl takes a reward as the probability of success, and some are negative; their groups are "
            "scaled by the best reward / group size instead of the mean. Use rewards from 0 to 1, or grpo"
        )


class RoleBaselines:
    """Running means of the rewards of each role, over all iterations; a learned state of the trainer."""

    def __init__(
        self,
        settings: RoleBaselineSettings,
        algorithm: Algorithm,
        maxrl_order: int | None = None,
    ) -> None:
        """Start with a mean of 0 for every role."""
        self.settings, self.algorithm = settings, algorithm
        self.maxrl_order = maxrl_order
        self.values: dict[str, float] = {}

    def estimate_advantages(
        self, groups: Sequence[torch.Tensor], roles: Sequence[Sequence[str]]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Compute advantages [G] of each group, and update the means.

        A = (1 - w) (R - b_role) + w A_algorithm, w = `group_weight`.
        Args:
            roles: [G] of each group.
        Returns: float64 advantages; the mean of each role as a metric.
        """
        sizes = [len(rewards_G) for rewards_G in groups]
        names = [role for group in roles for role in group]
        advantages_N, self.values = role_advantages(
            torch.cat(list(groups)), names, self.values, decay=self.settings.decay
        )
        advantages = list(advantages_N.split(sizes))
        weight = self.settings.group_weight
        if weight:
            compared = compute_relative_advantages(
                groups, self.algorithm, maxrl_order=self.maxrl_order
            )
            advantages = [
                (1 - weight) * by_role_G + weight * by_group_G
                for by_role_G, by_group_G in zip(advantages, compared, strict=True)
            ]
        metrics = {
            f"train/role_baseline/{role}": self.values[role] for role in dict.fromkeys(names)
        }
        return advantages, metrics


def compare_rewards(
    settings: PolicySettings,
    rewards_R: torch.Tensor,
    groups: Sequence[Sequence[TrainingSample]],
    rows: Sequence[Sequence[int]],
    estimator: CustomAdvantages | None,
    role_baselines: RoleBaselines | None,
    process_group: ProcessGroup,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Compute advantages [G] of groups of samples, by role, the user's estimator, or the algorithm; and metrics.

    Args:
        rewards_R: float [R], without the KL penalty, of all rows of the iteration.
        rows: of each sample.
    """
    rewards = [rewards_R[list(group_rows)] for group_rows in rows]
    if role_baselines is not None:
        roles = [[sample.role for sample in group] for group in groups]
        return role_baselines.estimate_advantages(rewards, roles)
    if estimator is None:
        advantages = compute_relative_advantages(
            rewards,
            settings.algorithm,
            components=[[sample.components for sample in group] for group in groups],
            maxrl_order=settings.maxrl_order,
        )
        return advantages, {}
    samples = [sample for group in groups for sample in group]
    lengths = [sum(sample.row.loss_mask) for sample in samples]
    components = _collect_contributions(samples) if estimator.takes_components else None
    # On one process for all: a user's function may return different numbers in another call.
    advantages, metrics = process_group.run_on_rank_zero(
        lambda: estimator(rewards, lengths, components)
    )
    return advantages, {f"train/advantages/{name}": value for name, value in metrics.items()}


def _collect_contributions(samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    """Return value times weight of each reward component, float64 [R]; 0 where a sample lacks it."""
    names = dict.fromkeys(name for sample in samples for name in sample.components)
    return {
        name: torch.tensor(
            [math.prod(sample.components.get(name, (0.0,))) for sample in samples],
            dtype=torch.float64,
        )
        for name in names
    }


def build_role_baselines(settings: PolicySettings) -> RoleBaselines | None:
    """Build the running means that the settings ask for; None = the algorithm compares rewards itself."""
    if settings.role_baseline is None:
        return None
    return RoleBaselines(settings.role_baseline, settings.algorithm, settings.maxrl_order)


def scatter_rewards_to_last_token(
    rewards_R: torch.Tensor, loss_mask_RS: torch.Tensor
) -> torch.Tensor:
    """Place each row's reward on its last loss token, 0 elsewhere: [R, S].

    Raises: DataError for a row without loss tokens, whose reward would be lost.
    """
    if not bool(loss_mask_RS.any(1).all()):
        raise DataError("loss_mask: a row has no loss token to carry its reward")
    positions_S = torch.arange(loss_mask_RS.shape[1], device=loss_mask_RS.device)
    last_R1 = (positions_S * loss_mask_RS).max(dim=1, keepdim=True).values
    token_rewards_RS = rewards_R.new_zeros(loss_mask_RS.shape)
    return token_rewards_RS.scatter(1, last_R1, rewards_R[:, None])


def compute_value_advantages(
    rewards_R: torch.Tensor,
    is_truncated_R: torch.Tensor,
    values_RS: torch.Tensor,
    value_after_R: torch.Tensor,
    loss_mask_RS: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    kl_penalty_RS: torch.Tensor | None = None,
    step_rewards_RS: torch.Tensor | None = None,
    ratios_RS: torch.Tensor | None = None,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute unwhitened advantages and the critic's targets [R, S], by GAE over each row's loss tokens or by V-trace.
    The reward is placed on the last loss token. A truncated row is bootstrapped from the value of its last state; the
    value after a terminal state is 0. A row without a loss token has neither.

    Args:
        kl_penalty_RS: subtracted from each token's reward (kl_coef times k1); None = none.
        step_rewards_RS: the part of `rewards_R` that is earned at the ends of steps, 0 elsewhere and without loss; what
            it does not hold is placed on the last loss token. None = all of it.
        ratios_RS: policy over sampler, for V-trace with `rho_cap` and `c_cap`; None = GAE.
    """
    rewards_R = rewards_R.to(values_RS.dtype)
    if step_rewards_RS is not None:
        rewards_R = rewards_R - step_rewards_RS.sum(1)
    has_loss_R = loss_mask_RS.any(1)
    token_rewards_RS = rewards_R.new_zeros(loss_mask_RS.shape)
    token_rewards_RS[has_loss_R] = scatter_rewards_to_last_token(
        rewards_R[has_loss_R], loss_mask_RS[has_loss_R]
    )
    if step_rewards_RS is not None:
        token_rewards_RS = token_rewards_RS + step_rewards_RS
    if kl_penalty_RS is not None:
        token_rewards_RS = token_rewards_RS - fill_masked(kl_penalty_RS, loss_mask_RS)
    bootstrap_R = torch.where(is_truncated_R, value_after_R, torch.zeros_like(value_after_R))
    if ratios_RS is not None:
        return vtrace(
            token_rewards_RS,
            values_RS,
            ratios_RS,
            loss_mask_RS,
            gamma=gamma,
            trace_lambda=gae_lambda,
            rho_cap=rho_cap,
            c_cap=c_cap,
            bootstrap_B=bootstrap_R,
        )
    return gae(
        token_rewards_RS,
        values_RS,
        loss_mask_RS,
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_B=bootstrap_R,
    )


def compute_advantage_metrics(
    samples: Sequence[TrainingSample],
    advantages_RS: torch.Tensor,
    mask_RS: torch.Tensor,
    *,
    filter_threshold: float,
) -> dict[str, float]:
    """Return mean, standard deviation and share of zeros of the advantages, and the share filtered out.

    Computed over rollouts if rewards were compared (before whitening), over loss tokens if values were used or turns
    compared; without masked rollouts. Returns {} if all are masked.
    """
    known = [sample for sample in samples if not sample.is_masked]
    if not known:
        return {}
    compared = [sample.advantage for sample in known if sample.advantage is not None]
    if compared and all(sample.token_advantages is None for sample in known):
        advantages = torch.tensor(compared, dtype=torch.float64)
        filtered = float((advantages.abs() < filter_threshold).double().mean())
    else:
        advantages = advantages_RS[mask_RS].double()
        tokens = sum(sum(sample.row.loss_mask) for sample in known)
        filtered = 1 - advantages.numel() / tokens if tokens else 0.0
    if not advantages.numel():
        return {"train/filtering_rate": filtered}
    return {
        "train/advantages_mean": float(advantages.mean()),
        "train/advantages_std": float(advantages.std(correction=0)),
        "train/zero_advantage_rate": float((advantages == 0).double().mean()),
        "train/filtering_rate": filtered,
    }


class LearningSignalMonitor:
    """A single warning after many iterations without any advantage different from 0, in which nothing is learned.

    It warns again only after an iteration that had a signal. The count is not checkpointed, as it decides nothing.
    """

    def __init__(self, iterations: int = 10) -> None:
        """Warn after this many `iterations` in a row without a signal."""
        self._max_iterations_without_signal = iterations
        self._iterations_without_signal = 0

    def observe_iteration(self, metrics: Mapping[str, float], rewards: Sequence[float]) -> None:
        """Count one iteration whose rollouts had these rewards, and warn when the limit is reached.

        Args:
            metrics: those of `compute_advantage_metrics`, and `train/success_rate` if the environment reports success.
        """
        if metrics.get("train/zero_advantage_rate", 1.0) < 1:  # absent: every group was dropped
            self._iterations_without_signal = 0
            return
        self._iterations_without_signal += 1
        if self._iterations_without_signal != self._max_iterations_without_signal:
            return
        lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
        success_rate = metrics.get("train/success_rate", 0.0)
        advice = _REWARD_CHECK_ADVICE
        if success_rate >= LEARNED_SUCCESS_RATE:
            cause, advice = f"{success_rate:.0%} of the episodes succeed", _HARDER_PROMPTS_ADVICE
        elif lowest == highest:
            cause = f"every rollout has the reward {lowest:g}"
        else:
            cause = f"rewards lie between {lowest:g} and {highest:g}, but are the same for all rollouts of a prompt"
        logger.warning(
            "no advantage differed from 0 in the last %d iterations, so nothing is learned: in the last one %s. %s",
            self._max_iterations_without_signal,
            cause,
            advice,
        )
