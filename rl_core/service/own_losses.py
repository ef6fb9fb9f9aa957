"""This project's losses for remote clients: PPO with a value function, PPO under a hard KL limit, Bradley-Terry.

Suffixes: B rows, T tokens. All sums over tokens (pairs), times the option `scale`: 1 / N makes them means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import gae
from rl_core.losses.kl import kl_penalty
from rl_core.losses.preference import bradley_terry_loss
from rl_core.losses.summed_policy import summed_ppo_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import value_loss
from rl_core.service.loss_function import LossFunction, LossInput, LossInputs, LossOption, TokenTable
from rl_core.service.loss_metrics import (
    clipping_metrics,
    entropy_metrics,
    pair_metrics,
    reference_metrics,
    value_metrics,
)
from rl_core.service.shared_inputs import CLIP_INPUTS, POLICY_INPUTS, TEMPERATURE, thresholds

__all__ = ["OWN_LOSSES"]

_SCALE = {"scale": LossOption(1.0, 0.0, 1e9, "multiplies the loss")}
_CLIPS = {
    "clip_low_threshold": LossOption(0.8, 0.0, 1e6, "smallest ratio"),
    "clip_high_threshold": LossOption(1.2, 0.0, 1e6, "largest ratio"),
}
_TERMS = {
    "entropy_coef": LossOption(0.0, -1e6, 1e6, "weight of the entropy, which is subtracted"),
    "kl_coef": LossOption(0.0, 0.0, 1e6, "weight of KL(policy || reference), k3; needs ref_logprobs"),
}
_MASK = LossInput("nonzero = the policy chose the token", required=False)
_REFERENCE = LossInput("of the reference model, nats", required=False)


def _terms(given: LossInputs, mask_BT: torch.Tensor) -> torch.Tensor:
    """Entropy and KL terms, summed over tokens; 0 where their weight is."""
    options, ref_BT = given.options, given.inputs.get("ref_logprobs")
    assert given.entropy_BT is not None
    given.outputs["entropy"] = given.entropy_BT
    total, one_BT = given.single_logprobs.new_zeros(()), torch.ones_like(given.single_logprobs)
    if options["kl_coef"] > 0 and ref_BT is None:
        raise DataError("kl_coef: the KL to a reference needs ref_logprobs, or the option reference (base, or a name)")
    if options["kl_coef"] > 0 and ref_BT is not None:
        kl, _ = kl_penalty(given.single_logprobs, ref_BT, mask_BT, num_loss_tokens=1, loss_weights_BT=one_BT)
        total = total + options["kl_coef"] * kl
    if options["entropy_coef"] != 0:
        bonus, _ = entropy_bonus(given.entropy_BT, mask_BT, num_loss_tokens=1, loss_weights_BT=one_BT)
        total = total + options["entropy_coef"] * bonus
    return total


def _enhanced_ppo(given: LossInputs) -> torch.Tensor:
    options, values_BT = given.options, given.values_BT
    assert values_BT is not None
    mask_BT = given.mask_BT & (given.given("mask", 1.0) != 0)
    old_values_BT = given.inputs.get("values", values_BT.detach())
    advantages_BT, returns_BT = gae(
        given.inputs["rewards"], old_values_BT, mask_BT, gamma=options["gamma"], gae_lambda=options["gae_lambda"]
    )
    low_BT, high_BT = thresholds(given)
    loss = summed_ppo_loss(
        given.single_logprobs, given.inputs["logprobs"], advantages_BT, mask_BT, low_BT=low_BT, high_BT=high_BT
    )
    value, _ = value_loss(
        values_BT, returns_BT, mask_BT, num_loss_tokens=1, old_values_BT=old_values_BT,
        value_clip_eps=options["value_clip"] or None,
    )  # fmt: skip
    given.outputs |= {
        "mask": mask_BT.float(), "advantages": advantages_BT, "returns": returns_BT,
        "old_values": old_values_BT, "new_values": values_BT.detach(),
    }  # fmt: skip
    return options["scale"] * (loss + options["value_coef"] * value + _terms(given, mask_BT))


def _conservative_ppo(given: LossInputs) -> torch.Tensor:
    low_BT, high_BT = thresholds(given)
    advantages_BT = given.inputs["advantages"]
    mask_BT = given.mask_BT & (given.given("mask", 1.0) != 0)
    given.outputs["mask"] = (mask_BT if "mask" in given.inputs else mask_BT & (advantages_BT != 0)).float()
    loss = summed_ppo_loss(
        given.single_logprobs, given.inputs["logprobs"], advantages_BT, mask_BT, low_BT=low_BT, high_BT=high_BT
    )
    return given.options["scale"] * (loss + _terms(given, given.outputs["mask"] != 0))


def _reward_modeling(given: LossInputs) -> torch.Tensor:
    scores_B, preferred_B = given.scores_B, given.inputs["preferred"] != 0
    assert scores_B is not None
    margin_B = given.inputs.get("margin")
    loss, _ = bradley_terry_loss(
        scores_B[preferred_B], scores_B[~preferred_B], num_pairs=1,
        margin_B=None if margin_B is None else margin_B[preferred_B], center_coef=given.options["center_coef"],
    )  # fmt: skip
    given.outputs["scores"] = scores_B.detach()
    return given.options["scale"] * loss


def _enhanced_metrics(table: TokenTable, options: Mapping[str, float]) -> dict[str, float]:
    return (
        clipping_metrics(table, options)
        | entropy_metrics(table)
        | reference_metrics(table)
        | value_metrics(table, options)
    )


def _conservative_metrics(table: TokenTable, options: Mapping[str, float]) -> dict[str, float]:
    return clipping_metrics(table, options) | entropy_metrics(table) | reference_metrics(table)


OWN_LOSSES = (
    LossFunction(
        name="enhanced_ppo",
        formula="ppo with A of GAE, + value_coef 1/2 max((v - R)^2, (clip(v) - R)^2) + kl_coef k3 - entropy_coef H",
        inputs={name: POLICY_INPUTS[name] for name in ("target_tokens", "logprobs")}
        | {
            "rewards": LossInput("of each token; 0 where the mask is"),
            "values": LossInput("old values, of this loss's outputs; left out: the present ones", required=False),
            "ref_logprobs": _REFERENCE,
            "mask": _MASK,
        }
        | CLIP_INPUTS,
        options={
            **TEMPERATURE,
            **_SCALE,
            **_CLIPS,
            **_TERMS,
            "gamma": LossOption(1.0, 0.0, 1.0, "discount of a token"),
            "gae_lambda": LossOption(0.95, 0.0, 1.0, "decay of the trace"),
            "value_coef": LossOption(0.5, 0.0, 1e6, "weight of the value loss"),
            "value_clip": LossOption(0.2, 0.0, 1e6, "largest move of a value; 0 = none"),
        },
        loss=_enhanced_ppo,
        metrics=_enhanced_metrics,
        needs=frozenset({"entropy", "values"}),
    ),
    LossFunction(
        name="conservative_ppo",
        formula="ppo + kl_coef k3 - entropy_coef H; an update that takes KL(old || new) beyond kl_max is refused",
        inputs=POLICY_INPUTS | CLIP_INPUTS | {"ref_logprobs": _REFERENCE, "mask": _MASK},
        options={
            **TEMPERATURE,
            **_SCALE,
            **_CLIPS,
            **_TERMS,
            "kl_max": LossOption(0.05, 0.0, 1e6, "largest mean of KL(old || new) over the tokens, k3, nats"),
        },
        loss=_conservative_ppo,
        metrics=_conservative_metrics,
        needs=frozenset({"entropy"}),
        kl_limit="kl_max",
    ),
    LossFunction(
        name="reward_modeling",
        formula="-sum log sigmoid(s_c - s_r - margin) + center_coef (s_c + s_r)^2, s at the last position",
        inputs={
            "preferred": LossInput("1 = chosen, 0 = rejected; datums 2 i and 2 i + 1 are a pair", shape="one"),
            "margin": LossInput("required difference of the pair's scores", shape="one", required=False),
        },
        options={**_SCALE, "center_coef": LossOption(0.01, 0.0, 1e6, "draws scores to 0 (arXiv:2312.09244)")},
        loss=_reward_modeling,
        metrics=pair_metrics,
        needs=frozenset({"scores"}),
        is_paired=True,
    ),
)
