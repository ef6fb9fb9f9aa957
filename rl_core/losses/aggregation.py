"""Aggregation of per-token losses to the loss of an optimizer step.

Suffixes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count, fill_masked, masked_sum

LossAggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    loss_mask_BT: torch.Tensor,
    *,
    aggregation: LossAggregation,
    denominator: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the weight of each token's loss in the optimizer step, the same for policy, KL and entropy terms.

    token_mean: 1 / N, N loss tokens of the step. sequence_mean: 1 / (S n), S sequences of the step with a loss token,
    n loss tokens of the token's row. constant: 1 / D, whatever the lengths.

    Args:
        loss_mask_BT: bool [B, T], True = token counts; a row is one whole sequence.
        denominator: of the whole optimizer step, all its micro-batches and processes: N, S or D.
    Returns: float [B, T], 0 where the mask is False. Weights of all micro-batches of a step sum to 1 (constant: N / D).
    Raises: DataError for another shape or name, or an empty step.
    Source: DAPO, arXiv:2503.14476, section 3.3 (token mean against sequence mean); Dr. GRPO, arXiv:2503.20783, section
        3.2 (constant).
    """
    if loss_mask_BT.ndim != 2 or loss_mask_BT.dtype != torch.bool:
        raise DataError(
            f"loss_mask: {loss_mask_BT.dtype} {tuple(loss_mask_BT.shape)}, expected torch.bool [B, T]"
        )
    if aggregation not in ("token_mean", "sequence_mean", "constant"):
        raise DataError(
            f"aggregation: '{aggregation}' must be token_mean, sequence_mean or constant"
        )
    weights_BT = loss_mask_BT.to(dtype) / check_count("denominator", denominator)
    if aggregation == "sequence_mean":
        weights_BT = weights_BT / loss_mask_BT.sum(1, keepdim=True).clamp(min=1)
    return weights_BT


def aggregate(
    losses_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    loss_weights_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scalar sum of masked losses times `loss_weights_BT`; without weights, the sum divided by
    num_loss_tokens.
    """
    if loss_weights_BT is None:
        return masked_sum(losses_BT, loss_mask_BT) / check_count("num_loss_tokens", num_loss_tokens)
    if loss_weights_BT.shape != loss_mask_BT.shape:
        raise DataError(
            f"loss_weights: shape {tuple(loss_weights_BT.shape)}, loss_mask has {tuple(loss_mask_BT.shape)}"
        )
    return (fill_masked(losses_BT, loss_mask_BT) * loss_weights_BT).sum()
