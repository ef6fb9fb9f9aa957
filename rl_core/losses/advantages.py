"""Advantage estimation: group-relative, by reward component, batch-normalised, by role, and GAE over token sequences.

Suffixes: P prompts, G rollouts per prompt, K reward components, B rows, T tokens, N loss tokens of a row packed to the
left (of `role_advantages`: rollouts in the order in which their rewards are taken), C of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_finite, check_inputs, fill_masked

GroupMethod = Literal["grpo", "dr_grpo", "rloo"]
STD_FLOOR = 1e-3  # smaller differences between rewards are rounding noise
STD_EPS = 1e-4
SCAN_CHUNK = 128


def fill_masked_rewards(
    groups: Sequence[torch.Tensor], masked: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Replace the reward of each masked rollout by the mean of the unmasked rollouts of its group.

    A group without an unmasked rollout gets the mean of all unmasked ones. For the record only
    (`RewardOrchestrator.score`): advantages, baselines and denominators leave masked rollouts out.

    Args:
        groups: float [G] rewards of each group; ignored where masked.
        masked: bool [G] of each group, True = no reward could be computed.
    Returns: float [G] of each group.
    """
    if not any(bool(masked_G.any()) for masked_G in masked):
        return list(groups)
    known = [
        torch.where(masked_G, 0.0, rewards_G)
        for rewards_G, masked_G in zip(groups, masked, strict=True)
    ]
    counts = [int((~masked_G).sum()) for masked_G in masked]
    overall = torch.cat(known).sum() / max(1, sum(counts))
    return [
        torch.where(masked_G, known_G.sum() / count if count else overall, rewards_G)
        for rewards_G, masked_G, known_G, count in zip(groups, masked, known, counts, strict=True)
    ]


def group_advantages(rewards_PG: torch.Tensor, *, method: GroupMethod = "grpo") -> torch.Tensor:
    """Compute group-relative advantages over the rollouts of each prompt.

    grpo:    (r - mean) / (std + 1e-4), unbiased std over the group; 0 for the whole group when std < 1e-3.
    dr_grpo: r - mean.
    rloo:    r - mean of the others = (r - mean) G / (G - 1).
    A group of one has no baseline: its advantage is 0 (other libraries return the raw reward or divide by 0).

    Args:
        rewards_PG: float [P, G].
    Returns: float [P, G]; every row sums to 0.
    Raises: DataError on shape, dtype, non-finite rewards, or an unknown method.
    Source: arXiv:2402.03300 section 4.1; arXiv:2503.20783; arXiv:2402.14740 eq. 6.
    """
    _check_rewards(rewards_PG)
    if method not in ("grpo", "dr_grpo", "rloo"):
        raise DataError(f"method: '{method}' must be grpo, dr_grpo or rloo")
    size = rewards_PG.shape[1]
    if size == 1:
        return torch.zeros_like(rewards_PG)
    centered_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if method == "dr_grpo":
        return centered_PG
    if method == "rloo":
        return centered_PG * (size / (size - 1))
    std_P1 = rewards_PG.std(1, keepdim=True)
    return torch.where(
        std_P1 < STD_FLOOR, torch.zeros_like(centered_PG), centered_PG / (std_P1 + STD_EPS)
    )


