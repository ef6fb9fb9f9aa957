"""Registry of losses by name: those of the service's API, and this project's through the same interface."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_core.errors import ServiceError, suggest_name
from rl_core.losses.masking import masked_sum
from rl_core.losses.policy import (
    NOT_RECORDED,
    importance_sampling_loss,
    proximal_regression_loss,
    score_centered_loss,
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
    TokenTable,
    compute_clipping_metrics,
    compute_cross_entropy_metrics,
    compute_policy_metrics,
    compute_sequence_clipping_metrics,
    fill_clip_thresholds,
    summarize_values,
)

# Losses of the API that this server does not support, and why.
UNSUPPORTED_LOSSES = {
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


def _compute_stable_reinforce_loss(loss_inputs: LossInputs) -> torch.Tensor:
    logprobs_BTK = loss_inputs.logprobs
    assert logprobs_BTK is not None
    sampler_top_BTK = loss_inputs.inputs["sampler_top_logprobs"]
    recorded_BT = loss_inputs.mask_BT & (sampler_top_BTK > NOT_RECORDED).any(-1)
    loss, kl_BT = score_centered_loss(
        logprobs_BTK[..., 0],
        logprobs_BTK[..., 1:],
        sampler_top_BTK,
        loss_inputs.inputs["advantages"],
        recorded_BT,
        kl_coeff=loss_inputs.options["kl_coeff"],
    )
    loss_inputs.outputs |= {
        "logprobs": logprobs_BTK[..., 0],
        "mask": recorded_BT.float(),
        "sampler_kl": kl_BT,
        "recorded_mass": sampler_top_BTK.exp().sum(-1),
    }
    return loss


def _compute_stable_reinforce_metrics(
    table: TokenTable, options: Mapping[str, float]
) -> dict[str, float]:
    used = table["mask"] != 0
    return (
        compute_policy_metrics(table, options)
        | summarize_values("sampler_kl", table["sampler_kl"][used])
        | summarize_values("recorded_mass", table["recorded_mass"][used])
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
            "weights": LossInput(
                "w, of any sign; default: 1", shape="targets", required=False, fill=1.0
            ),
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
    LossFunction(
        name="stable_reinforce",
        formula="-sum (A p + (A - kl_coeff) KL(q || p)), KL over the tokens recorded at sampling and the rest as one",
        inputs=POLICY_INPUTS
        | {
            "sampler_top_tokens": LossInput(
                "[T, K], the most likely tokens of the distribution sampled from", "int", "columns"
            ),
            "sampler_top_logprobs": LossInput(
                "[T, K], their log-probabilities; -99999 = no token, as where nothing was sampled",
                shape="columns",
            ),
        },
        options=TEMPERATURE
        | {"kl_coeff": LossOption(0.0, 0.0, 1e6, "weight of KL(sampler || policy)")},
        loss=_compute_stable_reinforce_loss,
        metrics=_compute_stable_reinforce_metrics,
        scored_tokens="sampler_top_tokens",
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
