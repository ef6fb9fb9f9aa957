"""The losses by name: those of the service's contract, and this project's own by the same door."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_core.errors import ServiceError, nearest
from rl_core.losses.masking import masked_sum
from rl_core.losses.summed_policy import (
    importance_sampling_loss,
    proximal_regression_loss,
    summed_cispo_loss,
    summed_gspo_loss,
    summed_ppo_loss,
)
from rl_core.service.loss_function import LossFunction, LossInput, LossInputs, LossOption
from rl_core.service.loss_metrics import (
    clipping_metrics,
    cross_entropy_metrics,
    policy_metrics,
    sequence_clipping_metrics,
)
from rl_core.service.own_losses import OWN_LOSSES
from rl_core.service.shared_inputs import CLIP_INPUTS, POLICY_INPUTS, TARGETS, TEMPERATURE, thresholds

__all__ = ["LOSSES", "REFUSED", "loss_named"]

# Names of the contract that this server does not compute, and why.
REFUSED = {
    "stable_reinforce": "its formula is not public; importance_sampling, ppo and cispo are the nearest",
    "custom": "graphs of a client's own are not run here; forward_backward_custom of the client computes it by "
    "cross_entropy",
}


def _cross_entropy(given: LossInputs) -> torch.Tensor:
    assert given.logprobs is not None
    weights = given.inputs.get("weights")
    mask = given.mask_BT if given.logprobs.ndim == 2 else given.mask_BT[..., None].expand_as(given.logprobs)
    if weights is None:
        weights = mask.to(given.logprobs.dtype)
    given.outputs["weights"] = weights
    return -masked_sum(weights * given.logprobs, mask & (weights != 0))


def _policy(given: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, q, A and mask."""
    return given.single_logprobs, given.inputs["logprobs"], given.inputs["advantages"], given.mask_BT


def _gspo(given: LossInputs) -> torch.Tensor:
    low_BT, high_BT = thresholds(given)
    mask_BT = given.inputs.get("sequence_ratio_mask")
    if mask_BT is None:
        mask_BT = given.inputs["advantages"]
    given.outputs["sequence_ratio_mask"] = (mask_BT != 0).float()
    return summed_gspo_loss(*_policy(given), ratio_mask_BT=mask_BT != 0, low_BT=low_BT, high_BT=high_BT)


def _clipped(formula: str, name: str, low: float, high: float) -> LossFunction:
    """A loss with thresholds of the token ratio."""
    loss = {"ppo": summed_ppo_loss, "cispo": summed_cispo_loss}[name]

    def compute(given: LossInputs) -> torch.Tensor:
        low_BT, high_BT = thresholds(given)
        return loss(*_policy(given), low_BT=low_BT, high_BT=high_BT)

    return LossFunction(
        name=name, formula=formula, inputs=POLICY_INPUTS | CLIP_INPUTS,
        options=TEMPERATURE | _thresholds(low, high), loss=compute, metrics=clipping_metrics,
    )  # fmt: skip


def _thresholds(low: float, high: float) -> dict[str, LossOption]:
    return {
        "clip_low_threshold": LossOption(low, 0.0, 1e6, "smallest ratio"),
        "clip_high_threshold": LossOption(high, 0.0, 1e6, "largest ratio"),
    }


_CONTRACT = (
    LossFunction(
        name="cross_entropy",
        formula="-sum w p",
        inputs={
            "target_tokens": TARGETS,
            "weights": LossInput("w, of any sign; left out: 1", shape="targets", required=False),
        },
        options=TEMPERATURE,
        loss=_cross_entropy,
        metrics=cross_entropy_metrics,
    ),
    LossFunction(
        name="importance_sampling",
        formula="-sum r A",
        inputs=POLICY_INPUTS,
        options=TEMPERATURE,
        loss=lambda given: importance_sampling_loss(*_policy(given)),
        metrics=policy_metrics,
    ),
    _clipped("-sum min(r A, clip(r, low, high) A)", "ppo", 0.8, 1.2),
    _clipped("-sum stopgrad(clip(r, low, high)) A p", "cispo", 0.0, 4.0),
    LossFunction(
        name="dro",
        formula="-sum (A p - beta / 2 (p - q)^2)",
        inputs=POLICY_INPUTS,
        options=TEMPERATURE | {"beta": LossOption(0.05, 0.0, 1e6, "weight of the squared move")},
        loss=lambda given: proximal_regression_loss(*_policy(given), beta=given.options["beta"]),
        metrics=policy_metrics,
    ),
    LossFunction(
        name="gspo",
        formula="-sum min(s A, clip(s, low, high) A), s = exp(mean of p - q over a sequence)",
        inputs=POLICY_INPUTS
        | CLIP_INPUTS
        | {
            "sequence_ratio_mask": LossInput(
                "nonzero = the token forms its sequence's ratio; left out: tokens of nonzero advantage", required=False
            )
        },
        options=TEMPERATURE | _thresholds(1 - 3e-4, 1 + 4e-4),
        loss=_gspo,
        metrics=sequence_clipping_metrics,
    ),
)

LOSSES: Mapping[str, LossFunction] = {loss.name: loss for loss in (*_CONTRACT, *OWN_LOSSES)}


def loss_named(name: str) -> LossFunction:
    """The loss of a name. Raises: ServiceError (user) for one that is not computed here."""
    if name in REFUSED:
        raise ServiceError(f"loss_fn '{name}' is not supported: {REFUSED[name]}", "user")
    if name not in LOSSES:
        raise ServiceError(f"loss_fn: there is no '{name}'; {nearest(name, LOSSES)}", "user")
    return LOSSES[name]
