"""Supervised loss, entropy, and load balancing of mixture-of-experts models.

Suffixes: B rows, T tokens, N positions (tokens in the load balancing), V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_core.errors import DataError
from rl_core.losses.aggregation import aggregate
from rl_core.losses.host_reads import check_condition
from rl_core.losses.masking import check_count, check_finite, check_inputs, masked_sum


def supervised_loss(
    logprobs_BT: torch.Tensor, loss_mask_BT: torch.Tensor, *, num_loss_tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of the completion tokens: -sum(logprobs) / num_loss_tokens.

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
    """Compute the negative mean entropy per loss token; add entropy_coef times this to a loss to raise the entropy.

    Args:
        entropy_BT: float [B, T], nats, entropy of each token's distribution, with gradient.
        loss_weights_BT: float [B, T], see `aggregation.token_weights`; None = the token mean, 1 / num_loss_tokens.
    Returns: scalar loss; {"entropy"}: mean entropy, nats per token.
    Raises: DataError on shapes, non-finite values, or an empty step.
    """
    check_inputs(loss_mask_BT, entropy=entropy_BT)
    count = check_count("num_loss_tokens", num_loss_tokens)
    entropy = masked_sum(entropy_BT.detach(), loss_mask_BT) / count
    term = aggregate(
        entropy_BT, loss_mask_BT, num_loss_tokens=num_loss_tokens, loss_weights_BT=loss_weights_BT
    )
    return -term, {"entropy": entropy}


def entropy_coef_at(
    count: int, *, start: float, decay: float = 0.9995, floor: float = 0.0
) -> float:
    """Return the entropy coefficient after `count` episodes: max(floor, start decay^count)."""
    if count < 0 or not 0 < decay <= 1 or not 0 <= floor <= start:
        raise DataError(
            f"count {count} >= 0, 0 < decay {decay} <= 1 and 0 <= floor {floor} <= start {start} must hold"
        )
    return max(floor, start * decay**count)


def token_entropy(log_p_NV: torch.Tensor) -> torch.Tensor:
    """Compute -sum_v p log p, in nats.

    A token of probability 0 (log p = -inf) contributes 0, to the gradient as well.

    Args:
        log_p_NV: float [..., V].
    Returns: float [...].
    """
    return -(log_p_NV.exp() * _zero_infinite_logprobs(log_p_NV)).sum(-1)


def _zero_infinite_logprobs(log_p_NV: torch.Tensor) -> torch.Tensor:
    """Replace -inf by 0, so that the product p log p, which tends to 0, is not NaN."""
    return log_p_NV.masked_fill(log_p_NV == float("-inf"), 0.0)


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor], real_N: torch.Tensor, *, top_k: int
) -> torch.Tensor:
    """Compute the auxiliary loss E sum_e f_e P_e over the tokens of all layers; it equals top_k at an even load.

    f_e = assignments to expert e per token and layer (a count: no gradient), P_e = mean probability of expert e. Both
    are means over all real tokens. As a product of means is not a sum over micro-batches, the loss is defined for the
    tokens of one forward pass.

    Args:
        router_logits: of each layer with experts, float [N, E]; taken through a softmax here.
        real_N: bool [N], True = real token; padding is routed too, but counts nowhere.
        top_k: experts per token.
    Returns: scalar, at least float32.
    Raises: DataError on shapes, or without a real token; NonFiniteTensor.
    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, for top_k > 1 and over all layers at once as in the models
        of transformers (`load_balancing_loss_func`).
    """
    num_tokens = real_N.numel()
    for index, logits_NE in enumerate(router_logits):
        shape = tuple(logits_NE.shape)
        if len(shape) != 2 or shape[0] != num_tokens or shape[1] < top_k:
            raise DataError(
                f"router_logits[{index}]: shape {shape}, expected [{num_tokens}, experts >= {top_k}]"
            )
    empty = DataError(
        "router_logits: load balancing needs at least one layer with experts and one real token"
    )
    if not router_logits:
        raise empty
    check_condition(real_N.any(), lambda: empty)
    positions_N = real_N.nonzero().squeeze(1)
    logits_NE = torch.cat([logits_NE.index_select(0, positions_N) for logits_NE in router_logits])
    check_finite(router_logits=logits_NE.detach())
    dtype = torch.promote_types(logits_NE.dtype, torch.float32)
    p_NE = torch.softmax(logits_NE, dim=-1, dtype=dtype)
    top_indices = p_NE.detach().topk(top_k, dim=-1).indices
    assigned_NE = torch.zeros_like(p_NE).scatter_(1, top_indices, 1.0)
    return p_NE.shape[1] * (assigned_NE.mean(0) * p_NE.mean(0)).sum()
