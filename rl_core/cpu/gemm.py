"""Matrix products of training: in float32 by bfloat16 tiles (`amx_gemm.c`) or by vectors (`vector_gemm.c`), and in
bfloat16 by tiles or dot products (`bf16_linear.c`).

In float32, tiles are as exact as vectors: each number is split into three bfloat16 parts, whose products are added in
float32. In bfloat16, operands are float32 in memory and rounded for the product; sums and results are float32.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import ScratchMemory

BFLOAT16_VARIABLE = (
    "POSTTRAIN_BFLOAT16"  # environment variable: 1 = multiply in bfloat16 even if that is slower
)
_MIN_DOTS_GAIN = (
    1.25  # over float32: 0.50 on Emerald Rapids; on Zen 4 whole products take half the time
)
_is_row_invariant: ContextVar[bool] = ContextVar("row_by_row", default=False)


class _RowPart(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("stride", ctypes.c_int64), ("lines", ctypes.c_int64)]


class _Product(ctypes.Structure):
    _fields_ = [
        ("left", ctypes.c_void_p),
        ("left_stride", ctypes.c_int64),
        ("left_across", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("across", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("add", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix within a float32 tensor, starting at a row and column."""

    tensor: torch.Tensor
    row: int = 0
    column: int = 0
    width: int | None = None  # columns; None = to the end
    is_transposed: bool = False  # True = its rows are summed over
    height: int = 0  # number of rows of a transposed left operand

    @property
    def address(self) -> int:
        """Address of its first element."""
        return self.tensor.data_ptr() + 4 * (self.row * self.tensor.stride(0) + self.column)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.tensor.shape[1] - self.column if self.width is None else self.width

    def transpose_left(self, height: int) -> Operand:
        """Return the operand as a left one whose `height` rows are summed over."""
        return replace(self, is_transposed=True, height=height)


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """out (+)= left right, one of several products of a call."""

    left: Operand
    right: Sequence[Operand]  # side by side
    out: Operand
    rows: int
    add: bool = False


