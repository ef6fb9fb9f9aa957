"""Parts of a transformer layer with their own backward passes: RMS norms, SwiGLU gates, the products of linear layers.

They make fewer passes over memory than autograd. On a CPU they run compiled code (`norm_and_gate.c`, `gemm.py`) if
available, otherwise torch's kernels. Under autocast to bfloat16, compiled linear layers round the operands of their
products; states, gradients and everything else stay float32.

N tokens, H hidden, I width of the MLP, O outputs of linear layers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl_core.cpu import build, gemm

VECTOR_WIDTH = 16  # as in vectors.h; widths must be multiples of it
_ROWS_PER_SUM = 64  # as in norm_and_gate.c


class NormAndGateKernels:
    """Compiled norms and gates, forward and backward, on torch's threads.

    All tensors are contiguous float32 on the CPU.
    """

    def __init__(self, code: ctypes.CDLL) -> None:
        count, number, real, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        self._code = code
        for name, kinds in {
            "norm_forward": (
                pointer,
                pointer,
                pointer,
                real,
                count,
                count,
                pointer,
                pointer,
                pointer,
                number,
            ),
            "norm_backward": (
                pointer,
                pointer,
                pointer,
                pointer,
                pointer,
                count,
                count,
                pointer,
                pointer,
                number,
            ),
            "gated_forward": (pointer, count, count, pointer, number),
            "gated_backward": (pointer, pointer, count, count, pointer, number),
        }.items():
            function = getattr(code, name)
            function.argtypes, function.restype = kinds, None

    def compute_norm(
        self, x_NH: torch.Tensor, added_NH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x + added (x if nothing is added), its RMS norm times the weight, and 1 / rms [N]."""
        sum_NH = torch.empty_like(x_NH) if added_NH is not None else x_NH
        normed_NH, scale_N = torch.empty_like(x_NH), x_NH.new_empty(len(x_NH))
        self._code.norm_forward(
            x_NH.data_ptr(),
            _get_address(added_NH),
            weight_H.data_ptr(),
            eps,
            *x_NH.shape,
            sum_NH.data_ptr(),
            normed_NH.data_ptr(),
            scale_N.data_ptr(),
            torch.get_num_threads(),
        )
        return sum_NH, normed_NH, scale_N

    def compute_norm_grad(
        self,
        grad_NH: torch.Tensor,
        added_grad_NH: torch.Tensor | None,
        x_NH: torch.Tensor,
        scale_N: torch.Tensor,
        weight_H: torch.Tensor,
        *,
        with_weight: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the gradient of the normalised input, plus `added_grad_NH`, and of the weight [H]."""
        grad_x_NH = torch.empty_like(x_NH)
        num_sums = -(-len(x_NH) // _ROWS_PER_SUM)
        sums = x_NH.new_empty(num_sums, x_NH.shape[1]) if with_weight else None
        self._code.norm_backward(
            grad_NH.data_ptr(),
            _get_address(added_grad_NH),
            x_NH.data_ptr(),
            scale_N.data_ptr(),
            weight_H.data_ptr(),
            *x_NH.shape,
            grad_x_NH.data_ptr(),
            _get_address(sums),
            torch.get_num_threads(),
        )
        return grad_x_NH, sums.sum(0) if sums is not None else None

    def compute_gated_silu(self, both_NI: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up of [gate, up] side by side: [N, 2 I] -> [N, I]."""
        rows, width = both_NI.shape[0], both_NI.shape[1] // 2
        out_NI = both_NI.new_empty(rows, width)
        self._code.gated_forward(
            both_NI.data_ptr(), rows, width, out_NI.data_ptr(), torch.get_num_threads()
        )
        return out_NI

    def compute_gated_silu_grad(self, both_NI: torch.Tensor, grad_NI: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of `both_NI`."""
        grad_both_NI = torch.empty_like(both_NI)
        self._code.gated_backward(
            both_NI.data_ptr(),
            grad_NI.data_ptr(),
            *grad_NI.shape,
            grad_both_NI.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_both_NI


def _get_address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


@functools.cache
def load_norm_and_gate() -> NormAndGateKernels | None:
    """Load the functions; return None without compiled code."""
    code = build.load_library()
    return NormAndGateKernels(code) if code is not None else None


def apply_rms_norm(x_NH: torch.Tensor, module: Any) -> torch.Tensor:
    """Compute x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    weight_H = module.weight.to(x_NH.dtype)
    normed: torch.Tensor = _Norm.apply(x_NH, weight_H, module.variance_epsilon)
    return normed


def add_norm(
    x_NH: torch.Tensor, added_NH: torch.Tensor, module: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added and its norm."""
    both: tuple[torch.Tensor, torch.Tensor] = _AddNorm.apply(
        x_NH, added_NH, module.weight.to(x_NH.dtype), module.variance_epsilon
    )
    return both


def apply_gated_silu(both_NI: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of [gate, up] side by side: [N, 2 I] -> [N, I] (SwiGLU: Shazeer 2020,
    arXiv:2002.05202).
    """
    out: torch.Tensor = _GatedSilu.apply(both_NI)
    return out


def compute_linear(
    x_NI: torch.Tensor, weights: Sequence[torch.Tensor], *, in_bf16: bool = False
) -> torch.Tensor:
    """Compute x W^T of several weights [O_i, I], side by side, without gradient.

    Args:
        weights: of the input's dtype, or bfloat16 for a float32 input, which is then rounded, too.
        in_bf16: round float32 operands on a CPU to bfloat16, if `gemm.load_bf16_gemm` has products for it.
    """
    weights, in_bf16 = _widen_weights(x_NI, weights, in_bf16=in_bf16)
    compiled = _select_gemm(x_NI, *weights, in_bf16=in_bf16)
    if compiled is not None:
        return compiled.compute_linear(
            _ensure_contiguous_rows(x_NI), [_ensure_contiguous_rows(weight) for weight in weights]
        )
    if len(weights) == 1:
        return x_NI @ weights[0].t()
    out_NO = x_NI.new_empty(len(x_NI), sum(len(weight) for weight in weights))
    parts = out_NO.split([len(weight) for weight in weights], dim=1)
    for part_NO, weight_OI in zip(parts, weights, strict=True):
        torch.mm(x_NI, weight_OI.t(), out=part_NO)
    return out_NO


def compute_input_grad(
    grad_NO: torch.Tensor, weights: Sequence[torch.Tensor], *, in_bf16: bool = False
) -> torch.Tensor:
    """Compute the gradient of `compute_linear`'s input from that of its result."""
    weights, in_bf16 = _widen_weights(grad_NO, weights, in_bf16=in_bf16)
    compiled = _select_gemm(grad_NO, *weights, in_bf16=in_bf16)
    if compiled is not None:
        return compiled.compute_input_grad(
            _ensure_contiguous_rows(grad_NO),
            [_ensure_contiguous_rows(weight) for weight in weights],
        )
    parts = grad_NO.split([len(weight) for weight in weights], dim=1)
    grad_NI = parts[0] @ weights[0]
    for part_NO, weight_OI in zip(parts[1:], weights[1:], strict=True):
        grad_NI.addmm_(part_NO, weight_OI)
    return grad_NI


def compute_weight_grad(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, *, in_bf16: bool = False
) -> torch.Tensor:
    """Compute the gradient of `compute_linear`'s weights, stacked."""
    compiled = _select_gemm(grad_NO, x_NI, in_bf16=in_bf16)
    if compiled is None:
        return grad_NO.t() @ x_NI
    return compiled.compute_weight_grad(
        _ensure_contiguous_rows(grad_NO), _ensure_contiguous_rows(x_NI)
    )


def add_weight_grad(
    sum_OI: torch.Tensor, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, in_bf16: bool = False
) -> None:
    """Add the gradient of the weights to the contiguous `sum_OI`, without another tensor of its size."""
    compiled = _select_gemm(grad_NO, x_NI, sum_OI, in_bf16=in_bf16)
    if compiled is not None:
        compiled.add_weight_grad(
            sum_OI, _ensure_contiguous_rows(grad_NO), _ensure_contiguous_rows(x_NI)
        )
    else:
        sum_OI.addmm_(grad_NO.t(), x_NI)


def _widen_weights(
    x: torch.Tensor, weights: Sequence[torch.Tensor], *, in_bf16: bool
) -> tuple[Sequence[torch.Tensor], bool]:
    """Return bfloat16 weights of a float32 operand in float32, and whether operands are rounded to bfloat16."""
    if x.dtype == torch.float32 and weights[0].dtype == torch.bfloat16:
        return [weight.float() for weight in weights], True
    return weights, in_bf16


def _select_gemm(*operands: torch.Tensor, in_bf16: bool) -> gemm.Gemm | None:
    """Return the compiled products if they support the operands, otherwise None."""
    for operand in operands:
        if operand.device.type != "cpu" or operand.dtype != torch.float32 or not operand.numel():
            return None
    return (gemm.load_bf16_gemm() if in_bf16 else None) or gemm.load_gemm()


def _ensure_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _select_norm_and_gate(x: torch.Tensor, width: int) -> NormAndGateKernels | None:
    if x.device.type != "cpu" or x.dtype != torch.float32 or width % VECTOR_WIDTH:
        return None
    return load_norm_and_gate()


def _compute_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm, and 1 / rms with a last dimension of 1."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


def _compute_norm_grad(
    grad: torch.Tensor,
    added_grad: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of the normalised input and of the weight.

    They are those of torch's layer norm with mean 0, which subtracts one term too many:
        layer norm: r (w g - mean(w g) - x r mean(w g x r)),    RMS norm: r (w g - x r mean(w g x r)).
    """
    compiled = _select_norm_and_gate(x, x.shape[-1])
    if compiled is not None and x.ndim == 2:
        return compiled.compute_norm_grad(
            grad.contiguous(),
            added_grad.contiguous() if added_grad is not None else None,
            x,
            scale,
            weight,
            with_weight=with_weight,
        )
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad,
        x,
        weight.shape,
        torch.zeros_like(scale),
        scale,
        weight,
        None,
        [True, with_weight, False],
    )
    grad_x.add_((grad @ weight).unsqueeze_(-1).mul_(scale).div_(x.shape[-1]))
    if added_grad is not None:
        grad_x.add_(added_grad)
    return grad_x, grad_weight if with_weight else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        compiled = _select_norm_and_gate(x, x.shape[-1])
        if compiled is not None and x.ndim == 2:
            x = x.contiguous()
            _, normed, scale = compiled.compute_norm(x, None, weight, eps)
        else:
            normed, scale = _compute_rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        with_weight = ctx.needs_input_grad[1]
        return *_compute_norm_grad(grad, None, x, scale, weight, with_weight=with_weight), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: torch.Tensor, added_NH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compiled = _select_norm_and_gate(x_NH, x_NH.shape[1])
        if compiled is not None:
            sum_NH, normed_NH, scale_N = compiled.compute_norm(
                x_NH.contiguous(), added_NH.contiguous(), weight_H, eps
            )
        else:
            sum_NH = x_NH + added_NH
            normed_NH, scale_N = _compute_rms_norm(sum_NH, weight_H, eps)
        ctx.save_for_backward(sum_NH, weight_H, scale_N)
        return sum_NH, normed_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum_NH: torch.Tensor, grad_NH: torch.Tensor) -> tuple[Any, ...]:
        sum_NH, weight_H, scale_N = ctx.saved_tensors
        grad, grad_weight = _compute_norm_grad(
            grad_NH, grad_sum_NH, sum_NH, scale_N, weight_H, with_weight=ctx.needs_input_grad[2]
        )
        return grad, grad, grad_weight, None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_NI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both_NI)
        compiled = _select_norm_and_gate(both_NI, both_NI.shape[1] // 2)
        if compiled is not None:
            return compiled.compute_gated_silu(both_NI.contiguous())
        gate_NI, up_NI = both_NI.chunk(2, dim=1)
        return functional.silu(gate_NI).mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: torch.Tensor) -> torch.Tensor:
        (both_NI,) = ctx.saved_tensors
        compiled = _select_norm_and_gate(both_NI, both_NI.shape[1] // 2)
        if compiled is not None:
            return compiled.compute_gated_silu_grad(both_NI.contiguous(), grad_NI.contiguous())
        (gate_NI, up_NI), grad_both_NI = both_NI.chunk(2, dim=1), torch.empty_like(both_NI)
        grad_gate_NI, grad_up_NI = grad_both_NI.chunk(2, dim=1)
        torch.mul(grad_NI, functional.silu(gate_NI), out=grad_up_NI)
        grad_gate_NI.copy_(torch.ops.aten.silu_backward(grad_NI * up_NI, gate_NI))
        return grad_both_NI
