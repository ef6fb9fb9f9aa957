"""The loss of preference pairs that the settings name. B pairs."""

from __future__ import annotations

import torch

from rl_core.losses.preference import dpo_loss, ipo_loss
from rl_core.losses.reference_free import orpo_loss, simpo_loss
from rl_core.losses.ties import tied_dpo_loss, tied_ipo_loss
from rl_core.settings import PreferenceSettings

__all__ = ["Sides", "pair_loss", "tied_pair_loss"]

Sides = tuple[torch.Tensor, ...]  # (chosen, rejected), each [B]


def pair_loss(
    settings: PreferenceSettings, logprobs: Sides, references: Sides, tokens: Sides, num_pairs: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss that the settings name: dpo from sums over the tokens, the others from means."""
    if settings.loss == "dpo":
        return dpo_loss(
            *logprobs, *references,
            num_pairs=num_pairs, beta=settings.beta, label_smoothing=settings.label_smoothing,
        )  # fmt: skip
    means = logprobs[0] / tokens[0], logprobs[1] / tokens[1]
    if settings.loss == "simpo":
        return simpo_loss(*means, num_pairs=num_pairs, beta=settings.beta, gamma=settings.simpo_gamma)
    if settings.loss == "orpo":
        return orpo_loss(*means, num_pairs=num_pairs, beta=settings.beta)
    ref_means = references[0] / tokens[0], references[1] / tokens[1]
    return ipo_loss(*means, *ref_means, num_pairs=num_pairs, beta=settings.beta)


def tied_pair_loss(
    settings: PreferenceSettings,
    logprobs: Sides,
    references: Sides,
    tokens: Sides,
    ties_B: torch.Tensor,
    num_pairs: int,
    num_ordered: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss on pairs of which some are ties: dpo from sums over the tokens, ipo from means."""
    scale = [torch.ones_like(count_B) if settings.loss == "dpo" else count_B for count_B in tokens]
    chosen_B, rejected_B = (
        settings.beta * (own_B - ref_B) / count_B
        for own_B, ref_B, count_B in zip(logprobs, references, scale, strict=True)
    )
    if settings.loss == "dpo":
        return tied_dpo_loss(
            chosen_B, rejected_B, ties_B, num_pairs=num_pairs, num_ordered=num_ordered, model=settings.ties,
            tie_probability=settings.tie_probability,
        )  # fmt: skip
    return tied_ipo_loss(chosen_B, rejected_B, ties_B, num_pairs=num_pairs, num_ordered=num_ordered, beta=settings.beta)
