"""Float32 matrix products of training: by bfloat16 tiles (`amx_gemm.c`), or by vectors (`vector_gemm.c`).

Tiles are as exact as float32: each number is split into three bfloat16 parts, whose products are added up in float32.
N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Scratch

__all__ = ["Gemm", "load", "load_tiles", "load_vectors"]


class _Part(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("stride", ctypes.c_int64), ("lines", ctypes.c_int64)]


class Gemm:
    """The products of a linear layer: output, gradient of its input, gradient of its weight.

    All tensors are float32 on the CPU, their last dimension contiguous.
    """

    def __init__(self, code: ctypes.CDLL, product: str, room: str) -> None:
        """product, room: names of the compiled functions."""
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._product, self._room = getattr(code, product), getattr(code, room)
        self._product.restype = None
        self._product.argtypes = (
            place, count, number, place, count, number, place, count, count, count, number, place, number,
        )  # fmt: skip
        self._room.argtypes, self._room.restype = (count,), count
        self._scratch = Scratch()

    def linear(self, x_NI: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """x W^T of several weights [O_i, I], side by side: [N, sum of O_i]."""
        out_NO = x_NI.new_empty(len(x_NI), sum(len(weight) for weight in weights))
        return self._multiply(x_NI, weights, out_NO)

    def input_grad(self, grad_NO: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradient of x, from that of `linear`'s result: [N, I]."""
        grad_NI = grad_NO.new_empty(len(grad_NO), weights[0].shape[1])
        parts = grad_NO.split([len(weight) for weight in weights], dim=1)
        for index, (part_NO, weight_OI) in enumerate(zip(parts, weights, strict=True)):
            self._multiply(part_NO, [weight_OI], grad_NI, across=True, add=index > 0)
        return grad_NI

    def weight_grad(self, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Gradient of the weights, one below the other: [sum of O_i, I]."""
        grad_OI = grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1])
        return self._multiply(grad_NO, [x_NI], grad_OI, left_across=True, across=True)

    def add_weight_grad(self, sum_OI: torch.Tensor, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Add the gradient of the weights to `sum_OI`."""
        self._multiply(grad_NO, [x_NI], sum_OI, left_across=True, across=True, add=True)

    def _multiply(
        self,
        left: torch.Tensor,
        right: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        left_across: bool = False,
        across: bool = False,
        add: bool = False,
    ) -> torch.Tensor:
        """out (+)= left right, each operand `across` where its rows are what is summed over."""
        rows, depth = (left.shape[1], left.shape[0]) if left_across else left.shape
        parts = (_Part * len(right))(
            *[_Part(part.data_ptr(), part.stride(0), part.shape[1 if across else 0]) for part in right]
        )
        threads = torch.get_num_threads()
        self._product(
            left.data_ptr(), left.stride(0), left_across, ctypes.addressof(parts), len(right), across,
            out.data_ptr(), out.stride(0), rows, depth, add, self._scratch.place(self._room(threads)), threads,
        )  # fmt: skip
        return out


@functools.cache
def load_tiles() -> Gemm | None:
    """Products by tiles, or None where nothing is compiled or the processor has none."""
    code = build.load()
    return Gemm(code, "product", "amx_gemm_room") if code is not None and code.tiles_ready() else None


@functools.cache
def load_vectors() -> Gemm | None:
    """Products by vectors, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load()
    return Gemm(code, "vector_product", "vector_gemm_room") if code is not None and code.vectors_ready() else None


@functools.cache
def load() -> Gemm | None:
    """The fastest products for this processor; None = torch's.

    torch's come from MKL, whose kernels for Intel's processors are at least as fast as ours by vectors; for others' it
    has slower ones.
    """
    return load_tiles() or (None if build.is_intel() else load_vectors())
