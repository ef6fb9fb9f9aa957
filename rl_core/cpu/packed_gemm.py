"""Products of few float32 rows with weights packed in advance: float32 weights for vectors (`vector_gemm.c`) or as
8-bit integers (`int8_gemm.c`), bfloat16 weights as they are (`bf16_gemm.c`, `bf16_tiles.c`).

torch's library copies a weight at every call; with few rows that takes nearly as long as the product.

The 8-bit products need AMX tiles. They follow the Ozaki scheme on integer units (Ootomo, Ozaki & Yokota 2024,
arXiv:2306.11975): numbers become fixed-point with one scale per row, as a sum of 8-bit digits (weights three, inputs
four) whose products are exact. Packed weights take three quarters of float32's memory and are as exact for usual
rows: a weight is rounded to 2^-24 of the largest in its row, which matters only if that is far above the others and
meets a small input. All weights of such an input are multiplied in float32 instead (like outlier features in
LLM.int8, Dettmers et al. 2022, arXiv:2208.07339).

bfloat16 weights take half of float32's memory. Where products in bfloat16 are faster (`gemm.find_bf16_kernel`), rows
are rounded to bfloat16, too, as in training; elsewhere weights are widened, and results have the bits of float32
products.

N rows, I inputs, O outputs.
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

# A weight above this multiple of its row's typical one loses precision in three digits that float32 would keep.
MAX_LINE_RATIO = 16.0
_TYPICAL_OF_NORMAL = 0.6069  # (mean |z|^(1/4))^4 of normal z with rms 1
_WEIGHTS_PER_PART = 2**18  # processed together, so that temporaries stay in the processor's cache
_LINES_PER_BLOCK = 16  # as in int8_gemm.c


class PackedProducts:
    """One family of compiled functions over float32 tensors on the CPU with a contiguous last dimension.

    Args:
        code: the compiled library.
        family: prefix of its functions' names: `int8`, `vector` or `bf16`.
        kernel: of bfloat16 products: `widened`, `dots` or `tiles`.
    """

    def __init__(self, code: ctypes.CDLL, family: str, kernel: str | None = None) -> None:
        count, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self.kernel = kernel
        names = ["packed_size", "packed_room", "pack_right"]
        names += (
            ["product_packed", "packed_part"]
            if kernel is None
            else [f"{kernel}_product", f"{kernel}_part"]
        )
        self.size, self.room, self.pack, self.product, self.part = (
            getattr(code, f"{family}_{name}") for name in names
        )
        self.size.argtypes, self.size.restype = (count, count), count
        self.room.argtypes, self.room.restype = (count,), count
        self.pack.argtypes, self.pack.restype = (pointer, count, count, pointer, number), None
        self.product.restype = None
        self.product.argtypes = (
            pointer,
            count,
            pointer,
            pointer,
            count,
            count,
            count,
            count,
            number,
            pointer,
            number,
        )
        self._scratch = ScratchMemory()

    def reserve_scratch(self, threads: int) -> int:
        """Return the address of scratch memory for the rows of a product."""
        return self._scratch.reserve_address(self.room(threads))


class PackedWeight:
    """A packed copy of a weight [O, I] at an address."""

    gemm: PackedProducts
    outputs: int
    inputs: int
    address: int

    def multiply_rows(
        self, x_NI: torch.Tensor, out_NO: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """Compute out (+)= x W^T."""
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
    """A copy of a contiguous weight [O, I], packed for vectors: float32, or bfloat16 for products of that family."""

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
    """Load the functions; return None without compiled code or vectors of at least 8 numbers."""
    code = build.load_library()
    return PackedProducts(code, "vector") if code is not None and code.vectors_ready() else None


@functools.cache
def load_bf16_products() -> PackedProducts | None:
    """Load the fastest products with bfloat16 weights; return None without compiled code or vectors of at least 8
    numbers.
    """
    code = build.load_library()
    if code is None or not code.vectors_ready():
        return None
    return PackedProducts(code, "bf16", gemm.find_bf16_kernel() or "widened")


class PackedMatrix(PackedWeight):
    """A copy of a contiguous weight [O, I], packed for 8-bit products."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        inputs_C = find_outlying_inputs(weight_OI)
        self.size: int = gemm.size(self.outputs, self.inputs)
        size, num_outliers = self.size, len(inputs_C)
        header_size = _round_up(8 * (1 + num_outliers), 64)
        width = _round_up(self.outputs, _LINES_PER_BLOCK)
        weights_size = 4 * width * num_outliers
        self._memory = arena.allocate_bytes(size + header_size + weights_size)
        self.address: int = self._memory.data_ptr()
        # after the packed weight: the outlying inputs, then their weights in float32
        outliers = self._memory[size:]
        header = torch.cat([inputs_C.new_tensor([num_outliers]), inputs_C])
        outliers[: 8 * (1 + num_outliers)].view(torch.int64).copy_(header)
        if num_outliers:
            memory = outliers[header_size : header_size + weights_size]
            weights_CO = memory.view(torch.float32).view(num_outliers, width)
            weights_CO[:, self.outputs :] = 0.0
            weights_CO[:, : self.outputs] = weight_OI[:, inputs_C].t()
            weight_OI = weight_OI.index_fill(1, inputs_C, 0.0)
        gemm.pack(
            weight_OI.data_ptr(), self.outputs, self.inputs, self.address, torch.get_num_threads()
        )
        add_to_total("packed_weights", self.outputs * self.inputs)
        add_to_total("packed_weights_in_float", self.outputs * num_outliers)


