"""PPO's loss of an actor-critic and its gradient in one pass, with the derivatives written out.

On networks this small an operation costs more than its arithmetic, and numpy's element-wise operations cost at most a
third of torch's. Products are torch's, which obey its number of threads; numpy's would start threads of their own.
`NetworkUpdate` composes the same loss from `rl_core.losses` where it must name a tensor that is not finite; a test
compares the two.

Suffixes: M rows, D numbers of an observation, H width of a hidden layer, A actions or numbers of an action; columns are
M1, [M, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.losses.kl import K3_LIMIT
from rl_core.losses.policy import LOG_RATIO_LIMIT
from rl_core.networks.actor_critic import LOG_2PI, ActorCritic
from rl_core.networks.step_buffer import BATCH_FIELDS, NetworkBatch


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Coefficients of one optimizer step."""

    num_rows: int  # of the whole step, the denominator
    clip_eps: float
    value_clip_eps: float | None
    value_coef: float
    entropy_coef: float


class NetworkArrays:
    """The weights of an actor-critic without autograd; valid while weights change in place only."""

    def __init__(self, model: ActorCritic) -> None:
        self.activation = model.shape.activation
        self.is_discrete = model.shape.actions.is_discrete
        policy, value = model.layer_weights
        self.parameters: list[torch.Tensor] = [*policy, *value]
        self.policy = [weight.detach() for weight in policy]
        self.value = [weight.detach() for weight in value]
        self.log_std_A = np.zeros(0, np.float32)
        if not self.is_discrete:
            self.parameters.append(model.policy.log_std_A)
            self.log_std_A = model.policy.log_std_A.detach().numpy()

    def draw_actions(self, inputs_BD: torch.Tensor, noise_BA: np.ndarray) -> np.ndarray:
        """Sample actions for normalised observations, as `ActorCritic.act` does."""
        outputs_BA = run_layers(inputs_BD, self.policy, self.activation)[0]
        if self.is_discrete:
            return np.argmax(outputs_BA + noise_BA, -1)
        return outputs_BA + np.exp(self.log_std_A) * noise_BA


