"""Several linear layers of one input at a time, with their adapters (peft's LoRA), forward and backward.

The products are those of `rl_core.cpu.layer_kernels`. Under autocast to bfloat16, and for bfloat16 weights, compiled
code rounds the operands of the layers' products; states, gradients and the products of adapters stay float32.

N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rl_core.cpu import gemm
from rl_core.cpu.layer_kernels import compute_input_grad, compute_linear, compute_weight_grad
from rl_core.cpu.low_rank import AdapterSpan, AdapterSpans, add_low_rank, compute_low_rank_grads


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The update scale x A^T B^T of a layer."""

    down_RI: torch.Tensor  # A
    up_OR: torch.Tensor  # B
    scale: float


def apply_linears(x_NI: torch.Tensor, modules: Sequence[nn.Module]) -> torch.Tensor:
    """Apply several linear layers to one input, side by side: [N, sum of O].

    Layer classes that can apply several of their kind at a time have a method `apply_together`. Layers with hooks, and
    adapters with dropout, several at a time or of another kind than LoRA, are called as modules.
    """
    apply_together = getattr(type(modules[0]), "apply_together", None)
    if apply_together is not None:
        together_NO: torch.Tensor = apply_together(modules[0], x_NI, modules)
        return together_NO
    layers = [_unwrap_adapted(module) for module in modules]
    linears = [layer[0] for layer in layers if layer is not None]
    adapters = [layer[1] for layer in layers if layer is not None]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    scales = {adapter.scale for adapter in adapters if adapter is not None}
    if len(linears) == len(modules) and len(biases) in (0, len(linears)) and len(scales) <= 1:
        weights = [linear.weight for linear in linears]
        out_NO: torch.Tensor = _Linear.apply(x_NI, len(weights), *weights, *biases)
        return _add_adapters(out_NO, x_NI, weights, adapters) if scales else out_NO
    # under autocast, torch's layers return bfloat16
    outputs = [module(x_NI).to(x_NI.dtype) for module in modules]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _unwrap_adapted(module: Any) -> tuple[nn.Linear, _Adapter | None] | None:
    """Return a layer's linear layer and its adapter (None = without an effect); None if it has to be called."""
    if not _has_hooks(module) and type(module) is nn.Linear:
        return module, None
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or _has_hooks(
        module
    ):
        return None
    linear = module.base_layer
    if type(linear) is not nn.Linear or _has_hooks(linear) or linear.weight.dtype == torch.float16:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters and module.merged:  # peft unmerges it when it is called
        return None
    if module.disable_adapters or module.merged or not names:
        return linear, None
    if len(names) > 1 or module.lora_variant:
        return None
    down, up, dropout = (
        parts[names[0]] for parts in (module.lora_A, module.lora_B, module.lora_dropout)
    )
    has_noise = not isinstance(dropout, nn.Identity) and dropout.training
    is_plain = all(
        type(factor) is nn.Linear
        and factor.bias is None
        and factor.weight.dtype == torch.float32
        and not _has_hooks(factor)
        for factor in (down, up)
    )
    if has_noise or not is_plain:
        return None
    return linear, _Adapter(down.weight, up.weight, float(module.scaling[names[0]]))


def _has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _add_adapters(
    out_NO: torch.Tensor,
    x_NI: torch.Tensor,
    weights: Sequence[torch.Tensor],
    adapters: Sequence[_Adapter | None],
) -> torch.Tensor:
    """Add the adapters' products to the outputs of their layers."""
    columns, downs, ups, scale, begin = [], [], [], 1.0, 0
    for weight_OI, adapter in zip(weights, adapters, strict=True):
        end = begin + len(weight_OI)
        if adapter is not None:
            columns.append((begin, end))
            downs.append(adapter.down_RI)
            ups.append(adapter.up_OR)
            scale = adapter.scale
        begin = end
    added_NO: torch.Tensor = _AddAdapters.apply(out_NO, x_NI, columns, scale, *downs, *ups)
    return added_NO


class _AddAdapters(torch.autograd.Function):
    """out + scale x A^T B^T of each adapted layer; parameters are all A, then all B."""

    @staticmethod
    def forward(
        ctx: Any,
        out_NO: torch.Tensor,
        x_NI: torch.Tensor,
        columns: list[tuple[int, int]],
        scale: float,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.mark_dirty(out_NO)
        spans = _build_spans(len(x_NI), columns, scale, factors)
        ctx.saved_count = len(saved := add_low_rank(out_NO, x_NI, spans))
        ctx.save_for_backward(x_NI, *saved, *factors)
        ctx.columns, ctx.scale = columns, scale
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[Any, ...]:
        x_NI, *rest = ctx.saved_tensors
        saved, factors = rest[: ctx.saved_count], rest[ctx.saved_count :]
        spans = _build_spans(len(x_NI), ctx.columns, ctx.scale, factors)
        grad_NO = grad_NO.contiguous()
        grad_x_NI, grads = compute_low_rank_grads(
            grad_NO, x_NI, saved, spans, with_x=ctx.needs_input_grad[1]
        )
        needed = zip(grads, ctx.needs_input_grad[4:], strict=True)
        return grad_NO, grad_x_NI, None, None, *(grad if needs else None for grad, needs in needed)


def _build_spans(
    count: int, columns: list[tuple[int, int]], scale: float, factors: Sequence[torch.Tensor]
) -> AdapterSpans:
    downs, ups = factors[: len(columns)], factors[len(columns) :]
    return AdapterSpans([AdapterSpan(0, count, columns, scale, downs, ups)])


class _Linear(torch.autograd.Function):
    """Linear layers of one input; parameters are the weights, then as many biases or none."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, count: int, *parameters: torch.Tensor
    ) -> torch.Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x_NI, *weights)
        ctx.count, ctx.in_bf16 = count, _rounds_operands(weights)
        out_NO = compute_linear(x_NI, weights, in_bf16=ctx.in_bf16)
        return out_NO.add_(torch.cat(biases)) if biases else out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[Any, ...]:
        x_NI, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        grad_x = compute_input_grad(grad_NO, weights, in_bf16=ctx.in_bf16) if needs_x else None
        sizes = [len(weight) for weight in weights]
        grads: list[torch.Tensor | None] = [None] * len(needs)
        if any(needs[: ctx.count]):
            weight_grads = compute_weight_grad(grad_NO, x_NI, in_bf16=ctx.in_bf16)
            grads[: ctx.count] = weight_grads.to(weights[0].dtype).split(sizes)
        if any(needs[ctx.count :]):
            grads[ctx.count :] = grad_NO.sum(0).to(weights[0].dtype).split(sizes)
        needed_grads = [
            grad if is_needed else None for grad, is_needed in zip(grads, needs, strict=True)
        ]
        return grad_x, None, *needed_grads


def _rounds_operands(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether products with these weights round their operands to bfloat16."""
    is_half = all(weight.dtype == torch.bfloat16 for weight in weights)
    return is_half or gemm.multiplies_in_bfloat16()
