"""Forward KL from a recorded part of the old distribution: its most likely tokens and the mass of all others.

Suffixes: N positions, K recorded tokens.
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_finite

__all__ = ["recorded_forward_kl"]

_LEAST_MASS = 1e-12  # of the new policy's rest: a finite price for having none


def recorded_forward_kl(
    old_logprobs_NK: torch.Tensor, old_rest_N: torch.Tensor, new_logprobs_NK: torch.Tensor
) -> torch.Tensor:
    """sum_k p_k log(p_k / q_k) + P log(P / Q), P and Q the masses of the tokens that were not recorded.

    A lower bound of KL(old || new) over the vocabulary, by the data-processing inequality: taking many tokens for one
    never adds to a divergence. It is the exact value where everything was recorded, or where p / q is the same for all
    tokens of the rest.

    Args:
        old_logprobs_NK: float [N, K], nats, of the recorded tokens. old_rest_N: float [N], 1 - sum of their
            probabilities; rounding may take it a little below 0.
        new_logprobs_NK: float [N, K], nats, of the same tokens under the new policy, with gradient.
    Returns: float [N] in at least float32, with gradient to the new policy. At least 0 up to rounding.
    Raises: DataError if shapes differ or a value is not finite.
    Source: Cover and Thomas 2006, Elements of Information Theory, section 2.8 and theorem 2.7.1 (log-sum inequality).
    """
    if new_logprobs_NK.shape != old_logprobs_NK.shape or old_rest_N.shape != old_logprobs_NK.shape[:1]:
        raise DataError(
            f"recorded KL: shapes old {tuple(old_logprobs_NK.shape)}, rest {tuple(old_rest_N.shape)}, "
            f"new {tuple(new_logprobs_NK.shape)}"
        )
    check_finite(old_logprobs=old_logprobs_NK, old_rest=old_rest_N, new_logprobs=new_logprobs_NK.detach())
    dtype = torch.promote_types(new_logprobs_NK.dtype, torch.float32)
    old_NK, new_NK, rest_N = old_logprobs_NK.to(dtype), new_logprobs_NK.to(dtype), old_rest_N.to(dtype).clamp(min=0.0)
    named_N = (old_NK.exp() * (old_NK - new_NK)).sum(-1)
    # log(1 - sum q): expm1 keeps the digits where the recorded tokens have nearly all of the mass
    new_log_rest_N = torch.log((-torch.expm1(torch.logsumexp(new_NK, -1))).clamp(min=_LEAST_MASS))
    unnamed_N = torch.xlogy(rest_N, rest_N) - rest_N * new_log_rest_N
    return named_N + torch.where(rest_N > 0, unnamed_N, torch.zeros_like(unnamed_N))
