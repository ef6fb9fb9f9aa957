"""Float32 products with few rows by vectors (`vector_gemm.c`), with weights that are packed beforehand.

torch's library copies a weight at every call; with few rows that takes nearly as long as the product.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Arena
from rl_core.cpu.packed_products import PackedProducts

__all__ = ["PackedVectors", "load"]


class PackedVectors:
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        self.size: int = gemm.size(self.outputs, self.inputs)
        self._memory = arena.take(self.size)
        self.place: int = self._memory.data_ptr()
        gemm.pack(weight_OI.data_ptr(), self.outputs, self.inputs, self.place, torch.get_num_threads())

    def multiply(self, x_NI: torch.Tensor, out_NO: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """out (+)= x W^T."""
        threads = torch.get_num_threads()
        self.gemm.product(
            x_NI.data_ptr(), x_NI.stride(0), self.place, out_NO.data_ptr(), out_NO.stride(0),
            len(x_NI), self.outputs, self.inputs, add, self.gemm.place_for(threads), threads,
        )  # fmt: skip
        return out_NO


@functools.cache
def load() -> PackedProducts | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load()
    return PackedProducts(code, "vector") if code is not None and code.vectors_ready() else None
