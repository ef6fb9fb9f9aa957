"""Supervised losses and entropy.

Suffixes: B rows, T tokens, N positions, V vocabulary, C positions of one chunk.
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.aggregation import aggregate
from rl_core.losses.masking import check_count, check_inputs, masked_sum

__all__ = ["entropy_bonus", "entropy_coef_at", "supervised_loss", "token_entropy"]


def supervised_loss(
    logprobs_BT: torch.Tensor, loss_mask_BT: torch.Tensor, *, num_loss_tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the completion tokens: -sum(logprobs) / num_loss_tokens.

    Args:
        logprobs_BT: float [B, T], nats, log-probability of each token, with gradient.
        loss_mask_BT: bool [B, T], True = token counts (completion only: prompt and observations are False).
        num_loss_tokens: loss tokens of the whole optimizer step, over all its micro-batches.
    Returns: scalar loss, nats per token; {"nll"}.
    Raises: DataError on shapes, non-finite log-probs, or an empty step.
    """
    check_inputs(loss_mask_BT, logprobs=logprobs_BT)
    loss = -masked_sum(logprobs_BT, loss_mask_BT) / check_count("num_loss_tokens", num_loss_tokens)
    return loss, {"nll": loss.detach()}


def entropy_bonus(
    entropy_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative mean entropy per loss token; add entropy_coef times this to a loss to raise the entropy.

    Args:
        entropy_BT: float [B, T], nats, entropy of each token's distribution, with gradient.
        loss_weights_BT: float [B, T], see `aggregation.token_weights`; None = the token mean, 1 / num_loss_tokens.
    Returns: scalar loss; {"entropy"}: mean entropy, nats per token.
    Raises: DataError on shapes, non-finite values, or an empty step.
    """
    check_inputs(loss_mask_BT, entropy=entropy_BT)
    entropy = masked_sum(entropy_BT.detach(), loss_mask_BT) / check_count("num_loss_tokens", num_loss_tokens)
    term = aggregate(entropy_BT, loss_mask_BT, num_loss_tokens=num_loss_tokens, loss_weights_BT=loss_weights_BT)
    return -term, {"entropy": entropy}


def entropy_coef_at(count: int, *, start: float, decay: float = 0.9995, floor: float = 0.0) -> float:
    """Entropy coefficient after `count` episodes: max(floor, start decay^count)."""
    if count < 0 or not 0 < decay <= 1 or not 0 <= floor <= start:
        raise DataError(f"count {count} >= 0, 0 < decay {decay} <= 1 and 0 <= floor {floor} <= start {start} must hold")
    return max(floor, start * decay**count)


def token_entropy(log_p_NV: torch.Tensor) -> torch.Tensor:
    """-sum_v p log p of log-probabilities, nats; a token of probability 0 (log p = -inf) adds 0, to gradients as well.

    Args:
        log_p_NV: float [..., V].
    Returns: float [...].
    """
    return -(log_p_NV.exp() * _finite(log_p_NV)).sum(-1)


def _finite(log_p_NV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as factors of p: 0 in place of -inf, as p log p -> 0, where the product would be NaN."""
    return log_p_NV.masked_fill(log_p_NV == float("-inf"), 0.0)
