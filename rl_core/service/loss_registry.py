"""Registry of losses by name: those of the service's API, and this project's through the same interface."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_core.errors import ServiceError, suggest_name
from rl_core.losses.masking import masked_sum
from rl_core.losses.policy import (
    importance_sampling_loss,
    proximal_regression_loss,
    summed_cispo_loss,
    summed_gspo_loss,
    summed_ppo_loss,
)
from rl_core.service.extra_losses import EXTRA_LOSSES
from rl_core.service.loss_function import (
    CLIP_INPUTS,
    POLICY_INPUTS,
    TARGET_TOKENS,
    TEMPERATURE,
    LossFunction,
    LossInput,
    LossInputs,
    LossOption,
    compute_clipping_metrics,
    compute_cross_entropy_metrics,
    compute_policy_metrics,
    compute_sequence_clipping_metrics,
    fill_clip_thresholds,
)

# Losses of the API that this server does not support, and why.
UNSUPPORTED_LOSSES = {
    "stable_reinforce": "its formula is not public; importance_sampling, ppo and cispo are the nearest",
    "custom": "the server does not run a client's graphs; forward_backward_custom of the client computes it with "
    "cross_entropy",
}


def _compute_cross_entropy(loss_inputs: LossInputs) -> torch.Tensor:
    assert loss_inputs.logprobs is not None
    weights = loss_inputs.inputs.get("weights")
    mask = loss_inputs.mask_BT
    if loss_inputs.logprobs.ndim == 3:
        mask = mask[..., None].expand_as(loss_inputs.logprobs)
    if weights is None:
        weights = mask.to(loss_inputs.logprobs.dtype)
    loss_inputs.outputs["weights"] = weights
    return -masked_sum(weights * loss_inputs.logprobs, mask & (weights != 0))


def _select_policy_inputs(
    loss_inputs: LossInputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p, q, A and the mask."""
    return (
        loss_inputs.single_logprobs,
        loss_inputs.inputs["logprobs"],
        loss_inputs.inputs["advantages"],
        loss_inputs.mask_BT,
    )


def _compute_gspo_loss(loss_inputs: LossInputs) -> torch.Tensor:
    low_BT, high_BT = fill_clip_thresholds(loss_inputs)
    mask_BT = loss_inputs.inputs.get("sequence_ratio_mask")
    if mask_BT is None:
        mask_BT = loss_inputs.inputs["advantages"]
    loss_inputs.outputs["sequence_ratio_mask"] = (mask_BT != 0).float()
    return summed_gspo_loss(
        *_select_policy_inputs(loss_inputs),
        ratio_mask_BT=mask_BT != 0,
        low_BT=low_BT,
        high_BT=high_BT,
    )


def _build_clipped_loss(formula: str, name: str, low: float, high: float) -> LossFunction:
    """Build a loss with thresholds of the token ratio."""
    loss = {"ppo": summed_ppo_loss, "cispo": summed_cispo_loss}[name]

    def compute(loss_inputs: LossInputs) -> torch.Tensor:
        low_BT, high_BT = fill_clip_thresholds(loss_inputs)
        return loss(*_select_policy_inputs(loss_inputs), low_BT=low_BT, high_BT=high_BT)

    return LossFunction(
        name=name,
        formula=formula,
        inputs=POLICY_INPUTS | CLIP_INPUTS,
        options=TEMPERATURE | _build_threshold_options(low, high),
        loss=compute,
        metrics=compute_clipping_metrics,
    )


def _build_threshold_options(low: float, high: float) -> dict[str, LossOption]:
    return {
        "clip_low_threshold": LossOption(low, 0.0, 1e6, "smallest ratio"),
        "clip_high_threshold": LossOption(high, 0.0, 1e6, "largest ratio"),
    }


_API_LOSSES = (
    LossFunction(
        name="cross_entropy",
        formula="-sum w p",
        inputs={
            "target_tokens": TARGET_TOKENS,
            "weights": LossInput("w, of any sign; default: 1", shape="targets", required=False),
        },
        options=TEMPERATURE,
        loss=_compute_cross_entropy,
        metrics=compute_cross_entropy_metrics,
    ),
    LossFunction(
        name="importance_sampling",
        formula="-sum r A",
        inputs=POLICY_INPUTS,
        options=TEMPERATURE,
        loss=lambda inputs: importance_sampling_loss(*_select_policy_inputs(inputs)),
        metrics=compute_policy_metrics,
    ),
    _build_clipped_loss("-sum min(r A, clip(r, low, high) A)", "ppo", 0.8, 1.2),
    _build_clipped_loss("-sum stopgrad(clip(r, low, high)) A p", "cispo", 0.0, 4.0),
    LossFunction(
        name="dro",
        formula="-sum (A p - beta / 2 (p - q)^2)",
        inputs=POLICY_INPUTS,
        options=TEMPERATURE
        | {"beta": LossOption(0.05, 0.0, 1e6, "weight of the squared log-ratio")},
        loss=lambda inputs: proximal_regression_loss(
            *_select_policy_inputs(inputs), beta=inputs.options["beta"]
        ),
        metrics=compute_policy_metrics,
    ),
    LossFunction(
        name="gspo",
        formula="-sum min(s A, clip(s, low, high) A), s = exp(mean of p - q over a sequence)",
        inputs=POLICY_INPUTS
        | CLIP_INPUTS
        | {
            "sequence_ratio_mask": LossInput(
                "nonzero = part of its sequence's ratio; default: tokens of nonzero advantage",
                required=False,
            )
        },
        options=TEMPERATURE | _build_threshold_options(1 - 3e-4, 1 + 4e-4),
        loss=_compute_gspo_loss,
        metrics=compute_sequence_clipping_metrics,
    ),
)

LOSSES: Mapping[str, LossFunction] = {loss.name: loss for loss in (*_API_LOSSES, *EXTRA_LOSSES)}


def find_loss(name: str) -> LossFunction:
    """Return the loss with a name. Raises: ServiceError (user) for an unsupported or unknown loss."""
    if name in UNSUPPORTED_LOSSES:
        raise ServiceError(f"loss_fn '{name}' is not supported: {UNSUPPORTED_LOSSES[name]}", "user")
    if name not in LOSSES:
        raise ServiceError(f"loss_fn: there is no '{name}'; {suggest_name(name, LOSSES)}", "user")
    return LOSSES[name]
