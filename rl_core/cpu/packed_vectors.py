"""Float32 products with few rows by vectors (`vector_gemm.c`), with weights that are packed beforehand.

torch's library copies a weight at every call; with few rows that takes nearly as long as the product.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Arena
from rl_core.cpu.packed_products import PackedProducts, PackedWeight

__all__ = ["PackedVectors", "load"]


class PackedVectors(PackedWeight):
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        self.size: int = gemm.size(self.outputs, self.inputs)
        self._memory = arena.take(self.size)
        self.place: int = self._memory.data_ptr()
        gemm.pack(weight_OI.data_ptr(), self.outputs, self.inputs, self.place, torch.get_num_threads())


@functools.cache
def load() -> PackedProducts | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load()
    return PackedProducts(code, "vector") if code is not None and code.vectors_ready() else None
