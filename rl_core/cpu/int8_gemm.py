"""Float32 products with few rows by 8-bit integers (`int8_gemm.c`), on processors with AMX tiles.

Ozaki scheme on integer units (Ootomo, Ozaki & Yokota 2024, arXiv:2306.11975): numbers become fixed-point with a scale
for each row, as a sum of 8-bit digits (weights three, inputs four), whose products are exact. Weights are packed
beforehand. In three quarters of float32's memory, and as exact for usual lines: a weight is rounded to 2^-24 of the
largest in its line, which matters where that is far above the others and meets a small input. All weights of such an
input are multiplied in float32 instead (as outlier features are in LLM.int8, Dettmers et al. 2022, arXiv:2208.07339).

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools

import torch

from rl_core.cpu import build
from rl_core.cpu.allocator import Arena
from rl_core.cpu.packed_products import PackedProducts, PackedWeight
from rl_core.timing import count

__all__ = ["PackedMatrix", "load", "outlying_inputs"]

LARGEST_IN_LINE = 16.0  # times the typical weight of its line: above that three digits lose what float32 keeps
_TYPICAL_OF_NORMAL = 0.6069  # (mean |z|^(1/4))^4 of normal z with rms 1
_PART = 2**18  # weights that are looked at together: their temporaries stay in the processor's cache
_SIDE = 16  # lines of a block, as in int8_gemm.c


class PackedMatrix(PackedWeight):
    """A packed copy of a contiguous weight [O, I]."""

    def __init__(self, gemm: PackedProducts, weight_OI: torch.Tensor, arena: Arena) -> None:
        self.gemm = gemm
        self.outputs, self.inputs = weight_OI.shape
        inputs_C = outlying_inputs(weight_OI)
        self.size: int = gemm.size(self.outputs, self.inputs)
        size, chosen = self.size, len(inputs_C)
        head, width = _rounded_up(8 * (1 + chosen), 64), _rounded_up(self.outputs, _SIDE)
        self._memory = arena.take(size + head + 4 * width * chosen)
        self.place: int = self._memory.data_ptr()
        kept = self._memory[size:]
        kept[: 8 * (1 + chosen)].view(torch.int64).copy_(torch.cat([inputs_C.new_tensor([chosen]), inputs_C]))
        if chosen:
            weights_CO = kept[head : head + 4 * width * chosen].view(torch.float32).view(chosen, width)
            weights_CO[:, self.outputs :] = 0.0
            weights_CO[:, : self.outputs] = weight_OI[:, inputs_C].t()
            weight_OI = weight_OI.index_fill(1, inputs_C, 0.0)
        gemm.pack(weight_OI.data_ptr(), self.outputs, self.inputs, self.place, torch.get_num_threads())
        count("packed_weights", self.outputs * self.inputs)
        count("packed_weights_in_float", self.outputs * chosen)


def outlying_inputs(weight_OI: torch.Tensor) -> torch.Tensor:
    """Inputs that have a weight more than `LARGEST_IN_LINE` times the typical one of its line, int64 [C], ascending.

    Typical is (mean |w|^(1/4))^4 over the line's weights other than 0, over its value for normal numbers of rms 1: the
    root mean square of usual lines, hardly moved by outliers. A weight within the bound is rounded by up to
    2^-24 LARGEST_IN_LINE = 9.5e-7 of a typical one.
    """
    found: list[torch.Tensor] = []
    inputs = weight_OI.shape[1]
    for part_OI in weight_OI.split(max(1, _PART // inputs)):
        sizes_OI = part_OI.abs()
        largest_O, sums_O = sizes_OI.amax(1), sizes_OI.sqrt_().sqrt_().sum(1)
        limits_O = (sums_O / inputs) ** 4 * (LARGEST_IN_LINE / _TYPICAL_OF_NORMAL)
        beyond_O = (largest_O > limits_O).nonzero().squeeze(1)  # zeros counted: more than there are
        lines_OI = part_OI[beyond_O].abs()
        while lines_OI.numel():  # without the largest, others may be beyond the bound
            sums_O, counts_O = lines_OI.sqrt().sqrt_().sum(1), lines_OI.count_nonzero(1)
            limits_O = (sums_O / counts_O) ** 4 * (LARGEST_IN_LINE / _TYPICAL_OF_NORMAL)
            beyond_C = (lines_OI > limits_O[:, None]).any(0).nonzero().squeeze(1)
            if not len(beyond_C):
                break
            found.append(beyond_C)
            lines_OI[:, beyond_C] = 0.0
    return torch.cat(found).unique() if found else torch.empty(0, dtype=torch.int64)


def _rounded_up(number: int, size: int) -> int:
    return number + -number % size


@functools.cache
def load() -> PackedProducts | None:
    """The functions, or None where nothing is compiled or the processor has no such tiles."""
    code = build.load()
    return PackedProducts(code, "int8") if code is not None and code.tiles_ready() else None
