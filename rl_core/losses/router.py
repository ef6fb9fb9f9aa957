"""Load balancing of mixture-of-experts models.

Suffixes: N tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_finite

__all__ = ["load_balancing_loss"]


def load_balancing_loss(router_logits: Sequence[torch.Tensor], real_N: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """Auxiliary loss E sum_e f_e P_e over the tokens of all layers together; top_k where the load is even.

    f_e = assignments to expert e per token and layer (a count: no gradient), P_e = mean probability of expert e. Both
    are means over all real tokens given, and a product of means is no sum over micro-batches: the loss is defined for
    the tokens of one forward pass.

    Args:
        router_logits: of each layer with experts, float [N, E]; taken through a softmax here.
        real_N: bool [N], True = real token; padding is routed too, but counts nowhere.
        top_k: experts per token.
    Returns: scalar, at least float32.
    Raises: DataError on shapes, or without a real token; NonFiniteTensor.
    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, for top_k > 1 and over all layers at once as in the models
        of transformers (`load_balancing_loss_func`).
    """
    for index, logits_NE in enumerate(router_logits):
        if logits_NE.ndim != 2 or logits_NE.shape[0] != real_N.numel() or logits_NE.shape[1] < top_k:
            shape = tuple(logits_NE.shape)
            raise DataError(f"router_logits[{index}]: shape {shape}, expected [{real_N.numel()}, experts >= {top_k}]")
    if not router_logits or not bool(real_N.any()):
        raise DataError("router_logits: a load needs at least one layer with experts and one real token")
    logits_NE = torch.cat([logits_NE[real_N] for logits_NE in router_logits])
    check_finite(router_logits=logits_NE.detach())
    p_NE = torch.softmax(logits_NE, dim=-1, dtype=torch.promote_types(logits_NE.dtype, torch.float32))
    chosen_NE = torch.zeros_like(p_NE).scatter_(1, p_NE.detach().topk(top_k, dim=-1).indices, 1.0)
    return p_NE.shape[1] * (chosen_NE.mean(0) * p_NE.mean(0)).sum()