class FusedLoss:
    """A loss whose gradients are known: the part of a scalar tensor that an optimizer step uses."""

    def __init__(
        self, value: float, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        self._value = value
        self._parameters = parameters
        self._gradients = gradients

    def backward(self) -> None:
        """Add the gradients to those of the parameters."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def detach(self) -> torch.Tensor:
        """Return the loss as a scalar tensor."""
        return torch.tensor(self._value)


def run_layers(
    inputs_MD: torch.Tensor, weights: Sequence[torch.Tensor], activation: str
) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Compute one network's outputs, [M, outputs], and the inputs of each of its layers."""
    states = [inputs_MD]
    for index in range(0, len(weights) - 2, 2):
        state_MH = torch.addmm(weights[index + 1], states[-1], weights[index].t())
        array_MH = state_MH.numpy()
        if activation == "tanh":
            np.tanh(array_MH, out=array_MH)
        else:
            np.maximum(array_MH, 0.0, out=array_MH)
        states.append(state_MH)
    outputs = torch.addmm(weights[-1], states[-1], weights[-2].t())
    return outputs.numpy(), states


def differentiate_layers(
    outputs_gradient: np.ndarray,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    activation: str,
) -> list[torch.Tensor]:
    """Compute the gradients of one network's weights and offsets from that of its outputs, [M, outputs]."""
    gradients: list[torch.Tensor] = []
    gradient = torch.from_numpy(outputs_gradient)
    ones_M = gradient.new_ones(len(gradient))
    for layer in range(len(states) - 1, -1, -1):
        transposed = gradient.t()
        gradients[:0] = [transposed.mm(states[layer]), transposed.mv(ones_M)]
        if not layer:
            break
        gradient = gradient.mm(weights[2 * layer])
        array, state = gradient.numpy(), states[layer].numpy()
        array *= (1.0 - state * state) if activation == "tanh" else (state > 0)
    return gradients


def compute_fused_loss(
    arrays: NetworkArrays, batch: NetworkBatch, options: LossOptions
) -> tuple[FusedLoss, dict[str, float]] | None:
    """Compute the loss of `NetworkUpdate` and its metrics.

    Args:
        batch: with normalised observations.
    Returns: None if the loss is not finite.
    """
    inputs_MD, *others = (getattr(batch, name) for name in BATCH_FIELDS)
    actions, old_M1, advantages_M1, targets_M1, values_M1 = (other.numpy() for other in others)
    outputs_MA, policy_states = run_layers(inputs_MD, arrays.policy, arrays.activation)
    predicted_M1, value_states = run_layers(inputs_MD, arrays.value, arrays.activation)
    scores: _CategoricalScores | _GaussianScores
    if arrays.is_discrete:
        scores = _CategoricalScores(outputs_MA, actions)
    else:
        scores = _GaussianScores(outputs_MA, actions, arrays.log_std_A)
    columns: dict[str, np.ndarray] = {}
    with np.errstate(all="ignore"):  # what is not finite is found in the sum
        gradient_M1 = _add_policy_terms(columns, scores.logprobs_M1, old_M1, advantages_M1, options)
        value_gradient_M1 = _add_value_terms(columns, predicted_M1, targets_M1, values_M1, options)
        entropy_weight = options.entropy_coef / options.num_rows
        if options.entropy_coef > 0:
            columns["policy/entropy"] = scores.compute_entropies()
        sums = np.add.reduce(np.concatenate(list(columns.values()), 1), 0).tolist()
    metrics = {name: total / options.num_rows for name, total in zip(columns, sums, strict=True)}
    loss = metrics["policy/loss"] + options.value_coef * metrics["value/loss"]
    if options.entropy_coef > 0:
        loss -= options.entropy_coef * metrics["policy/entropy"]
    if not math.isfinite(loss):
        return None
    low, high = metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]
    metrics["policy/clip_fraction"] = low + high
    metrics["policy/ratio_max"] = float(columns["policy/ratio_mean"].max())
    outputs_gradient_MA, extra = scores.differentiate(gradient_M1, entropy_weight)
    gradients = differentiate_layers(
        outputs_gradient_MA, policy_states, arrays.policy, arrays.activation
    )
    gradients += differentiate_layers(
        value_gradient_M1, value_states, arrays.value, arrays.activation
    )
    gradients += [torch.from_numpy(gradient) for gradient in extra]
    return FusedLoss(loss, arrays.parameters, gradients), metrics


