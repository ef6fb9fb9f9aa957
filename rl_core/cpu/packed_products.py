"""Compiled products of float32 rows with weights that are packed beforehand (`int8_gemm.c`, `vector_gemm.c`).

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes

import torch

from rl_core.cpu.allocator import Scratch

__all__ = ["PackedProducts", "PackedWeight"]


class PackedProducts:
    """One family of compiled functions over float32 tensors on the CPU, their last dimension contiguous.

    Args:
        code: the compiled library.
        family: the beginning of its functions' names, `int8` or `vector`.
    """

    def __init__(self, code: ctypes.CDLL, family: str) -> None:
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        names = ("packed_size", "packed_room", "pack_right", "product_packed", "packed_part")
        self.size, self.room, self.pack, self.product, self.part = (getattr(code, f"{family}_{name}") for name in names)
        self.size.argtypes, self.size.restype = (count, count), count
        self.room.argtypes, self.room.restype = (count,), count
        self.pack.argtypes, self.pack.restype = (place, count, count, place, number), None
        self.product.restype = None
        self.product.argtypes = (place, count, place, place, count, count, count, count, number, place, number)
        self._scratch = Scratch()

    def place_for(self, threads: int) -> int:
        """Address of scratch memory for the rows while they are multiplied."""
        return self._scratch.place(self.room(threads))


class PackedWeight:
    """A packed copy of a weight [O, I], at an address."""

    gemm: PackedProducts
    outputs: int
    inputs: int
    place: int

    def multiply(self, x_NI: torch.Tensor, out_NO: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """out (+)= x W^T."""
        threads = torch.get_num_threads()
        self.gemm.product(
            x_NI.data_ptr(), x_NI.stride(0), self.place, out_NO.data_ptr(), out_NO.stride(0),
            len(x_NI), self.outputs, self.inputs, add, self.gemm.place_for(threads), threads,
        )  # fmt: skip
        return out_NO
