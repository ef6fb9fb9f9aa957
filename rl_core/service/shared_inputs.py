"""Inputs and options that several losses have in common."""

from __future__ import annotations

import torch

from rl_core.service.loss_function import LossInput, LossInputs, LossOption

__all__ = ["CLIP_INPUTS", "POLICY_INPUTS", "TARGETS", "TEMPERATURE", "thresholds"]

TARGETS = LossInput("the token that each position predicts; [T, K] for several", "int", "targets")
TEMPERATURE = {
    "temperature": LossOption(1.0, 1e-3, 1e3, "p is of softmax(logits / temperature): that of sampling, for ratios")
}
POLICY_INPUTS = {
    "target_tokens": LossInput("the token that each position predicts", "int"),
    "logprobs": LossInput("q, of the distribution sampled from, nats"),
    "advantages": LossInput("A; 0 where the policy did not choose the token"),
}
CLIP_INPUTS = {
    "clip_low_threshold": LossInput("of single tokens, in place of the option", required=False),
    "clip_high_threshold": LossInput("of single tokens, in place of the option", required=False),
}


def thresholds(given: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds of every token's ratio, of the datum or of the options; noted for the metrics."""
    found = []
    for name in ("clip_low_threshold", "clip_high_threshold"):
        given.outputs[name] = given.given(name, given.options[name])
        found.append(given.outputs[name])
    return found[0], found[1]
