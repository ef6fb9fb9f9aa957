"""Rotary frequencies fixed for a run, and the length of rows that they allow.

B rows, S sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities.decision import FIXED_ROPE
from rl_core.capabilities.rotary_positions import (
    find_fixing_obstacles,
    find_rotary_modules,
    find_row_limit,
    has_fixed_rope,
    read_rope_length_bound,
)
from rl_core.errors import DataError, SettingsError
from rl_core.models.lora import unwrap_model
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fix_frequencies(model: PreTrainedModel, rope_context: int | None) -> None:
    """Give every row the frequencies of sequences of `rope_context` tokens, in place; None leaves the model as it is.

    Up to the model's bound these are the ones that it has for short sequences (longrope: the short factors), beyond it
    the long ones, for short rows too. Raises: SettingsError where that is impossible or has no effect.
    """
    if rope_context is None:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base: Any = unwrap_model(model)
    obstacle = next(find_fixing_obstacles(base), None)
    if obstacle is not None:
        raise SettingsError(
            f"model.rope_context: {type(base).__name__} takes none: {obstacle}; leave it out"
        )
    _check_rope_context(base.config, rope_context)
    for part in find_rotary_modules(base):
        device = part.inv_freq.device
        frequencies, part.attention_scaling = ROPE_INIT_FUNCTIONS[part.rope_type](
            part.config, device, seq_len=rope_context
        )
        part.inv_freq = torch.nn.Buffer(frequencies.to(part.inv_freq.dtype), persistent=False)
        part.rope_type = FIXED_ROPE  # transformers then leaves the frequencies alone
    # a plain attribute: copied with the trunk, in no state dict
    base.base_model._posttrain_rope_context = rope_context


def read_config_max_length(config: Any, rope_context: int | None = None) -> int:
    """Longest sequence, in tokens, by a transformers configuration; 2^20 where it names none.

    Raises: SettingsError when `rope_context` is beyond what the model is made for.
    """
    followed = read_rope_length_bound(config)
    if rope_context is not None:
        if followed is None:
            raise SettingsError(
                "model.rope_context: this model's rotary frequencies do not follow the length; leave it out"
            )
        _check_rope_context(config, rope_context)
        return rope_context
    most = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20)
    return most if followed is None else min(most, followed.bound)


def read_model_max_length(model: PreTrainedModel) -> int:
    """Longest sequence, in tokens, of a loaded model."""
    limit = find_row_limit(model)
    return limit if limit is not None else read_config_max_length(unwrap_model(model).config)


def check_row_lengths(model: PreTrainedModel, batch: TrainBatch) -> None:
    """DataError when a row is longer than the model's rotary frequencies allow (`capabilities.positions`)."""
    limit = find_row_limit(model)
    if limit is None or batch.input_ids_BS.shape[1] <= limit:
        return
    if batch.position_ids_BS is not None:
        longest = int(batch.position_ids_BS.max()) + 1
    elif has_fixed_rope(model):
        longest = int(batch.attention_mask_BS.sum(1).max())
    else:  # padding counts: the model chooses by it
        longest = batch.input_ids_BS.shape[1]
    if longest > limit:
        raise DataError(
            f"a row has {longest} tokens, and the rotary frequencies of this model are those of up to {limit}: they "
            "would change for the rows beside it; set model.rope_context to the longest sequence of the run, or shorten"
        )


def _check_rope_context(config: Any, rope_context: int) -> None:
    followed = read_rope_length_bound(config)
    if followed is not None and rope_context > followed.longest:
        raise SettingsError(
            f"model.rope_context: {rope_context}, but the model is made for sequences of up to {followed.longest} "
            "tokens"
        )
