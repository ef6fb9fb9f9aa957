"""Parts of a transformer's layer with backward passes of their own: fewer passes over memory than autograd's.

On a CPU they are compiled code where it is available, torch's kernels otherwise.

N tokens, H hidden, I width of the MLP, O outputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl_core.cpu import gemm, norm_and_gate

__all__ = ["add_norm", "add_weight_grad", "gated_silu", "input_grad", "linear", "linears", "norm", "weight_grad"]


def linears(x_NI: torch.Tensor, modules: Sequence[nn.Module]) -> torch.Tensor:
    """Outputs of some linear layers for one input, side by side: [N, sum of O]. Adapters are called as they are.

    Layers that know how to compute several of their kind at once have a method `joined`.
    """
    if (several := getattr(type(modules[0]), "joined", None)) is not None:
        found: torch.Tensor = several(modules[0], x_NI, modules)
        return found
    if all(_is_plain(module) for module in modules):
        weights = [module.weight for module in modules]
        biases = [module.bias for module in modules if module.bias is not None]
        if len(biases) in (0, len(weights)):
            joined: torch.Tensor = _Linear.apply(x_NI, len(weights), *weights, *biases)
            return joined
    return torch.cat([module(x_NI) for module in modules], dim=1) if len(modules) > 1 else modules[0](x_NI)


def _is_plain(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and not any(hooks)


def norm(x_NH: torch.Tensor, module: Any) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    normed: torch.Tensor = _Norm.apply(x_NH, module.weight, module.variance_epsilon)
    return normed


def add_norm(x_NH: torch.Tensor, added_NH: torch.Tensor, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x + added, and its norm."""
    both: tuple[torch.Tensor, torch.Tensor] = _AddNorm.apply(x_NH, added_NH, module.weight, module.variance_epsilon)
    return both


