"""Attention of training passes on a GPU without masks that transformers would ask the device about.

Rows of one sequence: transformers reads the device in every pass, to learn whether their positions begin again.
Causal attention needs no mask, so none is made (`capabilities.check_causal_attention`).

Packed rows: torch's kernel for sequences of different lengths. Without it, a row of several sequences needs a mask
[S, S] of the whole row, and every pair of positions is computed. `capabilities.check_packed_attention` names the
obstacles; a trial on two short sequences decides whether the kernel gives what the masked one gives.

B rows, S tokens of a row, H heads, D head size, N sequences of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import check_causal_attention, check_packed_attention
from rl_core.types import SequenceBounds, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers builds no mask for attention functions that it does not know
_PACKED_NAME, _CAUSAL_NAME = "posttrain_packed", "posttrain_causal"
_TRIAL_RESULT = "_posttrain_packed_attention"  # attribute of a trunk: dtype -> whether the kernel passed the trial
_bounds: ContextVar[SequenceBounds | None] = ContextVar("packed_attention_bounds", default=None)


def attend_within_sequences(
    module: Any,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sequence; the interface of transformers' attention functions."""
    bounds = _bounds.get()
    assert bounds is not None and attention_mask is None and dropout == 0.0
    rows, heads, width, size = query_BHSD.shape
    query, key, value = (
        tensor.transpose(1, 2).reshape(rows * width, -1, size)
        for tensor in (query_BHSD, key_BHSD, value_BHSD)
    )
    attended = _run_kernel(query, key, value, bounds, scaling)
    return attended.view(rows, width, heads, -1), None


def _run_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SequenceBounds,
    scale: float | None,
) -> torch.Tensor:
    """Run torch's kernel on [tokens, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = bounds.starts_N, bounds.longest
    attended = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, torch.Tensor)  # a tuple only if more is requested
    return attended


def attend_causally(
    module: Any,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention as transformers' sdpa does for rows without a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert attention_mask is None
    attended, _ = sdpa_attention_forward(
        module, query_BHSD, key_BHSD, value_BHSD, attention_mask, **options
    )
    return attended, None


@contextmanager
def use_device_attention(
    trunk: PreTrainedModel, batch: TrainBatch
) -> Iterator[dict[str, torch.Tensor]]:
    """Attend without reads of the device where that is allowed; else leave it to transformers.

    Yields: further arguments of the trunk: a mask for packed rows whose kernel is not allowed.
    """
    positions_BS, bounds = batch.position_ids_BS, batch.sequence_bounds
    if not check_causal_attention(trunk).allowed:
        yield {}
    elif positions_BS is None:
        with _replace_attention(trunk, _CAUSAL_NAME, None):
            yield {}
    elif bounds is not None and can_use_packed_attention(trunk):
        with _replace_attention(trunk, _PACKED_NAME, bounds):
            yield {}
    else:
        yield {"attention_mask": build_packed_mask(positions_BS)}


def build_packed_mask(positions_BS: torch.Tensor) -> torch.Tensor:
    """Build the mask that transformers builds for packed rows, bool [B, 1, S, S], True = attended."""
    steps_BS = torch.diff(positions_BS, prepend=positions_BS[:, :1] - 1)
    sequence_BS = (steps_BS != 1).cumsum(-1)
    is_same_BSS = sequence_BS[:, :, None] == sequence_BS[:, None, :]
    return is_same_BSS.tril()[:, None]


@contextmanager
def _replace_attention(trunk: Any, name: str, bounds: SequenceBounds | None) -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_PACKED_NAME, attend_within_sequences)
    ALL_ATTENTION_FUNCTIONS.register(_CAUSAL_NAME, attend_causally)
    former, token = trunk.config._attn_implementation, _bounds.set(bounds)
    trunk.config._attn_implementation = name
    try:
        yield
    finally:
        trunk.config._attn_implementation = former
        _bounds.reset(token)


def can_use_packed_attention(trunk: Any) -> bool:
    """Return whether the kernel is allowed for a trunk in its current mode, and passed its trial."""
    if not check_packed_attention(trunk).allowed:
        return False
    results = trunk.__dict__.setdefault(_TRIAL_RESULT, {})
    weight = trunk.embed_tokens.weight
    device_type = weight.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    if dtype not in results:
        results[dtype] = _passes_trial(trunk, dtype)
    return bool(results[dtype])


@torch.no_grad()
def _passes_trial(trunk: Any, dtype: torch.dtype) -> bool:
    """Compare two sequences in one row with the masked kernel's: equal up to rounding, and apart from each other."""
    vocab_size, device = trunk.embed_tokens.weight.shape[0], trunk.embed_tokens.weight.device
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    ids = (torch.arange(21) * 7 % (vocab_size - 1) + 1)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = TrainBatch(ids, mask, torch.zeros_like(mask), position_ids_BS=positions)
    bounds = batch.find_sequence_bounds()
    assert bounds is not None
    inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False}
    expected = trunk(**inputs).last_hidden_state.double()
    try:
        with _replace_attention(trunk, _PACKED_NAME, bounds.to(device)):
            states = trunk(**inputs).last_hidden_state.double()
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    difference = (states - expected).square().mean() ** 0.5 / expected.square().mean() ** 0.5
    return float(difference) <= torch.finfo(dtype).eps * max(1, len(trunk.layers)) ** 0.5 * 4