class Gemm:
    """The products of a linear layer: output, gradient of its input, gradient of its weight.

    All tensors are float32 on the CPU with a contiguous last dimension.
    """

    def __init__(self, code: ctypes.CDLL, product: str, room: str) -> None:
        """Bind the compiled functions named `product` and `room`."""
        count, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._product, self._room = getattr(code, product), getattr(code, room)
        self._product.restype = None
        self._product.argtypes = (
            pointer,
            count,
            number,
            pointer,
            count,
            number,
            pointer,
            count,
            count,
            count,
            number,
            pointer,
            number,
        )
        self._room.argtypes, self._room.restype = (count,), count
        self._products = getattr(code, f"{product}s", None)
        if self._products is not None:
            self._products.argtypes, self._products.restype = (
                (pointer, count, pointer, number),
                None,
            )
        self._scratch = ScratchMemory()

    def compute_linear(self, x_NI: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute x W^T of several weights [O_i, I], side by side: [N, sum of O_i]."""
        out_NO = x_NI.new_empty(len(x_NI), sum(len(weight) for weight in weights))
        return self._multiply_operands(x_NI, weights, out_NO)

    def compute_input_grad(
        self, grad_NO: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Compute the gradient of x from that of `compute_linear`'s result: [N, I]."""
        grad_NI = grad_NO.new_empty(len(grad_NO), weights[0].shape[1])
        parts = grad_NO.split([len(weight) for weight in weights], dim=1)
        for index, (part_NO, weight_OI) in enumerate(zip(parts, weights, strict=True)):
            self._multiply_operands(part_NO, [weight_OI], grad_NI, across=True, add=index > 0)
        return grad_NI

    def compute_weight_grad(self, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the weights, stacked: [sum of O_i, I]."""
        grad_OI = grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1])
        return self._multiply_operands(grad_NO, [x_NI], grad_OI, left_across=True, across=True)

    def add_weight_grad(
        self, sum_OI: torch.Tensor, grad_NO: torch.Tensor, x_NI: torch.Tensor
    ) -> None:
        """Add the gradient of the weights to `sum_OI`."""
        self._multiply_operands(grad_NO, [x_NI], sum_OI, left_across=True, across=True, add=True)

    def compute_products(self, products: Sequence[MatrixProduct]) -> None:
        """Compute several products by tiles in order, each as it would be alone."""
        assert self._products is not None
        parts = [
            _RowPart(
                part.address,
                part.tensor.stride(0),
                part.columns if part.is_transposed else part.tensor.shape[0],
            )
            for product in products
            for part in product.right
        ]
        table = (_RowPart * len(parts))(*parts)
        next_part = ctypes.addressof(table)
        structs = []
        for product in products:
            left, out = product.left, product.out
            structs.append(
                _Product(
                    left.address,
                    left.tensor.stride(0),
                    left.is_transposed,
                    next_part,
                    len(product.right),
                    product.right[0].is_transposed,
                    out.address,
                    out.tensor.stride(0),
                    product.rows,
                    left.height if left.is_transposed else left.columns,
                    product.add,
                )
            )
            next_part += len(product.right) * ctypes.sizeof(_RowPart)
        threads = torch.get_num_threads()
        product_table = (_Product * len(structs))(*structs)
        self._products(
            ctypes.addressof(product_table),
            len(structs),
            self._scratch.reserve_address(self._room(threads)),
            threads,
        )

    def _multiply_operands(
        self,
        left: torch.Tensor,
        right: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        left_across: bool = False,
        across: bool = False,
        add: bool = False,
    ) -> torch.Tensor:
        """Compute out (+)= left right; an operand is `across` if its rows are summed over."""
        rows, depth = (left.shape[1], left.shape[0]) if left_across else left.shape
        parts = (_RowPart * len(right))(
            *[
                _RowPart(part.data_ptr(), part.stride(0), part.shape[1 if across else 0])
                for part in right
            ]
        )
        threads = torch.get_num_threads()
        self._product(
            left.data_ptr(),
            left.stride(0),
            left_across,
            ctypes.addressof(parts),
            len(right),
            across,
            out.data_ptr(),
            out.stride(0),
            rows,
            depth,
            add,
            self._scratch.reserve_address(self._room(threads)),
            threads,
        )
        return out


@functools.cache
def load_tiles() -> Gemm | None:
    """Load products by tiles; return None without compiled code or tiles."""
    code = build.load_library()
    if code is None or not code.tiles_ready():
        return None
    return Gemm(code, "product", "amx_gemm_room")


@functools.cache
def load_vectors() -> Gemm | None:
    """Load products by vectors; return None without compiled code or vectors of at least 8 numbers."""
    code = build.load_library()
    if code is None or not code.vectors_ready():
        return None
    return Gemm(code, "vector_product", "vector_gemm_room")


@functools.cache
def find_bf16_kernel() -> Literal["tiles", "dots"] | None:
    """Find the instructions that multiply bfloat16 faster than float32 here; return None without any or compiled code.

    AMX tiles are faster. Dot products (AVX-512 BF16) are timed once, in a millisecond: on AMD's processors they are
    twice as fast as float32, on Intel's with AMX switched off half as fast. POSTTRAIN_BFLOAT16=1 accepts slow ones.
    """
    code = build.load_library()
    if code is None or not code.vectors_ready():
        return None
    if code.tiles_ready():
        return "tiles"
    if not code.dots_ready():
        return None
    code.dots_gain.restype = ctypes.c_double
    is_fast = os.environ.get(BFLOAT16_VARIABLE) == "1" or code.dots_gain() >= _MIN_DOTS_GAIN
    return "dots" if is_fast else None


@functools.cache
def load_bf16_gemm() -> Gemm | None:
    """Load products of operands rounded to bfloat16; return None if `find_bf16_kernel` does."""
    code, kernel = build.load_library(), find_bf16_kernel()
    if code is None or kernel is None:
        return None
    room = "amx_gemm_room" if kernel == "tiles" else "bf16_linear_room"
    return Gemm(code, f"bf16_{kernel}_linear", room)


def multiplies_in_bfloat16() -> bool:
    """Return whether autocast to bfloat16 is on and this module computes its products."""
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and load_bf16_gemm() is not None
    )


@contextmanager
def use_row_invariant_products() -> Iterator[None]:
    """Use products whose rows are bit-identical regardless of other rows, even if torch's are faster.

    Applies to the thread that enters, and to backward passes that it runs on a CPU.
    """
    token = _is_row_invariant.set(True)
    try:
        yield
    finally:
        _is_row_invariant.reset(token)


def load_gemm() -> Gemm | None:
    """Load the fastest products for this processor; None = torch's.

    torch's products come from MKL. For Intel processors its kernels are at least as fast as ours by vectors, but
    their summation order depends on the number of rows (see `use_row_invariant_products`); for other processors it
    has slower ones.
    """
    tiles = load_tiles()
    if tiles is not None:
        return tiles
    uses_vectors = _is_row_invariant.get() or not build.is_intel_processor()
    return load_vectors() if uses_vectors else None