def gated_silu(both_NI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [gate, up] side by side: [N, 2 I] -> [N, I] (SwiGLU: Shazeer 2020, arXiv:2002.05202)."""
    out: torch.Tensor = _GatedSilu.apply(both_NI)
    return out


# -- products ----------------------------------------------------------------------------------------------------------


def linear(x_NI: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """x W^T of several weights [O_i, I], side by side; without gradient."""
    found = _gemm(x_NI, *weights)
    if found is not None:
        return found.linear(_rows(x_NI), [_rows(weight) for weight in weights])
    if len(weights) == 1:
        return x_NI @ weights[0].t()
    out_NO = x_NI.new_empty(len(x_NI), sum(len(weight) for weight in weights))
    for part_NO, weight_OI in zip(out_NO.split([len(weight) for weight in weights], dim=1), weights, strict=True):
        torch.mm(x_NI, weight_OI.t(), out=part_NO)
    return out_NO


def input_grad(grad_NO: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gradient of the input of `linear`, from that of its result."""
    found = _gemm(grad_NO, *weights)
    if found is not None:
        return found.input_grad(_rows(grad_NO), [_rows(weight) for weight in weights])
    parts = grad_NO.split([len(weight) for weight in weights], dim=1)
    grad_NI = parts[0] @ weights[0]
    for part_NO, weight_OI in zip(parts[1:], weights[1:], strict=True):
        grad_NI.addmm_(part_NO, weight_OI)
    return grad_NI


def weight_grad(grad_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
    """Gradient of the weights of `linear`, one below the other."""
    found = _gemm(grad_NO, x_NI)
    return found.weight_grad(_rows(grad_NO), _rows(x_NI)) if found is not None else grad_NO.t() @ x_NI


def add_weight_grad(sum_OI: torch.Tensor, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
    """Add the gradient of the weights to `sum_OI`, contiguous, without another tensor of its size."""
    found = _gemm(grad_NO, x_NI, sum_OI)
    if found is not None:
        found.add_weight_grad(sum_OI, _rows(grad_NO), _rows(x_NI))
    else:
        sum_OI.addmm_(grad_NO.t(), x_NI)


def _gemm(*operands: torch.Tensor) -> gemm.Gemm | None:
    """The compiled products, where they apply."""
    for operand in operands:
        if operand.device.type != "cpu" or operand.dtype != torch.float32 or not operand.numel():
            return None
    return gemm.load()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


class _Linear(torch.autograd.Function):
    """Weights of one input, then as many biases or none."""

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, count: int, *parameters: torch.Tensor) -> torch.Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x_NI, *weights)
        ctx.count = count
        out_NO = linear(x_NI, weights)
        return out_NO.add_(torch.cat(biases)) if biases else out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[Any, ...]:
        x_NI, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        grad_x = input_grad(grad_NO, weights) if needs_x else None
        sizes = [len(weight) for weight in weights]
        grads: list[torch.Tensor | None] = [None] * len(needs)
        if any(needs[: ctx.count]):
            grads[: ctx.count] = weight_grad(grad_NO, x_NI).split(sizes)
        if any(needs[ctx.count :]):
            grads[ctx.count :] = grad_NO.sum(0).split(sizes)
        return grad_x, None, *(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


# -- norms and gates ---------------------------------------------------------------------------------------------------


def _compiled(x: torch.Tensor, width: int) -> norm_and_gate.NormAndGate | None:
    if x.device.type != "cpu" or x.dtype != torch.float32 or width % norm_and_gate.WIDTH:
        return None
    return norm_and_gate.load()


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and 1 / rms, whose last dimension is 1."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


def _norm_grad(
    grad: torch.Tensor,
    beside: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of what was normed and of the weight.

    They are those of torch's layer norm with mean 0, which takes off one term too many:
        layer norm: r (w g - mean(w g) - x r mean(w g x r)),    RMS norm: r (w g - x r mean(w g x r)).
    """
    compiled = _compiled(x, x.shape[-1])
    if compiled is not None and x.ndim == 2:
        return compiled.norm_grad(
            grad.contiguous(), beside.contiguous() if beside is not None else None, x, scale, weight,
            with_weight=with_weight,
        )  # fmt: skip
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, with_weight, False]
    )
    grad_x.add_((grad @ weight).unsqueeze_(-1).mul_(scale).div_(x.shape[-1]))
    return grad_x if beside is None else grad_x.add_(beside), grad_weight if with_weight else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        compiled = _compiled(x, x.shape[-1])
        if compiled is not None and x.ndim == 2:
            x = x.contiguous()
            _, normed, scale = compiled.norm(x, None, weight, eps)
        else:
            normed, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        return *_norm_grad(grad, None, x, scale, weight, with_weight=ctx.needs_input_grad[1]), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: torch.Tensor, added_NH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compiled = _compiled(x_NH, x_NH.shape[1])
        if compiled is not None:
            sum_NH, normed_NH, scale_N = compiled.norm(x_NH.contiguous(), added_NH.contiguous(), weight_H, eps)
        else:
            sum_NH = x_NH + added_NH
            normed_NH, scale_N = _normed(sum_NH, weight_H, eps)
        ctx.save_for_backward(sum_NH, weight_H, scale_N)
        return sum_NH, normed_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum_NH: torch.Tensor, grad_NH: torch.Tensor) -> tuple[Any, ...]:
        sum_NH, weight_H, scale_N = ctx.saved_tensors
        grad, grad_weight = _norm_grad(
            grad_NH, grad_sum_NH, sum_NH, scale_N, weight_H, with_weight=ctx.needs_input_grad[2]
        )
        return grad, grad, grad_weight, None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_NI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both_NI)
        compiled = _compiled(both_NI, both_NI.shape[1] // 2)
        if compiled is not None:
            return compiled.gated(both_NI.contiguous())
        gate_NI, up_NI = both_NI.chunk(2, dim=1)
        return functional.silu(gate_NI).mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: torch.Tensor) -> torch.Tensor:
        (both_NI,) = ctx.saved_tensors
        compiled = _compiled(both_NI, both_NI.shape[1] // 2)
        if compiled is not None:
            return compiled.gated_grad(both_NI.contiguous(), grad_NI.contiguous())
        (gate_NI, up_NI), grad_both_NI = both_NI.chunk(2, dim=1), torch.empty_like(both_NI)
        grad_gate_NI, grad_up_NI = grad_both_NI.chunk(2, dim=1)
        torch.mul(grad_NI, functional.silu(gate_NI), out=grad_up_NI)
        grad_gate_NI.copy_(torch.ops.aten.silu_backward(grad_NI * up_NI, gate_NI))
        return grad_both_NI
