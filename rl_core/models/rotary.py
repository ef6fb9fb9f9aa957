"""Rotary frequencies fixed for a run, and the row length that they allow.

B rows, S tokens of a sequence.
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
    """Give every row the frequencies of sequences of `rope_context` tokens, in place; do nothing for None.

    Up to the model's bound these are its frequencies for short sequences (longrope: the short factors), beyond it
    those for long ones, also in short rows.
    Raises: SettingsError if that is impossible or has no effect.
    """
    if rope_context is None:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base: Any = unwrap_model(model)
    obstacle = next(find_fixing_obstacles(base), None)
    if obstacle is not None:
        raise SettingsError(
            f"model.rope_context: not supported by {type(base).__name__}: {obstacle}; remove it"
        )
    _check_rope_context(base.config, rope_context)
    for module in find_rotary_modules(base):
        device = module.inv_freq.device
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[module.rope_type](
            module.config, device, seq_len=rope_context
        )
        module.inv_freq = torch.nn.Buffer(frequencies.to(module.inv_freq.dtype), persistent=False)
        module.rope_type = FIXED_ROPE  # makes transformers keep the frequencies
    # a plain attribute: copied with the trunk, not part of the state dict
    base.base_model._posttrain_rope_context = rope_context


def read_config_max_length(config: Any, rope_context: int | None = None) -> int:
    """Return the longest sequence in tokens by a transformers configuration; 2^20 if it names none.

    Raises: SettingsError if `rope_context` is longer than the model is made for.
    """
    bound = read_rope_length_bound(config)
    if rope_context is not None:
        if bound is None:
            raise SettingsError(
                "model.rope_context: this model's rotary frequencies do not depend on the length; remove it"
            )
        _check_rope_context(config, rope_context)
        return rope_context
    max_positions = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20)
    return max_positions if bound is None else min(max_positions, bound.bound)


def read_model_max_length(model: PreTrainedModel) -> int:
    """Return the longest sequence in tokens of a loaded model."""
    limit = find_row_limit(model)
    return limit if limit is not None else read_config_max_length(unwrap_model(model).config)


def check_row_lengths(model: PreTrainedModel, batch: TrainBatch) -> None:
    """Raise DataError if a row is longer than the model's rotary frequencies allow (see `capabilities`)."""
    limit = find_row_limit(model)
    if limit is None or batch.input_ids_BS.shape[1] <= limit:
        return
    if batch.position_ids_BS is not None:
        longest = int(batch.position_ids_BS.max()) + 1
    elif has_fixed_rope(model):
        longest = int(batch.attention_mask_BS.sum(1).max())
    else:  # the model chooses frequencies by the padded length
        longest = batch.input_ids_BS.shape[1]
    if longest > limit:
        raise DataError(
            f"a row has {longest} tokens, but this model's rotary frequencies hold for up to {limit}: a longer row "
            "would change them for the whole batch; set model.rope_context to the longest sequence of the run, or "
            "shorten rows"
        )


def _check_rope_context(config: Any, rope_context: int) -> None:
    bound = read_rope_length_bound(config)
    if bound is not None and rope_context > bound.longest:
        raise SettingsError(
            f"model.rope_context: {rope_context}, but the model is made for sequences of up to {bound.longest} "
            "tokens"
        )
