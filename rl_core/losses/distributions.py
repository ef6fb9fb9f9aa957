"""Divergences between distributions over two vocabularies, to the student's first argument with gradient.

A row may be scaled: the distribution at the first token of a span, times the probability of the span's later tokens.
Its values are then less than a distribution's, and so is what they sum to.

Suffixes: J spans, V vocabulary of the student, W of the teacher, K tokens that both have. Log-probs in nats.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.losses.kl import NO_TOKEN
from rl_core.losses.masking import check_finite


def merge_span_logprobs(
    first_log_p_JV: torch.Tensor, later_logprobs_JL: torch.Tensor
) -> torch.Tensor:
    """Scale the distribution at each span's first token by the probabilities of its later sampled tokens.

    Args:
        later_logprobs_JL: float [J, L], of the sampled tokens after the first, 0 where a span has fewer.
    Returns: float [J, V]: exact for the sampled tokens, whose value is the probability of the span's text in these
        tokens.
    Source: TRL's GOLD trainer, "extended" ULD.
    """
    return first_log_p_JV + later_logprobs_JL.sum(1, keepdim=True)


def sorted_distance(student_log_p_JV: torch.Tensor, teacher_log_p_JW: torch.Tensor) -> torch.Tensor:
    """Compute the L1 distance of both rows of probabilities, each in descending order, the shorter padded with 0.

    With one token a span it is the Wasserstein distance of ULD at a uniform cost, which ignores the tokens' identity.
    Returns: float [J], in [0, 2] for distributions.
    Raises: DataError on shapes or NaN.
    Source: Boizard et al. 2024, arXiv:2402.12030, eq. 4.
    """
    _check_pair(student_log_p_JV, teacher_log_p_JW)
    width = max(student_log_p_JV.shape[1], teacher_log_p_JW.shape[1])
    student_JV, teacher_JV = (
        functional.pad(
            log_p_JX.exp().sort(1, descending=True).values, (0, width - log_p_JX.shape[1])
        )
        for log_p_JX in (student_log_p_JV, teacher_log_p_JW)
    )
    return (student_JV - teacher_JV).abs().sum(1)


def generalized_divergence(
    student_log_p_JK: torch.Tensor, teacher_log_p_JK: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Compute the generalised Jensen-Shannon divergence of rows that need not sum to 1.

    With D(a || b) = sum a log(a / b) - a + b, which is the KL for distributions and 0 only for equal rows:
    beta 0: D(teacher || student); beta 1: D(student || teacher); between them
    beta D(teacher || m) + (1 - beta) D(student || m), m = beta teacher + (1 - beta) student.

    TRL's GOLD leaves out - a + b, which cancels for 0 < beta < 1; without it, a student would lower the divergence at
    beta 1 by moving probability to tokens that are not compared.
    Returns: float [J], not negative.
    Raises: DataError on shapes, NaN, or beta outside [0, 1].
    Source: Agarwal et al. 2023, arXiv:2306.13649, eq. 1.
    """
    _check_pair(student_log_p_JK, teacher_log_p_JK)
    if student_log_p_JK.shape != teacher_log_p_JK.shape or not 0 <= beta <= 1:
        raise DataError(
            f"shapes {tuple(student_log_p_JK.shape)} and {tuple(teacher_log_p_JK.shape)} must be equal, and beta "
            f"{beta} in [0, 1]"
        )
    student_JK, teacher_JK = (x.clamp(min=NO_TOKEN) for x in (student_log_p_JK, teacher_log_p_JK))
    if beta == 0:
        return _sum_divergence(teacher_JK, student_JK)
    if beta == 1:
        return _sum_divergence(student_JK, teacher_JK)
    weights = torch.tensor([beta, 1 - beta], dtype=student_JK.dtype).log().tolist()
    mixture_JK = torch.logaddexp(teacher_JK + weights[0], student_JK + weights[1])
    return beta * _sum_divergence(teacher_JK, mixture_JK) + (1 - beta) * _sum_divergence(
        student_JK, mixture_JK
    )


def gold_divergence(
    student_log_p_JV: torch.Tensor,
    teacher_log_p_JW: torch.Tensor,
    student_ids_K: torch.Tensor,
    teacher_ids_K: torch.Tensor,
    *,
    beta: float,
    shared_weight: float,
) -> torch.Tensor:
    """Compute w generalised divergence on the tokens that both vocabularies have + (1 - w) sorted distance on the rest.

    Args:
        student_ids_K, teacher_ids_K: int64, the same tokens in both vocabularies.
        beta: see `generalized_divergence`. shared_weight: w in [0, 1]; with equal vocabularies, 1 gives the divergence
            over the whole vocabulary (GKD).
    Returns: float [J].
    Raises: DataError as both parts, or for a weight outside [0, 1].
    Source: TRL's GOLD trainer (General Online Logit Distillation).
    """
    if not 0 <= shared_weight <= 1:
        raise DataError(f"shared_weight: {shared_weight} must lie in [0, 1]")
    shared_J = generalized_divergence(
        student_log_p_JV.index_select(1, student_ids_K),
        teacher_log_p_JW.index_select(1, teacher_ids_K),
        beta=beta,
    )
    if shared_weight == 1:
        return shared_J
    rests = []
    for log_p_JX, ids_K in ((student_log_p_JV, student_ids_K), (teacher_log_p_JW, teacher_ids_K)):
        is_rest_X = torch.ones(log_p_JX.shape[1], dtype=torch.bool, device=log_p_JX.device)
        is_rest_X[ids_K] = False
        rests.append(log_p_JX[:, is_rest_X])
    return shared_weight * shared_J + (1 - shared_weight) * sorted_distance(rests[0], rests[1])


def _sum_divergence(left_JK: torch.Tensor, right_JK: torch.Tensor) -> torch.Tensor:
    """Compute sum a log(a / b) - a + b of logarithms, row by row."""
    left_p_JK = left_JK.exp()
    return (left_p_JK * (left_JK - right_JK) - left_p_JK + right_JK.exp()).sum(1)


def _check_pair(student_log_p_JV: torch.Tensor, teacher_log_p_JW: torch.Tensor) -> None:
    shapes = student_log_p_JV.shape, teacher_log_p_JW.shape
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][0] != shapes[1][0]:
        raise DataError(
            f"log-probs: shapes {tuple(shapes[0])} and {tuple(shapes[1])}, expected [J, V]"
        )
    floor = float("-inf")
    check_finite(
        student=student_log_p_JV.detach().masked_fill(student_log_p_JV.detach() == floor, 0.0),
        teacher=teacher_log_p_JW.detach().masked_fill(teacher_log_p_JW.detach() == floor, 0.0),
    )