class _CategoricalScores:
    """Log-probabilities and entropies of a categorical policy, and their derivatives by the logits."""

    def __init__(self, logits_MA: np.ndarray, actions_M: np.ndarray) -> None:
        shifted_MA = logits_MA - logits_MA.max(1, keepdims=True)
        exponentials_MA = np.exp(shifted_MA)
        sums_M1 = exponentials_MA.sum(1, keepdims=True)
        self._logprobs_MA = shifted_MA - np.log(sums_M1)
        self._probabilities_MA = exponentials_MA / sums_M1
        self._positions = (np.arange(len(actions_M)), actions_M)
        self.logprobs_M1 = self._logprobs_MA[self._positions][:, None]

    def compute_entropies(self) -> np.ndarray:
        """Compute entropies [M, 1]."""
        return -(self._probabilities_MA * self._logprobs_MA).sum(1, keepdims=True)

    def differentiate(
        self, gradient_M1: np.ndarray, entropy_weight: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return dL / d logits, from dL / d log p of the actions and the weight of the entropies' sum."""
        # d log p(a) / d logits = onehot(a) - p; dH / d logits = -p (log p + H)
        gradient_MA = self._probabilities_MA * -gradient_M1
        gradient_MA[self._positions] += gradient_M1[:, 0]
        if entropy_weight > 0:
            surprise_MA = self._logprobs_MA + self.compute_entropies()
            gradient_MA += entropy_weight * self._probabilities_MA * surprise_MA
        return gradient_MA, []


class _GaussianScores:
    """Log-densities and entropies of a Gaussian policy, and their derivatives by means and log deviations."""

    def __init__(self, means_MA: np.ndarray, actions_MA: np.ndarray, log_std_A: np.ndarray) -> None:
        self._log_std_A, self._inverse_A = log_std_A, np.exp(-log_std_A)
        self._scaled_MA = (actions_MA - means_MA) * self._inverse_A
        self._squares_MA = self._scaled_MA * self._scaled_MA
        constants_A = log_std_A + np.float32(0.5 * LOG_2PI)
        self.logprobs_M1 = -(0.5 * self._squares_MA + constants_A).sum(1, keepdims=True)

    def compute_entropies(self) -> np.ndarray:
        """Compute entropies [M, 1]."""
        entropy = (self._log_std_A + np.float32(0.5 * (1 + LOG_2PI))).sum()
        return np.full_like(self.logprobs_M1, entropy)

    def differentiate(
        self, gradient_M1: np.ndarray, entropy_weight: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return dL / d means and [dL / d log deviations]; arguments as of the categorical policy."""
        # with z = (a - m) / s: d log p / d m = z / s, d log p / d log s = z^2 - 1, dH / d log s = 1
        gradient_A = ((self._squares_MA - 1.0) * gradient_M1).sum(0)
        gradient_A -= np.float32(entropy_weight * len(gradient_M1))
        return self._scaled_MA * gradient_M1 * self._inverse_A, [gradient_A]


def _add_policy_terms(
    columns: dict[str, np.ndarray],
    logprobs_M1: np.ndarray,
    old_logprobs_M1: np.ndarray,
    advantages_M1: np.ndarray,
    options: LossOptions,
) -> np.ndarray:
    """Add the terms of `rl_core.losses.policy.clipped_policy_loss`; return dL / d log-probability."""
    low, high = 1 - options.clip_eps, 1 + options.clip_eps
    difference_M1 = logprobs_M1 - old_logprobs_M1
    ratio_M1 = np.exp(_clip_array(difference_M1, LOG_RATIO_LIMIT))
    unclipped_M1 = ratio_M1 * -advantages_M1
    clipped_M1 = np.minimum(np.maximum(ratio_M1, low), high) * -advantages_M1
    # The clip zeroes the gradient where it makes the loss larger.
    is_low_M1 = (ratio_M1 < low) & (advantages_M1 < 0)
    is_high_M1 = (ratio_M1 > high) & (advantages_M1 > 0)
    is_constant_M1 = is_low_M1 | is_high_M1 | (np.abs(difference_M1) > LOG_RATIO_LIMIT)
    columns["policy/loss"] = np.maximum(unclipped_M1, clipped_M1)
    columns["policy/clip_fraction_low"], columns["policy/clip_fraction_high"] = (
        is_low_M1,
        is_high_M1,
    )
    columns["policy/ratio_mean"] = ratio_M1
    # k1 and k3 of KL(old || current)
    bounded_M1 = _clip_array(difference_M1, K3_LIMIT)
    columns["policy/update_kl"] = np.expm1(bounded_M1) - bounded_M1
    columns["policy/update_kl_k1"] = -difference_M1
    return np.where(is_constant_M1, np.float32(0.0), unclipped_M1 / np.float32(options.num_rows))


def _clip_array(values: np.ndarray, limit: float) -> np.ndarray:
    """Clip to +-limit; faster than `np.clip` on small arrays."""
    bounded: Any = np.minimum(np.maximum(values, -limit), limit)
    return bounded


def _add_value_terms(
    columns: dict[str, np.ndarray],
    values_M1: np.ndarray,
    targets_M1: np.ndarray,
    old_values_M1: np.ndarray,
    options: LossOptions,
) -> np.ndarray:
    """Add the terms of `rl_core.losses.value.value_loss`; return dL / d value."""
    errors_M1 = values_M1 - targets_M1
    squares_M1 = errors_M1 * errors_M1
    is_clipped_M1 = np.zeros(squares_M1.shape, bool)
    if options.value_clip_eps is not None:
        moved_M1 = values_M1 - old_values_M1
        bounded_M1 = old_values_M1 + _clip_array(moved_M1, options.value_clip_eps) - targets_M1
        bounded_squares_M1 = bounded_M1 * bounded_M1
        is_outside_M1 = np.abs(moved_M1) > options.value_clip_eps
        is_clipped_M1 = (bounded_squares_M1 > squares_M1) & is_outside_M1
        squares_M1 = np.maximum(squares_M1, bounded_squares_M1)
        errors_M1 = np.where(is_clipped_M1, np.float32(0.0), errors_M1)
    columns["value/loss"] = np.float32(0.5) * squares_M1
    columns["value/clip_fraction"] = is_clipped_M1
    return errors_M1 * np.float32(options.value_coef / options.num_rows)
