"""Float32 products with few rows by 8-bit integers (`int8_gemm.c`), on processors with AMX tiles.

Ozaki scheme on integer units (Ootomo, Ozaki & Yokota 2024, arXiv:2306.11975): numbers become fixed-point with a scale
for each row, as a sum of 8-bit digits (weights three, inputs four), whose products are exact. Weights are packed
beforehand. As exact as float32, in three quarters of its memory.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Arena, Scratch

__all__ = ["Int8Gemm", "PackedMatrix", "load"]


class Int8Gemm:
    """The compiled functions over float32 tensors on the CPU, their last dimension contiguous."""

    def __init__(self, code: ctypes.CDLL) -> None:
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self.size, self._room, self.pack, self.product = (
            getattr(code, name) for name in ("packed_size", "int8_gemm_room", "pack_right", "product_packed")
        )
        self.size.argtypes, self.size.restype = (count, count), count
        self._room.argtypes, self._room.restype = (count,), count
        self.pack.argtypes, self.pack.restype = (place, count, count, place, number), None
        self.product.restype = None
        self.product.argtypes = (place, count, place, place, count, count, count, count, number, place, number)
        self._scratch = Scratch()

    def place_for(self, threads: int) -> int:
        """Address of scratch memory for the rows while they are multiplied."""
        return self._scratch.place(self._room(threads))


class PackedMatrix:
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: Int8Gemm, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        self._memory = arena.take(gemm.size(self.outputs, self.inputs))
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
def load() -> Int8Gemm | None:
    """The functions, or None where nothing is compiled or the processor has no such tiles."""
    code = build.load()
    return Int8Gemm(code) if code is not None and code.tiles_ready() else None
