"""RMS norms and SwiGLU gates, forward and backward, in compiled code (`norm_and_gate.c`); for training.

All tensors are contiguous float32 on the CPU. N tokens, H hidden, I width of the MLP.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from rl_core.cpu import build

__all__ = ["WIDTH", "NormAndGate", "load"]

WIDTH = 16  # as in vectors.h: widths have to be multiples of it
_SUMMED = 64  # as in norm_and_gate.c


class NormAndGate:
    """Forward and backward of norms and gates, on torch's threads."""

    def __init__(self, code: ctypes.CDLL) -> None:
        count, number, real, place = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        self._code = code
        for name, kinds in {
            "norm_forward": (place, place, place, real, count, count, place, place, place, number),
            "norm_backward": (place, place, place, place, place, count, count, place, place, number),
            "gated_forward": (place, count, count, place, number),
            "gated_backward": (place, place, count, count, place, number),
        }.items():
            function = getattr(code, name)
            function.argtypes, function.restype = kinds, None

    def norm(
        self, x_NH: torch.Tensor, added_NH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x + added, if anything is; its RMS norm times the weight; 1 / rms [N]."""
        sum_NH = torch.empty_like(x_NH) if added_NH is not None else x_NH
        normed_NH, scale_N = torch.empty_like(x_NH), x_NH.new_empty(len(x_NH))
        self._code.norm_forward(
            x_NH.data_ptr(), _place(added_NH), weight_H.data_ptr(), eps, *x_NH.shape,
            sum_NH.data_ptr(), normed_NH.data_ptr(), scale_N.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return sum_NH, normed_NH, scale_N

    def norm_grad(
        self,
        grad_NH: torch.Tensor,
        beside_NH: torch.Tensor | None,
        x_NH: torch.Tensor,
        scale_N: torch.Tensor,
        weight_H: torch.Tensor,
        *,
        with_weight: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of what was normed, `beside_NH` added to it, and of the weight [H]."""
        found_NH = torch.empty_like(x_NH)
        sums = x_NH.new_empty(-(-len(x_NH) // _SUMMED), x_NH.shape[1]) if with_weight else None
        self._code.norm_backward(
            grad_NH.data_ptr(), _place(beside_NH), x_NH.data_ptr(), scale_N.data_ptr(), weight_H.data_ptr(),
            *x_NH.shape, found_NH.data_ptr(), _place(sums), torch.get_num_threads(),
        )  # fmt: skip
        return found_NH, sums.sum(0) if sums is not None else None

    def gated(self, both_NI: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [gate, up] side by side: [N, 2 I] -> [N, I]."""
        rows, width = both_NI.shape[0], both_NI.shape[1] // 2
        out_NI = both_NI.new_empty(rows, width)
        self._code.gated_forward(both_NI.data_ptr(), rows, width, out_NI.data_ptr(), torch.get_num_threads())
        return out_NI

    def gated_grad(self, both_NI: torch.Tensor, grad_NI: torch.Tensor) -> torch.Tensor:
        """The gradient of `both_NI`."""
        found_NI = torch.empty_like(both_NI)
        self._code.gated_backward(
            both_NI.data_ptr(), grad_NI.data_ptr(), *grad_NI.shape, found_NI.data_ptr(), torch.get_num_threads()
        )
        return found_NI


def _place(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


@functools.cache
def load() -> NormAndGate | None:
    """The functions, or None where nothing is compiled."""
    code = build.load()
    return NormAndGate(code) if code is not None else None
