"""Inputs of a decoding step on a GPU: sizes rounded up, and everything that varies in one tensor.

One upload carries the newest tokens of the slots, how each is drawn, and appended observations. The shapes that remain
(`StepShape`) are few, so that most steps are replays of a recording (`cuda_graphs`). Rows and tokens that only fill up
a size write to the padding slot.

n active slots, R rows after rounding, X extended slots, W tokens of the longest of them, E = X W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.inference.cuda_graphs import round_up_length, round_up_rows, round_up_size
from rl_core.inference.decoder_layers import AppendedTokens, HostAppendedTokens
from rl_core.inference.sampling import RowDrawing
from rl_core.settings import SamplingSettings

# Steps with more appended tokens keep the device busy without a recording, which would need memory for them.
MAX_RECORDED_APPENDED = 2048
MAX_TOP = 20  # most likely tokens of a recorded step, if any row wants some
_NUM_ROW_VALUES = 9  # token, position, uniform, slot, then `build_drawing_rows`


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that distinguishes two recorded steps of one decoder."""

    rows: int  # R
    length: int  # attended prefix
    appended_rows: int  # X; 0 = no observations
    appended_width: int  # W
    is_restricted: bool  # some row draws from part of the vocabulary
    num_top: int  # most likely tokens returned for each row
    seen_address: int | None  # of the tokens that a repetition penalty counts; None = no penalty

    @property
    def num_appended(self) -> int:
        """Number of appended tokens, E."""
        return self.appended_rows * self.appended_width


def build_drawing_rows(settings: Sequence[SamplingSettings]) -> np.ndarray:
    """Build temperature, top_k, top_p, log min_p and repetition penalty of each row, float64 [5, n]."""
    rows = [
        (
            item.temperature,
            item.top_k,
            item.top_p,
            math.log(item.min_p) if item.min_p > 0 else -math.inf,
            item.repetition_penalty,
        )
        for item in settings
    ]
    return np.array(rows, dtype=np.float64).T


@dataclass(slots=True)
class HostStep:
    """A decoding step as the slot table describes it."""

    tokens_n: np.ndarray  # newest token of each active slot
    positions_n: np.ndarray
    uniforms_n: np.ndarray
    drawing_5n: np.ndarray  # see `build_drawing_rows`; [5, 1] = all rows alike
    is_restricted: bool = False
    appended: HostAppendedTokens | None = None
    seen: torch.Tensor | None = None  # bool [slots + 1, V] on the device: tokens of each slot
    num_top: int = 0

    def round_shape(self, slots: int, max_length: int) -> StepShape:
        """Return the rounded shape for a decoder of so many slots."""
        rows = min(round_up_rows(len(self.tokens_n)), slots)
        longest, appended = int(self.positions_n.max()), self.appended
        appended_rows = appended_width = 0
        if appended is not None:
            longest = max(longest, int(appended.positions_XW.max()))
            appended_rows = round_up_size(len(appended.slots_X), 1, classes=2)
            appended_width = round_up_size(appended.positions_XW.shape[1], 8, classes=2)
        return StepShape(
            rows,
            min(round_up_length(longest + 1), max_length),
            appended_rows,
            appended_width,
            self.is_restricted,
            MAX_TOP if self.num_top else 0,
            self.seen.data_ptr() if self.seen is not None else None,
        )

    def pack(self, shape: StepShape, padding_slot: int) -> np.ndarray:
        """Pack the step into float64 [9 R + X + 3 E], which holds token ids exactly."""
        count, rows = len(self.tokens_n), shape.rows
        values_9R = np.zeros((_NUM_ROW_VALUES, rows))
        values_9R[3] = padding_slot
        values_9R[[4, 6, 8]] = 1.0  # temperature, top_p and penalty of padding
        values_9R[7] = -math.inf
        values_9R[:3, :count] = self.tokens_n, self.positions_n, self.uniforms_n
        values_9R[3, :count] = np.arange(count)
        values_9R[4:, :count] = self.drawing_5n
        if self.appended is None:
            return values_9R.reshape(-1)
        size = (shape.appended_rows, shape.appended_width)
        slots_X = np.full(shape.appended_rows, padding_slot, dtype=np.float64)
        tokens_XW, positions_XW = np.zeros(size), np.zeros(size)
        slots_XW = np.full(size, padding_slot, dtype=np.float64)
        appended = self.appended
        extended, width = appended.positions_XW.shape
        slots_X[:extended] = appended.slots_X
        tokens_XW[:extended, :width] = appended.tokens_XW
        positions_XW[:extended, :width] = appended.positions_XW
        slots_XW[:extended, :width] = np.where(
            appended.is_inside_XW, appended.slots_X[:, None], padding_slot
        )
        parts = (values_9R, slots_X, tokens_XW, positions_XW, slots_XW)
        return np.concatenate([part.reshape(-1) for part in parts])


@dataclass(slots=True)
class DeviceStep:
    """A packed step on the device."""

    tokens_N: torch.Tensor  # int64 [R + E]
    positions_N: torch.Tensor
    uniforms_R: torch.Tensor
    slots_R: torch.Tensor
    drawing: RowDrawing
    penalties_R: torch.Tensor
    appended: AppendedTokens | None

    @classmethod
    def unpack(cls, inputs: torch.Tensor, shape: StepShape) -> DeviceStep:
        """Unpack `HostStep.pack`, by operations that a recording repeats."""
        values_9R = inputs[: _NUM_ROW_VALUES * shape.rows].view(_NUM_ROW_VALUES, shape.rows)
        tokens_N, positions_N, slots_R = (values_9R[row].long() for row in (0, 1, 3))
        temperature_R, top_k_R, top_p_R, log_min_p_R, penalties_R = values_9R[4:]
        drawing = RowDrawing(
            temperature_R.float(), top_k_R.long(), top_p_R, log_min_p_R.float(), shape.is_restricted
        )
        appended = None
        if shape.num_appended:
            rest = inputs[_NUM_ROW_VALUES * shape.rows :].long()
            slots_X, rest = rest[: shape.appended_rows], rest[shape.appended_rows :]
            extra_tokens_E, extra_positions_E, slots_E = rest.view(3, -1)
            size = (shape.appended_rows, shape.appended_width)
            order_E = torch.arange(shape.num_appended, device=inputs.device)
            appended = AppendedTokens(
                slots_X=slots_X,
                slots_E=slots_E,
                rows_XW=(order_E + shape.rows).view(size),
                positions_XW=extra_positions_E.view(size),
                flat_indices_E=order_E,
                length=shape.length,
            )
            tokens_N = torch.cat([tokens_N, extra_tokens_E])
            positions_N = torch.cat([positions_N, extra_positions_E])
        return cls(
            tokens_N, positions_N, values_9R[2], slots_R, drawing, penalties_R.float(), appended
        )