def maxrl_advantages(rewards_PG: torch.Tensor, *, order: int | None = None) -> torch.Tensor:
    """Compute MaxRL advantages, A = (r - mean) / mean over the rollouts of each prompt.

    With rewards 0 and 1 and p the probability of success, the policy gradient with these advantages is unbiased for
    that of -sum_{k=1..T} (1 - p)^k / k, the expansion of log p up to order T. Here T = G - 1: the mean includes the
    rollout itself, and a group without a success gives 0. A smaller `order` T is the mean over all subsets of T + 1
    rollouts, A = (r - mean) G ((1 - q) / K - q / (G - K)) with K successes and q the share of subsets without one:
    order 1 is rloo.

    A mean below max(r) / G, which takes negative rewards, is replaced by it; a group without a positive reward gives 0.

    Args:
        rewards_PG: float [P, G], at least 0; with `order` 0 or 1.
        order: T, at least 1; None, or G - 1 and above: (r - mean) / mean.
    Returns: float [P, G]; every row sums to 0.
    Raises: DataError as `group_advantages`, for an order below 1, or for other rewards than 0 and 1 with an order.
    Source: Tajwar et al. 2026, arXiv:2602.02710. The order of the estimator, and the mean over subsets, are derived
        here and checked by enumeration in `tests/rl_core/losses/test_maxrl_and_gdpo.py`.
    """
    _check_rewards(rewards_PG)
    if order is not None and order < 1:
        raise DataError(f"order: {order} must be at least 1")
    size = rewards_PG.shape[1]
    mean_P1 = rewards_PG.mean(1, keepdim=True)
    centered_PG = rewards_PG - mean_P1
    if order is not None and not bool(((rewards_PG == 0) | (rewards_PG == 1)).all()):
        raise DataError(
            "rewards: an order of the expansion counts successes, so each reward must be 0 or 1"
        )
    if order is None or order >= size - 1:
        best_P1 = rewards_PG.amax(1, keepdim=True)
        scale_P1 = torch.maximum(mean_P1, best_P1 / size)
        has_success_P1 = best_P1 > 0
        advantages_PG = centered_PG / torch.where(has_success_P1, scale_P1, 1.0)
        return torch.where(has_success_P1, advantages_PG, torch.zeros_like(centered_PG))
    factors = [_compute_maxrl_factor(size, successes, order) for successes in range(size + 1)]
    counts_P = rewards_PG.sum(1).round().long()
    factors_P = torch.tensor(factors, dtype=rewards_PG.dtype, device=rewards_PG.device)[counts_P]
    return centered_PG * factors_P[:, None]


def _compute_maxrl_factor(size: int, successes: int, order: int) -> float:
    """Compute G ((1 - q) / K - q / (G - K)), q = C(G - K, T + 1) / C(G, T + 1); 0 if all rewards are equal."""
    failures = size - successes
    if not successes or not failures:
        return 0.0
    share_without = math.comb(failures, order + 1) / math.comb(size, order + 1)
    return size * ((1 - share_without) / successes - share_without / failures)


