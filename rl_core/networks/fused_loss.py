"""PPO's loss of an actor-critic and its gradient in one pass, without autograd's bookkeeping.

On networks this small an operation costs more than its arithmetic. Loss, metrics and gradients therefore come from one
sequence of operations, with derivatives written out. `NetworkUpdate` composes the same loss from `rl_core.losses` where
it must name a tensor that is not finite; a test compares the two.

Suffixes: M rows, A actions or numbers of an action; columns are M1, [M, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.losses.kl import kl_k1, kl_k3
from rl_core.losses.policy import LOG_RATIO_LIMIT
from rl_core.networks.actor_critic import (
    LOG_2PI,
    ActorCritic,
    PolicyNetwork,
    run_paired_backward,
    run_paired_forward,
)
from rl_core.networks.step_buffer import NetworkBatch


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Coefficients of one optimizer step."""

    num_rows: int  # of the whole step, the denominator
    clip_eps: float
    value_clip_eps: float | None
    value_coef: float
    entropy_coef: float


class _PrecomputedGradients(torch.autograd.Function):
    """Autograd function that hands over gradients computed with the loss."""

    @staticmethod
    def forward(
        context: Any, loss: float, gradients: list[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        context.gradients = gradients
        return torch.tensor(loss)

    @staticmethod
    def backward(context: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = context.gradients
        del context.gradients  # as the only owner, autograd stores them without a copy
        if float(factor) != 1.0:
            gradients = [gradient * factor for gradient in gradients]
        return (None, None, *gradients)


def compute_fused_loss(
    model: ActorCritic, batch: NetworkBatch, options: LossOptions
) -> tuple[torch.Tensor, dict[str, float]] | None:
    """Compute the loss of `NetworkUpdate` and its metrics; `backward` may be called once.

    Returns: None if the loss is not finite.
    """
    with torch.no_grad():
        inputs_MD = model.normalised(batch.observations_MD)
        outputs_MA, values_M1, saved = run_paired_forward(
            inputs_MD, *model.layer_weights, model.shape.activation
        )
        evaluate = _evaluate_discrete if model.shape.actions.is_discrete else _evaluate_gaussian
        logprobs_M1, entropies_M1, differentiate = evaluate(model.policy, outputs_MA, batch.actions)
        columns = {"entropy": entropies_M1} if options.entropy_coef > 0 else {}
        logprob_gradient_M1, ratio_M1 = _compute_policy_terms(
            logprobs_M1, batch, options, columns
        )
        value_gradient_M1 = _compute_value_terms(values_M1, batch, options, columns)
        sums = torch.cat(list(columns.values()), 1).sum(0).tolist()
        means = {name: total / options.num_rows for name, total in zip(columns, sums, strict=True)}
        loss = means["policy/loss"] + options.value_coef * means["value/loss"]
        if "entropy" in means:
            means["policy/entropy"] = means.pop("entropy")
            loss -= options.entropy_coef * means["policy/entropy"]
        if not math.isfinite(loss):
            return None
        outputs_gradient_MA, policy_gradients = differentiate(
            logprob_gradient_M1, options.entropy_coef / options.num_rows
        )
        policy, value = run_paired_backward(saved, (outputs_gradient_MA, value_gradient_M1))
    low, high = means["policy/clip_fraction_low"], means["policy/clip_fraction_high"]
    metrics = {**means, "policy/clip_fraction": low + high}
    metrics["policy/ratio_max"] = float(ratio_M1.max())
    parameters = [*model.layer_weights[0], *model.layer_weights[1]]
    gradients = [*policy, *value]
    if policy_gradients:
        parameters.append(model.policy.log_std_A)
        gradients += policy_gradients
    function: Any = _PrecomputedGradients  # torch's `apply` has no types
    return function.apply(loss, gradients, *parameters), metrics


def _evaluate_discrete(
    policy: PolicyNetwork, outputs_MA: torch.Tensor, actions_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Evaluate a categorical policy: log-probabilities, entropies and their derivative by the logits."""
    all_logprobs_MA = outputs_MA.log_softmax(-1)
    probabilities_MA = all_logprobs_MA.exp()
    actions_M1 = actions_M[:, None]
    entropies_M1 = -(probabilities_MA * all_logprobs_MA).sum(1, keepdim=True)

    def differentiate(
        logprob_gradient_M1: torch.Tensor, entropy_weight: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # d log p(a) / d logits = onehot(a) - p; dH / d logits = -p (log p + H)
        gradient_MA = probabilities_MA * -logprob_gradient_M1
        gradient_MA.scatter_add_(1, actions_M1, logprob_gradient_M1)
        if entropy_weight > 0:
            gradient_MA.addcmul_(
                probabilities_MA, all_logprobs_MA + entropies_M1, value=entropy_weight
            )
        return gradient_MA, []

    return all_logprobs_MA.gather(1, actions_M1), entropies_M1, differentiate


def _evaluate_gaussian(
    policy: PolicyNetwork, outputs_MA: torch.Tensor, actions_MA: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Evaluate a Gaussian policy: log-densities, entropies and their derivative by means and log deviations."""
    log_std_A = policy.log_std_A
    inverse_A = (-log_std_A).exp()
    scaled_MA = (actions_MA - outputs_MA) * inverse_A
    squares_MA = scaled_MA.square()
    logprobs_M1 = -(0.5 * squares_MA + (log_std_A + 0.5 * LOG_2PI)).sum(1, keepdim=True)
    entropy = (log_std_A + 0.5 * (1 + LOG_2PI)).sum()

    def differentiate(
        logprob_gradient_M1: torch.Tensor, entropy_weight: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        # with z = (a - m) / s: d log p / d m = z / s, d log p / d log s = z^2 - 1, dH / d log s = 1
        gradient_A = (squares_MA - 1.0).mul_(logprob_gradient_M1).sum(0)
        gradient_A -= entropy_weight * len(outputs_MA)
        return scaled_MA * logprob_gradient_M1 * inverse_A, [gradient_A]

    return logprobs_M1, entropy.expand(len(outputs_MA), 1), differentiate


def _compute_policy_terms(
    logprobs_M1: torch.Tensor,
    batch: NetworkBatch,
    options: LossOptions,
    columns: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the terms of `rl_core.losses.policy.clipped_policy_loss`; return dL / d log-probability, and the ratio."""
    low, high = 1 - options.clip_eps, 1 + options.clip_eps
    costs_M1 = -batch.advantages_M1
    log_ratio_M1 = logprobs_M1 - batch.old_logprobs_M1
    ratio_M1 = log_ratio_M1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()
    unclipped_M1 = ratio_M1 * costs_M1
    columns["policy/loss"] = torch.maximum(unclipped_M1, ratio_M1.clamp(low, high) * costs_M1)
    # The clip zeroes the gradient where it makes the loss larger.
    is_low_M1 = (ratio_M1 < low) & (costs_M1 > 0)
    is_high_M1 = (ratio_M1 > high) & (costs_M1 < 0)
    columns["policy/clip_fraction_low"], columns["policy/clip_fraction_high"] = is_low_M1, is_high_M1
    columns["policy/ratio_mean"] = ratio_M1
    columns["policy/update_kl"] = kl_k3(batch.old_logprobs_M1, logprobs_M1)
    columns["policy/update_kl_k1"] = kl_k1(batch.old_logprobs_M1, logprobs_M1)
    is_constant_M1 = is_low_M1 | is_high_M1 | (log_ratio_M1.abs() > LOG_RATIO_LIMIT)
    gradient_M1 = unclipped_M1.masked_fill_(is_constant_M1, 0.0).div_(options.num_rows)
    return gradient_M1, ratio_M1


def _compute_value_terms(
    values_M1: torch.Tensor,
    batch: NetworkBatch,
    options: LossOptions,
    columns: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Add the terms of `rl_core.losses.value.value_loss`; return dL / d value."""
    errors_M1 = values_M1 - batch.targets_M1
    squares_M1 = errors_M1.square()
    columns["value/loss"] = 0.5 * squares_M1
    columns["value/clip_fraction"] = torch.zeros_like(squares_M1)
    if options.value_clip_eps is not None:
        moved_M1 = values_M1 - batch.values_M1
        limit = options.value_clip_eps
        bounded_errors_M1 = batch.values_M1 + moved_M1.clamp(-limit, limit) - batch.targets_M1
        bounded_squares_M1 = bounded_errors_M1.square()
        is_clipped_M1 = bounded_squares_M1 > squares_M1
        columns["value/loss"] = 0.5 * torch.maximum(squares_M1, bounded_squares_M1)
        columns["value/clip_fraction"] = is_clipped_M1
        errors_M1 = errors_M1.masked_fill(is_clipped_M1 & (moved_M1.abs() > limit), 0.0)
    return errors_M1 * (options.value_coef / options.num_rows)
