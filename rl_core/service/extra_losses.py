"""Losses of this project for remote clients: PPO with a value function, PPO with a hard KL limit, Bradley-Terry.

Suffixes: B rows, T tokens. All are sums over tokens (or pairs) times the option `scale`; 1 / N makes them means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import gae
from rl_core.losses.kl import kl_penalty
from rl_core.losses.policy import summed_ppo_loss
from rl_core.losses.preference import bradley_terry_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import value_loss
from rl_core.service.loss_function import (
    CLIP_INPUTS,
    POLICY_INPUTS,
    TEMPERATURE,
    LossFunction,
    LossInput,
    LossInputs,
    LossOption,
    TokenTable,
    compute_clipping_metrics,
    compute_entropy_metrics,
    compute_pair_metrics,
    compute_reference_metrics,
    compute_value_metrics,
    fill_clip_thresholds,
)

_SCALE_OPTION = {"scale": LossOption(1.0, 0.0, 1e9, "multiplies the loss")}
_CLIP_OPTIONS = {
    "clip_low_threshold": LossOption(0.8, 0.0, 1e6, "smallest ratio"),
    "clip_high_threshold": LossOption(1.2, 0.0, 1e6, "largest ratio"),
}
_REGULARISER_OPTIONS = {
    "entropy_coef": LossOption(0.0, -1e6, 1e6, "weight of the entropy, which is subtracted"),
    "kl_coef": LossOption(
        0.0, 0.0, 1e6, "weight of KL(policy || reference), k3; needs ref_logprobs"
    ),
}
_MASK_INPUT = LossInput("nonzero = the policy chose the token", required=False)
_REFERENCE_INPUT = LossInput("log-probability under the reference model, nats", required=False)


def _compute_entropy_and_kl_terms(loss_inputs: LossInputs, mask_BT: torch.Tensor) -> torch.Tensor:
    """Compute entropy and KL terms summed over tokens; a term with weight 0 is 0."""
    options, ref_BT = loss_inputs.options, loss_inputs.inputs.get("ref_logprobs")
    assert loss_inputs.entropy_BT is not None
    loss_inputs.outputs["entropy"] = loss_inputs.entropy_BT
    logprobs_BT = loss_inputs.single_logprobs
    total, ones_BT = logprobs_BT.new_zeros(()), torch.ones_like(logprobs_BT)
    if options["kl_coef"] > 0 and ref_BT is None:
        raise DataError(
            "kl_coef: the KL to a reference needs ref_logprobs, or the option reference (base, or a name)"
        )
    if options["kl_coef"] > 0 and ref_BT is not None:
        kl, _ = kl_penalty(logprobs_BT, ref_BT, mask_BT, num_loss_tokens=1, loss_weights_BT=ones_BT)
        total = total + options["kl_coef"] * kl
    if options["entropy_coef"] != 0:
        bonus, _ = entropy_bonus(
            loss_inputs.entropy_BT, mask_BT, num_loss_tokens=1, loss_weights_BT=ones_BT
        )
        total = total + options["entropy_coef"] * bonus
    return total


def _compute_enhanced_ppo_loss(loss_inputs: LossInputs) -> torch.Tensor:
    options, values_BT = loss_inputs.options, loss_inputs.values_BT
    assert values_BT is not None
    mask_BT = loss_inputs.mask_BT & (loss_inputs.read_optional_input("mask", 1.0) != 0)
    old_values_BT = loss_inputs.inputs.get("values", values_BT.detach())
    advantages_BT, returns_BT = gae(
        loss_inputs.inputs["rewards"],
        old_values_BT,
        mask_BT,
        gamma=options["gamma"],
        gae_lambda=options["gae_lambda"],
    )
    low_BT, high_BT = fill_clip_thresholds(loss_inputs)
    loss = summed_ppo_loss(
        loss_inputs.single_logprobs,
        loss_inputs.inputs["logprobs"],
        advantages_BT,
        mask_BT,
        low_BT=low_BT,
        high_BT=high_BT,
    )
    value, _ = value_loss(
        values_BT,
        returns_BT,
        mask_BT,
        num_loss_tokens=1,
        old_values_BT=old_values_BT,
        value_clip_eps=options["value_clip"] or None,
    )
    loss_inputs.outputs |= {
        "mask": mask_BT.float(),
        "advantages": advantages_BT,
        "returns": returns_BT,
        "old_values": old_values_BT,
        "new_values": values_BT.detach(),
    }
    regularisers = _compute_entropy_and_kl_terms(loss_inputs, mask_BT)
    return options["scale"] * (loss + options["value_coef"] * value + regularisers)


def _compute_conservative_ppo_loss(loss_inputs: LossInputs) -> torch.Tensor:
    low_BT, high_BT = fill_clip_thresholds(loss_inputs)
    advantages_BT = loss_inputs.inputs["advantages"]
    mask_BT = loss_inputs.mask_BT & (loss_inputs.read_optional_input("mask", 1.0) != 0)
    counted_BT = mask_BT if "mask" in loss_inputs.inputs else mask_BT & (advantages_BT != 0)
    loss_inputs.outputs["mask"] = counted_BT.float()
    loss = summed_ppo_loss(
        loss_inputs.single_logprobs,
        loss_inputs.inputs["logprobs"],
        advantages_BT,
        mask_BT,
        low_BT=low_BT,
        high_BT=high_BT,
    )
    regularisers = _compute_entropy_and_kl_terms(loss_inputs, counted_BT)
    return loss_inputs.options["scale"] * (loss + regularisers)


def _compute_reward_modeling_loss(loss_inputs: LossInputs) -> torch.Tensor:
    scores_B, preferred_B = loss_inputs.scores_B, loss_inputs.inputs["preferred"] != 0
    assert scores_B is not None
    margin_B = loss_inputs.inputs.get("margin")
    loss, _ = bradley_terry_loss(
        scores_B[preferred_B],
        scores_B[~preferred_B],
        num_pairs=1,
        margin_B=None if margin_B is None else margin_B[preferred_B],
        center_coef=loss_inputs.options["center_coef"],
    )
    loss_inputs.outputs["scores"] = scores_B.detach()
    return loss_inputs.options["scale"] * loss


def _compute_enhanced_ppo_metrics(
    table: TokenTable, options: Mapping[str, float]
) -> dict[str, float]:
    return (
        compute_clipping_metrics(table, options)
        | compute_entropy_metrics(table)
        | compute_reference_metrics(table)
        | compute_value_metrics(table, options)
    )


def _compute_conservative_ppo_metrics(
    table: TokenTable, options: Mapping[str, float]
) -> dict[str, float]:
    return (
        compute_clipping_metrics(table, options)
        | compute_entropy_metrics(table)
        | compute_reference_metrics(table)
    )


EXTRA_LOSSES = (
    LossFunction(
        name="enhanced_ppo",
        formula="ppo with A of GAE, + value_coef 1/2 max((v - R)^2, (clip(v) - R)^2) + kl_coef k3 - entropy_coef H",
        inputs={name: POLICY_INPUTS[name] for name in ("target_tokens", "logprobs")}
        | {
            "rewards": LossInput("of each token; 0 where the mask is 0"),
            "values": LossInput(
                "old values from this loss's outputs; default: the current values", required=False
            ),
            "ref_logprobs": _REFERENCE_INPUT,
            "mask": _MASK_INPUT,
        }
        | CLIP_INPUTS,
        options={
            **TEMPERATURE,
            **_SCALE_OPTION,
            **_CLIP_OPTIONS,
            **_REGULARISER_OPTIONS,
            "gamma": LossOption(1.0, 0.0, 1.0, "discount of a token"),
            "gae_lambda": LossOption(0.95, 0.0, 1.0, "decay of the trace"),
            "value_coef": LossOption(0.5, 0.0, 1e6, "weight of the value loss"),
            "value_clip": LossOption(0.2, 0.0, 1e6, "largest change of a value; 0 = no limit"),
        },
        loss=_compute_enhanced_ppo_loss,
        metrics=_compute_enhanced_ppo_metrics,
        needs=frozenset({"entropy", "values"}),
    ),
    LossFunction(
        name="conservative_ppo",
        formula="ppo + kl_coef k3 - entropy_coef H; an update that raises KL(old || new) above kl_max is refused",
        inputs=POLICY_INPUTS
        | CLIP_INPUTS
        | {"ref_logprobs": _REFERENCE_INPUT, "mask": _MASK_INPUT},
        options={
            **TEMPERATURE,
            **_SCALE_OPTION,
            **_CLIP_OPTIONS,
            **_REGULARISER_OPTIONS,
            "kl_max": LossOption(
                0.05, 0.0, 1e6, "largest mean of KL(old || new) over the tokens, k3, nats"
            ),
        },
        loss=_compute_conservative_ppo_loss,
        metrics=_compute_conservative_ppo_metrics,
        needs=frozenset({"entropy"}),
        kl_limit="kl_max",
    ),
    LossFunction(
        name="reward_modeling",
        formula="-sum log sigmoid(s_c - s_r - margin) + center_coef (s_c + s_r)^2, s at the last position",
        inputs={
            "preferred": LossInput(
                "1 = chosen, 0 = rejected; datums 2 i and 2 i + 1 are a pair", shape="one"
            ),
            "margin": LossInput(
                "required difference of the pair's scores", shape="one", required=False
            ),
        },
        options={
            **_SCALE_OPTION,
            "center_coef": LossOption(0.01, 0.0, 1e6, "pulls scores to 0 (arXiv:2312.09244)"),
        },
        loss=_compute_reward_modeling_loss,
        metrics=compute_pair_metrics,
        needs=frozenset({"scores"}),
        is_paired=True,
    ),
)
