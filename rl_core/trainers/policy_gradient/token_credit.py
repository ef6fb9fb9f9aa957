"""Credit within a rollout: advantages of the tokens of its turns or steps, and rewards at the ends of its steps.

Suffixes: R rows of the iteration, S whole sequence, G rollouts per prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from rl_core.losses.process_rewards import (
    divide_into_step_rewards,
    process_advantages,
    spread_over_tokens,
)
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_gradient.advantages import select_group_method
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.turn_credit import TurnComparison, estimate_token_advantages


def divide_among_turns(
    samples: Sequence[TrainingSample],
    rows: Sequence[Sequence[int]],
    advantages: Sequence[torch.Tensor],
    settings: PolicySettings,
    penalty_RS: torch.Tensor | None,
) -> dict[str, float]:
    """Set the advantages of the tokens of these groups by turn; return the metrics of the comparison.

    Args:
        samples: of all rows. rows: of each group. advantages: [G] of each group.
        penalty_RS: subtracted from the reward of the turn of each token; None = none.
    """
    credit = settings.turn_credit
    assert credit is not None
    penalty_RS = None if penalty_RS is None else penalty_RS.double().cpu()
    comparison = TurnComparison()
    for group_rows, advantages_G in zip(rows, advantages, strict=True):
        group = [samples[row] for row in group_rows]
        penalties = None
        if penalty_RS is not None:
            penalties = [penalty_RS[row, len(samples[row].row.prompt_ids) :] for row in group_rows]
        by_token = estimate_token_advantages(
            advantages_G,
            [sample.turns for sample in group],
            [len(sample.row.completion_ids) for sample in group],
            credit,
            select_group_method(settings.algorithm),
            penalties,
            comparison,
        )
        for sample, token_advantages in zip(group, by_token, strict=True):
            sample.token_advantages = token_advantages
    return comparison.compute_metrics()


def divide_among_steps(
    samples: Sequence[TrainingSample],
    rows: Sequence[Sequence[int]],
    advantages: Sequence[torch.Tensor],
    settings: PolicySettings,
) -> dict[str, float]:
    """Set the advantages of the tokens of these groups: the rollout's plus the weighted one of the token's step.

    Args: as `divide_among_turns`; `advantages` are without the process reward.
    """
    aggregate = settings.reward_options.process.aggregate
    method = select_group_method(settings.algorithm)
    step_advantages: list[float] = []
    for group_rows, advantages_G in zip(rows, advantages, strict=True):
        scored = [samples[row] for row in group_rows if samples[row].steps]
        compared = process_advantages(
            [
                torch.tensor([score for _, score in sample.steps], dtype=torch.float64)
                for sample in scored
            ],
            aggregate=aggregate,
            method=method,
        )
        by_sample = {
            id(sample): values_N.tolist() for sample, values_N in zip(scored, compared, strict=True)
        }
        for row, advantage in zip(group_rows, advantages_G.tolist(), strict=True):
            sample = samples[row]
            values = by_sample.get(id(sample), [])
            step_advantages += values
            length = len(sample.row.completion_ids)
            ends = [end for end, _ in sample.steps]
            sample.token_advantages = [
                advantage + sample.step_weight * value
                for value in spread_over_tokens(values, ends, length)
            ]
    if not step_advantages:
        return {}
    return {"train/process_advantages_std": statistics.pstdev(step_advantages)}


def place_step_rewards(
    samples: Sequence[TrainingSample], mask_RS: torch.Tensor, settings: PolicySettings
) -> torch.Tensor:
    """Place the weighted rewards of steps at their last tokens, 0 elsewhere: float32 [R, S] on the host.

    A row's rewards sum to its process reward. One at a token without loss moves to the last loss token before it, else
    to the first one.

    Args:
        mask_RS: bool, True = token counts in the loss; on the host.
    """
    rewards_RS = torch.zeros(mask_RS.shape)
    for row, sample in enumerate(samples):
        positions = mask_RS[row].nonzero().flatten().tolist()
        if not sample.steps or not positions:
            continue
        scores_N = torch.tensor([score for _, score in sample.steps], dtype=torch.float64)
        rewards_N = sample.step_weight * divide_into_step_rewards(
            scores_N, settings.reward_options.process.aggregate
        )
        start = len(sample.row.prompt_ids)
        for (end, _), reward in zip(sample.steps, rewards_N.tolist(), strict=True):
            before = [position for position in positions if position <= start + end]
            rewards_RS[row, before[-1] if before else positions[0]] += reward
    return rewards_RS
