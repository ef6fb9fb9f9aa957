"""Observation tokens that join a decoding step: their attention over the slots to which they belong.

X extended slots, E their tokens, W tokens of the longest; N tokens of the step, Q query heads, K key/value heads,
G = Q / K, D head size, L attended prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["AppendedTokens"]


@dataclass(slots=True)
class AppendedTokens:
    """Observation tokens that some slots append to the cache in the step in which every slot takes in its newest token.

    X extended slots; each row is padded to W = the longest.
    """

    slots_X: torch.Tensor  # int64 [X]
    slots_E: torch.Tensor  # int64 [E], slot of each of the E = N - n tokens
    rows_XW: torch.Tensor  # int64 [X, W], index among the N new tokens; padding repeats a real one
    positions_XW: torch.Tensor  # int64 [X, W]
    places_E: torch.Tensor  # int64 [E], flat indices into [X, W] of the E tokens
    length: int  # attended prefix, the longest of these rows

    def mask(self, positions: torch.Tensor, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Causal mask [X, 1, G * W, L], added to the scores. positions: 0, 1, ..., at least L of them."""
        masked_XWL = positions[: self.length] > self.positions_XW[:, :, None]
        mask_XWL = torch.zeros_like(masked_XWL, dtype=dtype).masked_fill_(masked_XWL, -torch.inf)
        return mask_XWL.repeat(1, group, 1)[:, None]

    def attend(
        self,
        q_NQD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask_X1rL: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention [E, Q * D] of the tokens over their own slots; a layer's keys and values: [slots, K, length, D]."""
        count, width = self.rows_XW.shape
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        q_XWKGD = q_NQD[self.rows_XW.view(-1)].view(count, width, kv_heads, -1, head_dim)
        q_XKrD = q_XWKGD.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head_dim)  # r = G * W rows
        out_XKrD = functional.scaled_dot_product_attention(
            q_XKrD,
            keys[self.slots_X, :, : self.length],
            values[self.slots_X, :, : self.length],
            attn_mask=mask_X1rL,
            scale=scale,
        )
        out_XKGWD = out_XKrD.view(count, kv_heads, -1, width, head_dim)
        out_SE = out_XKGWD.permute(0, 3, 1, 2, 4).reshape(count * width, -1)
        return out_SE[self.places_E]
