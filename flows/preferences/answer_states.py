"""A model's states at the end of each answer, and from them the reward posterior that chooses what to ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.api.policy import load_policy
from rl_core.data.chat import ChatRenderer
from rl_core.data.preference_rows import row_sides
from rl_core.models import heads
from rl_core.models.causal_lm import evaluating
from rl_core.preferences.items import RatedItem
from rl_core.preferences.reward_posterior import RewardPosterior, head_on_axes, principal_axes
from rl_core.settings import ModelSettings

__all__ = ["posterior_of"]

MOST_TOKENS = 16384  # padded, of one pass


def posterior_of(
    items: Sequence[RatedItem], settings: ModelSettings, *, policy: Path | str | None, reward_model: Path | str | None
) -> RewardPosterior:
    """The posterior over pairs before anything is rated.

    Args:
        policy: its states, with a new head; not read where there is a reward model.
        reward_model: its states; a linear head is the posterior's mean.
    Raises: ModelError.
    """
    plain = dataclasses.replace(settings, path=None, lora=None)
    if reward_model is not None:
        model, tokenizer = heads.load_reward_model(reward_model, plain)
    else:
        assert policy is not None
        found = load_policy(policy, plain)
        model, tokenizer = found.model, found.tokenizer
    states_ND = _differences(model, ChatRenderer(tokenizer, plain), items)
    axes_DK = principal_axes(states_ND)
    head = getattr(model, "score", None) if reward_model is not None else None
    mean_K = None
    if isinstance(head, torch.nn.Linear):
        mean_K = head_on_axes(head.weight.detach().float().cpu().numpy()[0], axes_DK)
    return RewardPosterior(states_ND @ axes_DK, mean_D=mean_K)


def _differences(model: Any, renderer: ChatRenderer, items: Sequence[RatedItem]) -> Any:
    """State after the first answer minus that after the second: float [N, D]."""
    rows = []
    for item in items:
        row = {"prompt": item.prompt, "chosen": item.answers[0], "rejected": item.answers[1]}
        rows += [side.ids for side, _ in row_sides(row, renderer)]
    states = np.zeros((len(rows), model.config.get_text_config().hidden_size), dtype=np.float32)
    with evaluating(model), torch.no_grad():
        for batch in heads.score_batches([len(row) for row in rows], MOST_TOKENS):
            found_BH = heads.last_states(model, [rows[index] for index in batch], pad_id=renderer.pad_id)
            states[batch] = found_BH.float().cpu().numpy()
    return states[0::2] - states[1::2]