def decoupled_advantages(rewards_GK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Compute sum_k w_k grpo(r_k) of one group: each reward component is normalised on its own, then weighed.

    A component that is constant in the group contributes 0, however large. GDPO divides the result by its standard
    deviation over the batch: apply `batch_advantages` to all groups together.

    Args:
        rewards_GK: float [G, K], the components before their weights.
        weights_K: float [K], of either sign.
    Returns: float [G]; sums to 0; all 0 for a group of one.
    Raises: DataError on shapes or non-finite values.
    Source: Liu et al. 2026, GDPO, arXiv:2601.05242.
    """
    if rewards_GK.ndim != 2 or weights_K.shape != rewards_GK.shape[1:]:
        raise DataError(
            f"rewards: shape {tuple(rewards_GK.shape)} with weights {tuple(weights_K.shape)}, expected [G, K] and [K]"
        )
    check_finite(weights=weights_K)
    if not weights_K.numel():
        return rewards_GK.new_zeros(len(rewards_GK))
    return weights_K @ group_advantages(rewards_GK.T)


def batch_advantages(
    rewards_PG: torch.Tensor, *, subtract_group_mean: bool = False
) -> torch.Tensor:
    """Normalise rewards over the global batch, as REINFORCE++ does: (r - mean) / (std + 1e-4), unbiased std.

    Args:
        rewards_PG: float [P, G] (G may be 1); the global batch.
        subtract_group_mean: REINFORCE++-baseline: each prompt's group mean is subtracted first.
    Returns: float [P, G]; all 0 if the batch's std is below 1e-3 or it has one member.
    Source: arXiv:2501.03262, section 3.
    """
    _check_rewards(rewards_PG)
    if rewards_PG.numel() < 2:
        return torch.zeros_like(rewards_PG)
    if subtract_group_mean:
        rewards_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    std = rewards_PG.std()
    centered_PG = rewards_PG - rewards_PG.mean()
    return torch.where(
        std < STD_FLOOR, torch.zeros_like(centered_PG), centered_PG / (std + STD_EPS)
    )


def role_advantages(
    rewards_N: torch.Tensor,
    roles: Sequence[str],
    baselines: Mapping[str, float],
    *,
    decay: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute A = R - b_role, then b_role = decay b_role + (1 - decay) R, one rollout after the other.

    The baseline is read before the rollout's own reward enters it, so it does not depend on the rollout's actions and
    leaves the gradient unbiased. A role without a baseline starts at 0, the sum of a zero-sum game's values.

    Args:
        rewards_N: float [N].
        roles: [N], the game and the player of each rollout.
        baselines: of the roles so far.
        decay: 0 <= decay < 1.
    Returns: float64 [N] advantages; the new baselines.
    Raises: DataError on shape, non-finite rewards, or a decay out of range.
    Source: Liu et al. 2025, SPIRAL, arXiv:2506.24119 (role-conditioned advantage estimation).
    """
    if rewards_N.ndim != 1 or len(roles) != len(rewards_N):
        raise DataError(
            f"roles: {len(roles)} for rewards of shape {tuple(rewards_N.shape)}; one each is needed"
        )
    if not bool(torch.isfinite(rewards_N).all()):
        raise DataError("rewards: one is not finite")
    if not 0 <= decay < 1:
        raise DataError(f"decay: {decay} must be at least 0 and below 1")
    current = dict(baselines)
    advantages = []
    for reward, role in zip(rewards_N.double().tolist(), roles, strict=True):
        baseline = current.get(role, 0.0)
        advantages.append(reward - baseline)
        current[role] = decay * baseline + (1 - decay) * reward
    return torch.tensor(advantages, dtype=torch.float64), current


def gae(
    token_rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalised advantage estimates over loss tokens, skipping the observation tokens between them.

    delta = r + gamma V' - V; A = delta + gamma lambda A'; returns = A + V, where V' and A' belong to the next loss
    token: masked tokens neither discount nor decay.

    Args:
        token_rewards_BT: float [B, T]; 0 wherever the mask is False.
        values_BT: float [B, T], value before each token; anything where the mask is False.
        loss_mask_BT: bool [B, T], True = the policy chose this token.
        bootstrap_B: float [B], V' of the last loss token: 0 for an episode that terminated (None = all), the value of
            the state after it for one that was truncated.
    Returns: advantages, returns; float [B, T], 0 where the mask is False, no gradient.
    Raises: DataError on shapes, non-finite input, a reward on a masked token (it would be lost), or
        factors outside [0, 1].
    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.
    """
    bootstrap_B = _check_trace_inputs(
        token_rewards_BT, values_BT, loss_mask_BT, gamma, gae_lambda, bootstrap_B
    )
    with torch.no_grad():
        # With the loss tokens packed to the left the recurrence has one constant coefficient.
        packed = _PackedTokens(loss_mask_BT)
        values_BN, rewards_BN = packed.pack_tokens(values_BT), packed.pack_tokens(token_rewards_BT)
        deltas_BN = rewards_BN + gamma * packed.shift_to_next(values_BN, bootstrap_B) - values_BN
        deltas_BN = fill_masked(deltas_BN, packed.mask_BN)
        advantages_BT = packed.unpack_tokens(
            _compute_discounted_sums(deltas_BN, gamma * gae_lambda)
        )
        return advantages_BT, fill_masked(advantages_BT + values_BT, loss_mask_BT)


def vtrace(
    token_rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    ratios_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    trace_lambda: float = 1.0,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
    bootstrap_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute V-trace advantages and value targets from samples of another policy; on policy it equals `gae`.

    rho = min(rho_cap, ratio), c = lambda min(c_cap, ratio), delta = rho (r + gamma V' - V), targets v = V + e with
    e = delta + gamma c e'; advantage rho (r + gamma (V' + lambda e') - V). V' and e' belong to the next loss token:
    masked tokens carry them across. With lambda 1 the advantage is rho (r + gamma v' - V), as published.

    Args:
        ratios_BT: float [B, T], pi / mu of each token, see `importance.importance_ratios`; not below 0.
        trace_lambda: in [0, 1].
        rho_cap, c_cap: 0 < c_cap <= 1, and rho_cap at least c_cap. A trace above 1 would grow with every token.
        others: as in `gae`.
    Returns: advantages (with rho), targets of the critic; float [B, T], 0 where the mask is False, no gradient.
    Raises: DataError as `gae`, and for negative ratios or such caps.
    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1, section 4.2 and remark 2 (lambda). V' + lambda e' of the
        advantage mixes v' and V' as the trace does, so that ratio 1 gives GAE.
    """
    bootstrap_B = _check_trace_inputs(
        token_rewards_BT, values_BT, loss_mask_BT, gamma, trace_lambda, bootstrap_B
    )
    check_inputs(loss_mask_BT, ratios=ratios_BT)
    if not 0 < c_cap <= min(1.0, rho_cap):
        raise DataError(f"c_cap: {c_cap} must be above 0, at most 1, and at most rho_cap {rho_cap}")
    with torch.no_grad():
        packed = _PackedTokens(loss_mask_BT)
        values_BN, rewards_BN = packed.pack_tokens(values_BT), packed.pack_tokens(token_rewards_BT)
        ratios_BN = packed.pack_tokens(ratios_BT)
        if bool((ratios_BN < 0).any()):
            raise DataError(f"ratios: {float(ratios_BN.min())} is below 0")
        rho_BN = ratios_BN.clamp(max=rho_cap)
        traces_BN = gamma * trace_lambda * ratios_BN.clamp(max=c_cap)
        deltas_BN = rewards_BN + gamma * packed.shift_to_next(values_BN, bootstrap_B) - values_BN
        errors_BN = _compute_traced_sums(fill_masked(rho_BN * deltas_BN, packed.mask_BN), traces_BN)
        after_BN = packed.shift_to_next(errors_BN, torch.zeros_like(bootstrap_B))
        advantages_BT = packed.unpack_tokens(rho_BN * (deltas_BN + gamma * trace_lambda * after_BN))
        return advantages_BT, fill_masked(packed.unpack_tokens(errors_BN) + values_BT, loss_mask_BT)


def returns(
    token_rewards_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    bootstrap_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the discounted return from each loss token on; masked tokens do not discount.

    Args, Raises: as `gae`.
    Returns: float [B, T], 0 where the mask is False.
    """
    zeros_BT = torch.zeros_like(token_rewards_BT)
    return gae(
        token_rewards_BT,
        zeros_BT,
        loss_mask_BT,
        gamma=gamma,
        gae_lambda=1.0,
        bootstrap_B=bootstrap_B,
    )[0]


def distillation_advantages(
    student_logprobs_BT: torch.Tensor,
    teacher_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    gamma: float = 0.0,
) -> torch.Tensor:
    """Compute on-policy distillation advantages from the reward log p_teacher - log p_student of each sampled token.

    The mean of this reward over the student's samples is minus the reverse KL, KL(student || teacher), of the position.
    With gamma 0 the advantage is the reward itself: the policy gradient is that of the KL at each position and ignores
    the effect on later positions. With gamma 1 it is that of the whole sequence's KL.

    Args:
        student_logprobs_BT, teacher_logprobs_BT: float [B, T], nats, at the same temperature.
        gamma: discount of later tokens' rewards, in [0, 1].
    Returns: float [B, T], 0 where the mask is False, no gradient.
    Raises: DataError on shapes, non-finite values, or gamma.
    Source: Agarwal et al. 2023, arXiv:2306.13649, section 3 (reverse KL, on-policy data); Gu et al. 2023,
        arXiv:2306.08543, eq. 2 and 3 (gamma 1).
    """
    check_inputs(
        loss_mask_BT, student_logprobs=student_logprobs_BT, teacher_logprobs=teacher_logprobs_BT
    )
    rewards_BT = fill_masked((teacher_logprobs_BT - student_logprobs_BT).detach(), loss_mask_BT)
    return returns(rewards_BT, loss_mask_BT, gamma=gamma)


def aligned_distillation_advantages(
    student_logprobs_BT: torch.Tensor,
    teacher_logprobs_BU: torch.Tensor,
    student_spans_BT: torch.Tensor,
    teacher_spans_BU: torch.Tensor,
    *,
    gamma: float = 0.0,
) -> torch.Tensor:
    """Compute on-policy distillation advantages from a teacher with other tokens, over spans of the same text.

    The reward of span j is R_j = sum of log p_teacher over its tokens there - sum of log p_student over its tokens
    here; every token of the student in the span has the advantage A = sum_{i >= j} gamma^(i - j) R_i over spans. With
    spans of one token on both sides these are `distillation_advantages`, bit for bit.

    Args:
        student_logprobs_BT, teacher_logprobs_BU: float [B, T] and [B, U], nats, at the same temperature.
        student_spans_BT, teacher_spans_BU: int64, the span of each token, ascending in a row, below T; -1 = no loss.
        gamma: discount of later spans' rewards, in [0, 1].
    Returns: float [B, T], 0 where the span is -1, no gradient.
    Raises: DataError on shapes, non-finite values, gamma, or a span that only one side has.
    """
    mask_BT, mask_BU = student_spans_BT >= 0, teacher_spans_BU >= 0
    check_inputs(mask_BT, student_logprobs=student_logprobs_BT)
    check_inputs(mask_BU, teacher_logprobs=teacher_logprobs_BU)
    if len(mask_BT) != len(mask_BU):
        raise DataError(
            f"teacher_logprobs: {len(mask_BU)} rows, student_logprobs has {len(mask_BT)}"
        )
    if bool((torch.cat([student_spans_BT, teacher_spans_BU], 1) >= mask_BT.shape[1]).any()):
        raise DataError("spans: a row has at most as many as the student has tokens")

    def sum_by_span(values_BN: torch.Tensor, spans_BN: torch.Tensor) -> torch.Tensor:
        sums_BJ = torch.zeros_like(student_logprobs_BT, dtype=values_BN.dtype)
        filled_BN = fill_masked(values_BN.detach(), spans_BN >= 0)
        return sums_BJ.scatter_add(1, spans_BN.clamp(min=0), filled_BN)

    counts_BJ, teacher_counts_BJ = (
        sum_by_span(torch.ones_like(spans_BN, dtype=torch.float32), spans_BN)
        for spans_BN in (student_spans_BT, teacher_spans_BU)
    )
    counted_BJ = counts_BJ > 0
    if not torch.equal(counted_BJ, teacher_counts_BJ > 0):
        raise DataError("spans: student and teacher must have tokens in the same ones")
    rewards_BJ = sum_by_span(teacher_logprobs_BU, teacher_spans_BU) - sum_by_span(
        student_logprobs_BT, student_spans_BT
    )
    advantages_BJ = returns(rewards_BJ, counted_BJ, gamma=gamma)
    return fill_masked(advantages_BJ.gather(1, student_spans_BT.clamp(min=0)), mask_BT)


def overlong_penalty(lengths_B: torch.Tensor, *, max_tokens: int, buffer: int) -> torch.Tensor:
    """Compute DAPO's soft overlong penalty: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens.

    -min(excess, buffer) / buffer, excess = max(0, length - (max_tokens - buffer)).
    Args:
        lengths_B: [B], completion tokens.
    Returns: float32 [B] in [-1, 0], to be added to the reward.
    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    if not 0 < buffer <= max_tokens:
        raise DataError(f"buffer: {buffer} must be above 0 and at most max_tokens {max_tokens}")
    excess_B = (lengths_B.float() - (max_tokens - buffer)).clamp(0, buffer)
    return -excess_B / buffer


def _compute_discounted_sums(values_BN: torch.Tensor, factor: float) -> torch.Tensor:
    """Compute y_t = x_t + factor y_{t+1} along axis 1, in chunks from the right, one small matrix product per chunk.

    Within a chunk y = x W, W[j, i] = factor^(j - i) for j >= i; the chunk to its right adds factor^(C - i) y_next.
    """
    size = values_BN.shape[1]
    chunk = min(SCAN_CHUNK, max(size, 1))
    steps_C = torch.arange(chunk, device=values_BN.device)
    distance_CC = steps_C[:, None] - steps_C[None, :]
    base = torch.tensor(factor, dtype=values_BN.dtype, device=values_BN.device)
    weights_CC = torch.where(distance_CC >= 0, base ** distance_CC.clamp(min=0), base.new_zeros(()))
    sums_BN = torch.empty_like(values_BN)
    carry_B1 = values_BN.new_zeros(values_BN.shape[0], 1)
    for stop in range(size, 0, -chunk):
        start = max(0, stop - chunk)
        length = stop - start
        part_BC = values_BN[:, start:stop] @ weights_CC[:length, :length]
        part_BC = part_BC + carry_B1 * base ** (length - steps_C[:length])
        sums_BN[:, start:stop] = part_BC
        carry_B1 = part_BC[:, :1]
    return sums_BN


def _compute_traced_sums(values_BN: torch.Tensor, factors_BN: torch.Tensor) -> torch.Tensor:
    """Compute y_t = x_t + f_t y_{t+1} along axis 1 for factors of at most 1, in log2(N) passes over doubling windows.

    Source: Hillis and Steele 1986, "Data parallel algorithms".
    """
    sums_BN, products_BN = values_BN.clone(), factors_BN.clone()
    shift = 1
    while shift < values_BN.shape[1]:
        sums_BN[:, :-shift] = sums_BN[:, :-shift] + products_BN[:, :-shift] * sums_BN[:, shift:]
        products_BN[:, :-shift] = products_BN[:, :-shift] * products_BN[:, shift:]
        shift *= 2
    return sums_BN


class _PackedTokens:
    """The loss tokens of each row packed to the left in their order, [B, N], and back; 0 after the last one."""

    def __init__(self, loss_mask_BT: torch.Tensor) -> None:
        self.loss_mask_BT = loss_mask_BT
        self.order_BN = torch.argsort(~loss_mask_BT, dim=1, stable=True)
        self.mask_BN = loss_mask_BT.gather(1, self.order_BN)
        later_BN = torch.cat(
            [self.mask_BN[:, 1:], self.mask_BN.new_zeros(len(loss_mask_BT), 1)], dim=1
        )
        self.last_BN = self.mask_BN & ~later_BN

    def pack_tokens(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Move the loss tokens of [B, T] to the left, [B, N]."""
        return fill_masked(values_BT, self.loss_mask_BT).gather(1, self.order_BN)

    def unpack_tokens(self, values_BN: torch.Tensor) -> torch.Tensor:
        """Move packed tokens [B, N] back to their places in [B, T]."""
        return torch.zeros_like(values_BN).scatter(
            1, self.order_BN, fill_masked(values_BN, self.mask_BN)
        )

    def shift_to_next(self, values_BN: torch.Tensor, bootstrap_B: torch.Tensor) -> torch.Tensor:
        """Return the value of the next loss token for each token; the bootstrap for the last one."""
        shifted_BN = torch.cat([values_BN[:, 1:], values_BN.new_zeros(len(values_BN), 1)], dim=1)
        return torch.where(self.last_BN, bootstrap_B[:, None].to(values_BN.dtype), shifted_BN)


def _check_trace_inputs(
    token_rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    gamma: float,
    trace_lambda: float,
    bootstrap_B: torch.Tensor | None,
) -> torch.Tensor:
    """Check the inputs of `gae` and `vtrace`.

    Returns: bootstrap values [B], zeros for None.
    Raises: DataError.
    """
    if loss_mask_BT.ndim != 2:
        raise DataError(f"loss_mask: shape {tuple(loss_mask_BT.shape)}, expected [B, T]")
    if not 0 <= gamma <= 1 or not 0 <= trace_lambda <= 1:
        raise DataError(f"gamma {gamma} and lambda {trace_lambda} must lie in [0, 1]")
    check_inputs(loss_mask_BT, token_rewards=token_rewards_BT, values=values_BT)
    if bool((token_rewards_BT * ~loss_mask_BT).any()):
        raise DataError(
            "token_rewards: non-zero at a masked token; put the reward on the last loss token before it"
        )
    rows = loss_mask_BT.shape[0]
    if bootstrap_B is None:
        return values_BT.new_zeros(rows)
    if bootstrap_B.shape != (rows,):
        raise DataError(f"bootstrap: shape {tuple(bootstrap_B.shape)}, expected ({rows},)")
    check_finite(bootstrap=bootstrap_B)
    return bootstrap_B


def _check_rewards(rewards_PG: torch.Tensor) -> None:
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 1:
        raise DataError(f"rewards: shape {tuple(rewards_PG.shape)}, expected [P, G]")
    if not rewards_PG.is_floating_point():
        raise DataError(f"rewards: dtype {rewards_PG.dtype}, expected a floating-point type")
    check_finite(rewards=rewards_PG)
