"""Compiled products of float32 rows with weights that are packed beforehand (`int8_gemm.c`, `vector_gemm.c`).

N rows, I inputs, O outputs.

Float32 products with few rows by vectors (`vector_gemm.c`), with weights that are packed beforehand.

torch's library copies a weight at every call; with few rows that takes nearly as long as the product.

N rows, I inputs, O outputs.

Float32 products with few rows by 8-bit integers (`int8_gemm.c`), on processors with AMX tiles.

Ozaki scheme on integer units (Ootomo, Ozaki & Yokota 2024, arXiv:2306.11975): numbers become fixed-point with a scale
for each row, as a sum of 8-bit digits (weights three, inputs four), whose products are exact. Weights are packed
beforehand. In three quarters of float32's memory, and as exact for usual lines: a weight is rounded to 2^-24 of the
largest in its line, which matters where that is far above the others and meets a small input. All weights of such an
input are multiplied in float32 instead (as outlier features are in LLM.int8, Dettmers et al. 2022, arXiv:2208.07339).

N rows, I inputs, O outputs.

Description of the code that float32 runs on this processor: by tiles, by vectors, or torch's kernels alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass

import torch

from rl_core.cpu import build, gemm
from rl_core.cpu.allocator import Arena, ScratchMemory
from rl_core.timing import add_to_total


class PackedProducts:
    """One family of compiled functions over float32 tensors on the CPU, their last dimension contiguous.

    Args:
        code: the compiled library.
        family: the beginning of its functions' names, `int8` or `vector`.
    """

    def __init__(self, code: ctypes.CDLL, family: str) -> None:
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        names = ("packed_size", "packed_room", "pack_right", "product_packed", "packed_part")
        self.size, self.room, self.pack, self.product, self.part = (
            getattr(code, f"{family}_{name}") for name in names
        )
        self.size.argtypes, self.size.restype = (count, count), count
        self.room.argtypes, self.room.restype = (count,), count
        self.pack.argtypes, self.pack.restype = (place, count, count, place, number), None
        self.product.restype = None
        self.product.argtypes = (
            place,
            count,
            place,
            place,
            count,
            count,
            count,
            count,
            number,
            place,
            number,
        )
        self._scratch = ScratchMemory()

    def reserve_scratch(self, threads: int) -> int:
        """Address of scratch memory for the rows while they are multiplied."""
        return self._scratch.reserve_address(self.room(threads))


class PackedWeight:
    """A packed copy of a weight [O, I], at an address."""

    gemm: PackedProducts
    outputs: int
    inputs: int
    address: int

    def multiply_rows(
        self, x_NI: torch.Tensor, out_NO: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """out (+)= x W^T."""
        threads = torch.get_num_threads()
        self.gemm.product(
            x_NI.data_ptr(),
            x_NI.stride(0),
            self.address,
            out_NO.data_ptr(),
            out_NO.stride(0),
            len(x_NI),
            self.outputs,
            self.inputs,
            add,
            self.gemm.reserve_scratch(threads),
            threads,
        )
        return out_NO


class PackedVectors(PackedWeight):
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        self.size: int = gemm.size(self.outputs, self.inputs)
        self._memory = arena.allocate_bytes(self.size)
        self.address: int = self._memory.data_ptr()
        gemm.pack(
            weight_OI.data_ptr(), self.outputs, self.inputs, self.address, torch.get_num_threads()
        )


@functools.cache
def load_packed_vectors() -> PackedProducts | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load_library()
    return PackedProducts(code, "vector") if code is not None and code.vectors_ready() else None


# times the typical weight of its line: above that three digits lose what float32 keeps
MAX_LINE_RATIO = 16.0
_TYPICAL_OF_NORMAL = 0.6069  # (mean |z|^(1/4))^4 of normal z with rms 1
# weights that are looked at together: their temporaries stay in the processor's cache
_WEIGHTS_PER_PART = 2**18
_LINES_PER_BLOCK = 16  # lines of a block, as in int8_gemm.c


class PackedMatrix(PackedWeight):
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        inputs_C = find_outlying_inputs(weight_OI)
        self.size: int = gemm.size(self.outputs, self.inputs)
        size, chosen = self.size, len(inputs_C)
        head, width = _round_up(8 * (1 + chosen), 64), _round_up(self.outputs, _LINES_PER_BLOCK)
        self._memory = arena.allocate_bytes(size + head + 4 * width * chosen)
        self.address: int = self._memory.data_ptr()
        kept = self._memory[size:]
        kept[: 8 * (1 + chosen)].view(torch.int64).copy_(
            torch.cat([inputs_C.new_tensor([chosen]), inputs_C])
        )
        if chosen:
            weights_CO = (
                kept[head : head + 4 * width * chosen].view(torch.float32).view(chosen, width)
            )
            weights_CO[:, self.outputs :] = 0.0
            weights_CO[:, : self.outputs] = weight_OI[:, inputs_C].t()
            weight_OI = weight_OI.index_fill(1, inputs_C, 0.0)
        gemm.pack(
            weight_OI.data_ptr(), self.outputs, self.inputs, self.address, torch.get_num_threads()
        )
        add_to_total("packed_weights", self.outputs * self.inputs)
        add_to_total("packed_weights_in_float", self.outputs * chosen)


def find_outlying_inputs(weight_OI: torch.Tensor) -> torch.Tensor:
    """Inputs that have a weight more than `MAX_LINE_RATIO` times the typical one of its line, int64 [C], ascending.

    Typical is (mean |w|^(1/4))^4 over the line's weights other than 0, over its value for normal numbers of rms 1: the
    root mean square of usual lines, hardly moved by outliers. A weight within the bound is rounded by up to
    2^-24 LARGEST_IN_LINE = 9.5e-7 of a typical one.
    """
    found: list[torch.Tensor] = []
    inputs = weight_OI.shape[1]
    for part_OI in weight_OI.split(max(1, _WEIGHTS_PER_PART // inputs)):
        sizes_OI = part_OI.abs()
        largest_O, sums_O = sizes_OI.amax(1), sizes_OI.sqrt_().sqrt_().sum(1)
        limits_O = (sums_O / inputs) ** 4 * (MAX_LINE_RATIO / _TYPICAL_OF_NORMAL)
        beyond_O = (largest_O > limits_O).nonzero().squeeze(1)  # zeros counted: more than there are
        lines_OI = part_OI[beyond_O].abs()
        while lines_OI.numel():  # without the largest, others may be beyond the bound
            sums_O, counts_O = lines_OI.sqrt().sqrt_().sum(1), lines_OI.count_nonzero(1)
            limits_O = (sums_O / counts_O) ** 4 * (MAX_LINE_RATIO / _TYPICAL_OF_NORMAL)
            beyond_C = (lines_OI > limits_O[:, None]).any(0).nonzero().squeeze(1)
            if not len(beyond_C):
                break
            found.append(beyond_C)
            lines_OI[:, beyond_C] = 0.0
    return torch.cat(found).unique() if found else torch.empty(0, dtype=torch.int64)


def _round_up(number: int, size: int) -> int:
    return number + -number % size


@functools.cache
def load_int8_gemm() -> PackedProducts | None:
    """The functions, or None where nothing is compiled or the processor has no such tiles."""
    code = build.load_library()
    return PackedProducts(code, "int8") if code is not None and code.tiles_ready() else None


@dataclass(frozen=True, slots=True)
class ProcessorCode:
    """Code of a processor, for people."""

    detail: str
    is_fast: bool = True  # False = something could be done about it, or the slowest code runs
    advice: str = ""


def describe_processor_code() -> ProcessorCode:
    """The code that runs here; compiles it where that has not been done."""
    code = build.load_library()
    if code is None:
        if os.environ.get("POSTTRAIN_NATIVE") == "0":
            return ProcessorCode(
                "torch's kernels alone: POSTTRAIN_NATIVE=0 turns compiled code off",
                False,
                "unset it",
            )
        return ProcessorCode(
            "torch's kernels alone, the slowest way",
            False,
            "install a C compiler (cc, gcc or clang)",
        )
    training = (
        "tiles (AMX)" if gemm.load_tiles() else "vectors" if gemm.load_gemm() else "torch's library"
    )
    rollouts = (
        "tiles (AMX)"
        if load_int8_gemm()
        else "vectors"
        if load_packed_vectors()
        else "torch's library"
    )
    cost = (
        ""
        if gemm.load_tiles()
        else "; AMX would be about 1.5 times as fast (docs/benchmarks/speed.md)"
    )
    return ProcessorCode(
        f"compiled for vectors of {code.vector_numbers()} numbers; products in training by {training}, in rollouts by "
        f"{rollouts}{cost}"
    )
