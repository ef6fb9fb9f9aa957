"""Value loss and explained variance.

Suffixes: B rows, T tokens.
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count, check_inputs, fill_masked, masked_sum


def value_loss(
    values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    old_values_BT: torch.Tensor | None = None,
    value_clip_eps: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the squared error of the critic, optionally clipped around the old values.

    L = 1/2 max((v - R)^2, (v_old + clip(v - v_old, +-value_clip_eps) - R)^2) / num_loss_tokens, summed over tokens.

    Args:
        values_BT: float [B, T], with gradient.
        returns_BT: float [B, T], advantages + values before any whitening.
        old_values_BT: float [B, T], values at rollout time; required with value_clip_eps.
    Returns: scalar loss; {"loss", "clip_fraction" (tokens whose gradient the clip zeroes)}.
    Raises: DataError on shapes, non-finite values, an empty step, or a clip without old values.
    Source: Schulman et al. 2017, arXiv:1707.06347; clipping as in its reference implementation.
    """
    check_inputs(loss_mask_BT, values=values_BT, returns=returns_BT, old_values=old_values_BT)
    count = check_count("num_loss_tokens", num_loss_tokens)
    values_BT = fill_masked(values_BT, loss_mask_BT)
    returns_BT = fill_masked(returns_BT.detach(), loss_mask_BT)
    errors_BT = (values_BT - returns_BT).square()
    clipped = errors_BT.new_zeros(())
    if value_clip_eps is not None:
        if old_values_BT is None or value_clip_eps <= 0:
            raise DataError(
                f"value_clip_eps: {value_clip_eps} must be above 0 and needs old_values"
            )
        old_BT = fill_masked(old_values_BT.detach(), loss_mask_BT)
        bounded_BT = old_BT + (values_BT - old_BT).clamp(-value_clip_eps, value_clip_eps)
        bounded_errors_BT = (bounded_BT - returns_BT).square()
        clipped = masked_sum(bounded_errors_BT > errors_BT, loss_mask_BT)
        errors_BT = torch.maximum(errors_BT, bounded_errors_BT)
    loss = 0.5 * masked_sum(errors_BT, loss_mask_BT) / count
    return loss, {"loss": loss.detach(), "clip_fraction": clipped / count}


def explained_variance(
    values_BT: torch.Tensor, returns_BT: torch.Tensor, loss_mask_BT: torch.Tensor
) -> float:
    """Compute 1 - Var(R - V) / max(Var R, 1e-8) over the loss tokens of a step: 1 = perfect, 0 = no better than the
    mean.

    Raises: DataError on shapes, non-finite values, or an empty mask.
    """
    check_inputs(loss_mask_BT, values=values_BT, returns=returns_BT)
    check_count("loss_mask", int(loss_mask_BT.sum()))
    returns_N = returns_BT.detach()[loss_mask_BT].double()
    residuals_N = returns_N - values_BT.detach()[loss_mask_BT].double()
    return float(1 - residuals_N.var(correction=0) / returns_N.var(correction=0).clamp(min=1e-8))
