"""Process rewards: from scores of a completion's steps to token rewards and advantages. Pure functions.

N steps of one completion, M steps of all completions of a group, T tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import GroupMethod, group_advantages
from rl_core.losses.masking import check_finite

StepAggregate = Literal["sum", "mean", "min"]


def aggregate_steps(scores_N: torch.Tensor, aggregate: StepAggregate) -> torch.Tensor:
    """Compute the value of a completion from the scores of its steps: their sum, mean or minimum.

    A sum grows with the number of steps, so a policy can raise it by writing more of them; a mean and a minimum do not.

    Args:
        scores_N: float [N], N at least 1.
    Raises: DataError for no step, a score that is not finite, or an unknown aggregate.
    """
    _check_steps(scores_N, aggregate)
    if aggregate == "sum":
        return scores_N.sum()
    return scores_N.mean() if aggregate == "mean" else scores_N.min()


def divide_into_step_rewards(scores_N: torch.Tensor, aggregate: StepAggregate) -> torch.Tensor:
    """Divide the value of a completion into rewards of its steps, which sum to `aggregate_steps`.

    sum: r_n; mean: r_n / N; min: m_n - m_(n-1) with the running minimum m_n = min(r_1, ..., r_n) and m_0 = 0, so that
    a step is charged for what it lowers the minimum by.
    Returns: float [N].
    Raises: as `aggregate_steps`.
    """
    _check_steps(scores_N, aggregate)
    if aggregate == "sum":
        return scores_N.clone()
    if aggregate == "mean":
        return scores_N / len(scores_N)
    lowest_N = torch.cummin(scores_N, 0).values
    return torch.cat([lowest_N[:1], lowest_N[1:] - lowest_N[:-1]])


def process_advantages(
    scores: Sequence[torch.Tensor],
    *,
    aggregate: StepAggregate = "mean",
    method: GroupMethod = "grpo",
) -> list[torch.Tensor]:
    """Compute the advantage of each step of the completions of one group, which is that of its tokens.

    All M scores of the group are compared with each other, r~ = (r - mean) / std as in grpo (dr_grpo: r - mean; rloo:
    that times M / (M - 1)). A step's advantage is the sum of its own and the following r~ of its completion (process
    supervision of DeepSeekMath), or their mean, or their minimum (the min-form credit of PURE).

    Args:
        scores: float [N] of each completion, N at least 1; completions may differ in N.
    Returns: [N] for each completion.
    Raises: DataError for a completion without a step, a score that is not finite, an unknown aggregate or method.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.3; Cheng et al. 2025, arXiv:2504.15275 (min).
    """
    for scores_N in scores:
        _check_steps(scores_N, aggregate)
    if not scores:
        return []
    compared_M = group_advantages(torch.cat(list(scores))[None], method=method)[0]
    advantages = []
    for values_N in compared_M.split([len(scores_N) for scores_N in scores]):
        backwards_N = values_N.flip(0)
        if aggregate == "min":
            following_N = torch.cummin(backwards_N, 0).values
        else:
            following_N = backwards_N.cumsum(0)
            if aggregate == "mean":
                following_N = following_N / torch.arange(
                    1, len(values_N) + 1, dtype=values_N.dtype, device=values_N.device
                )
        advantages.append(following_N.flip(0))
    return advantages


def spread_over_tokens(values: Sequence[float], ends: Sequence[int], length: int) -> list[float]:
    """Return the value of each token's step, [T]: tokens up to and including a step's end, after the one before.

    Tokens after the last step have 0. Where steps end at one token, it has the value of the first of them.
    Args:
        ends: index of the last token of each step, not descending, below `length`.
    Raises: DataError for another number of values, or ends out of order.
    """
    if len(values) != len(ends):
        raise DataError(f"values: {len(values)} for {len(ends)} steps")
    tokens = [0.0] * length
    start = 0
    for value, end in zip(values, ends, strict=True):
        if not start - 1 <= end < length:
            raise DataError(f"ends: {list(ends)} must not descend and be below {length}")
        tokens[start : end + 1] = [value] * (end + 1 - start)
        start = end + 1
    return tokens


def step_score_loss(
    scores_N: torch.Tensor, labels_N: torch.Tensor, *, num_steps: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the cross-entropy of step labels: L = -sum_n y_n log s(z_n) + (1 - y_n) log s(-z_n), s the sigmoid.

    Args:
        scores_N: float [N], logits z at the ends of steps, with gradient.
        labels_N: float [N] in [0, 1], 1 = right; a fraction is the share of right continuations.
        num_steps: of the whole optimizer step.
    Returns: the sum over `num_steps`; {"accuracy", "reward_mean" (mean s)}, sums over `num_steps` as well. A step is
        judged right if z > 0, and a label of at least 0.5 says so.
    Raises: DataError on shapes, non-finite scores, labels outside [0, 1], or no steps.
    Source: Lightman et al. 2023, arXiv:2305.20050; Wang et al. 2024, Math-Shepherd, arXiv:2312.08935, eq. 2.
    """
    if scores_N.ndim != 1 or labels_N.shape != scores_N.shape or not num_steps > 0:
        raise DataError(
            f"scores {tuple(scores_N.shape)}, labels {tuple(labels_N.shape)}: expected [N]; {num_steps} steps"
        )
    check_finite(scores=scores_N)
    if bool(((labels_N < 0) | (labels_N > 1)).any()):
        raise DataError("labels: each must be from 0 to 1")
    labels_N = labels_N.to(scores_N.dtype)
    losses_N = torch.nn.functional.binary_cross_entropy_with_logits(
        scores_N, labels_N, reduction="none"
    )
    is_right_N = (scores_N.detach() > 0) == (labels_N >= 0.5)
    return losses_N.sum() / num_steps, {
        "accuracy": is_right_N.to(scores_N.dtype).sum() / num_steps,
        "reward_mean": scores_N.detach().sigmoid().sum() / num_steps,
    }


def _check_steps(scores_N: torch.Tensor, aggregate: str) -> None:
    if aggregate not in ("sum", "mean", "min"):
        raise DataError(f"aggregate: '{aggregate}' must be sum, mean or min")
    if scores_N.ndim != 1 or not len(scores_N):
        raise DataError(
            f"scores: shape {tuple(scores_N.shape)}, expected [N] with at least one step"
        )
    check_finite(scores=scores_N)