def find_outlying_inputs(weight_OI: torch.Tensor) -> torch.Tensor:
    """Find inputs with a weight above `MAX_LINE_RATIO` times the typical one of its row, int64 [C], ascending.

    Typical is (mean |w|^(1/4))^4 over the row's non-zero weights, divided by its value for normal numbers of rms 1:
    for usual rows the root mean square, hardly moved by outliers. A weight within the bound is rounded by up to 2^-24
    LARGEST_IN_ROW = 9.5e-7 of a typical one.
    """
    outliers: list[torch.Tensor] = []
    inputs = weight_OI.shape[1]
    for part_OI in weight_OI.split(max(1, _WEIGHTS_PER_PART // inputs)):
        sizes_OI = part_OI.abs()
        largest_O, sums_O = sizes_OI.amax(1), sizes_OI.sqrt_().sqrt_().sum(1)
        limits_O = (sums_O / inputs) ** 4 * (MAX_LINE_RATIO / _TYPICAL_OF_NORMAL)
        beyond_O = (
            (largest_O > limits_O).nonzero().squeeze(1)
        )  # the mean includes zeros, so these are candidates only
        lines_OI = part_OI[beyond_O].abs()
        while lines_OI.numel():  # without the largest, others may exceed the bound
            sums_O, counts_O = lines_OI.sqrt().sqrt_().sum(1), lines_OI.count_nonzero(1)
            limits_O = (sums_O / counts_O) ** 4 * (MAX_LINE_RATIO / _TYPICAL_OF_NORMAL)
            beyond_C = (lines_OI > limits_O[:, None]).any(0).nonzero().squeeze(1)
            if not len(beyond_C):
                break
            outliers.append(beyond_C)
            lines_OI[:, beyond_C] = 0.0
    return torch.cat(outliers).unique() if outliers else torch.empty(0, dtype=torch.int64)


def _round_up(number: int, size: int) -> int:
    return number + -number % size


@functools.cache
def load_int8_gemm() -> PackedProducts | None:
    """Load the functions; return None without compiled code or AMX tiles."""
    code = build.load_library()
    return PackedProducts(code, "int8") if code is not None and code.tiles_ready() else None


@dataclass(frozen=True, slots=True)
class ProcessorCode:
    """A description of the processor's code path, for users."""

    detail: str
    is_fast: bool = True  # False = it can be improved, or the slowest code runs
    advice: str = ""


def describe_processor_code() -> ProcessorCode:
    """Describe the code that runs here; compile it if necessary."""
    code = build.load_library()
    if code is None:
        if os.environ.get("POSTTRAIN_NATIVE") == "0":
            return ProcessorCode(
                "torch's kernels alone: POSTTRAIN_NATIVE=0 turns compiled code off",
                False,
                "unset it",
            )
        return ProcessorCode(
            "torch's kernels alone, the slowest option",
            False,
            "install a C compiler (cc, gcc or clang)",
        )
    training = _name_products(gemm.load_tiles(), gemm.load_gemm())
    rollouts = _name_products(load_int8_gemm(), load_packed_vectors())
    bf16_products = load_bf16_products()
    bf16 = (
        ""
        if bf16_products is None
        else f", of bfloat16 weights {describe_bf16_kernel(bf16_products)}"
    )
    cost = "; AMX would be about 1.5 times as fast (docs/benchmarks/speed.md)"
    return ProcessorCode(
        f"compiled for vectors of {code.vector_numbers()} numbers; products in training by {training}, in rollouts by "
        f"{rollouts}{bf16}{'' if gemm.load_tiles() else cost}"
    )


def describe_bf16_kernel(products: PackedProducts) -> str:
    """Describe how products with bfloat16 weights are computed, for users."""
    return {
        "tiles": "by tiles (AMX)",
        "dots": "by dot products (AVX-512 BF16)",
    }.get(products.kernel or "", "widened to float32")


def _name_products(tiles: object | None, vectors: object | None) -> str:
    if tiles is not None:
        return "tiles (AMX)"
    return "vectors" if vectors is not None else "torch's library"
