"""Float32 products with few rows by vectors (`vector_gemm.c`), with weights that are packed beforehand.

torch's library copies a weight at every call; with few rows that takes nearly as long as the product.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Arena, Scratch

__all__ = ["PackedVectors", "VectorProducts", "load"]


class VectorProducts:
    """The compiled functions over float32 tensors on the CPU, their last dimension contiguous."""

    def __init__(self, code: ctypes.CDLL) -> None:
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        names = ("packed_size", "packed_room", "pack_right", "product_packed", "packed_part")
        self.size, self.room, self.pack, self.product, self.part = (getattr(code, f"vector_{name}") for name in names)
        self.size.argtypes, self.size.restype = (count, count), count
        self.room.argtypes, self.room.restype = (count,), count
        self.pack.argtypes, self.pack.restype = (place, count, count, place, number), None
        self.product.restype = None
        self.product.argtypes = (place, count, place, place, count, count, count, count, number, place, number)
        self._scratch = Scratch()

    def place_for(self, threads: int) -> int:
        """Address of scratch memory for the rows while they are multiplied."""
        return self._scratch.place(self.room(threads))


class PackedVectors:
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: VectorProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
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
def load() -> VectorProducts | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load()
    return VectorProducts(code) if code is not None and code.vectors_ready() else None
