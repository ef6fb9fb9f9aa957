"""One layer of Llama, Qwen2 or Qwen3 for decoding: its three products with weights, and the norms before them.

`Layer` reads the module's parameters where they are. `PackedLayer`, for the CPU, multiplies by copies that are made
anew before every run: queries, keys and values side by side, gate and up too, and the norms'
weights multiplied in. With a few dozen rows a matrix product on a CPU is bound by how it walks through the weights.

N tokens, H hidden, F features of the MLP, V vocabulary, D head size, h all query, key and value heads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from rl_core.cpu import gemm, int8_gemm, packed_vectors
from rl_core.cpu.adapter_spans import AdapterSpan
from rl_core.cpu.allocator import Arena
from rl_core.cpu.fused_decode import DecodeKernels, Packed, PackedWeights
from rl_core.cpu.low_rank import add_low_rank
from rl_core.models.lora import plain_linear
from rl_core.models.routed_adapters import LowRank

__all__ = ["Layer", "OutputHead", "PackedLayer", "PackedLinear", "PackedOutputHead", "RmsNorm"]

Weights = tuple[torch.Tensor, torch.Tensor | None]  # [out, in] and bias


class RmsNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.eps: float = module.variance_epsilon
        self._eps = self.weight.new_full((), self.eps)
        self._on_cpu = self.weight.device.type == "cpu" and self.weight.dtype in (torch.float32, torch.float64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normed x, of the same shape."""
        if not self._on_cpu:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.without_weight(x).mul_(self.weight)

    def without_weight(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x)."""
        # fewer and cheaper kernels than the composite one that torch runs on a CPU
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


class Layer:
    """One decoder layer's parameters, without their modules."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = [_weights(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        self.out = _weights(attention, "o_proj")
        self.gate, self.up, self.down = (_weights(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        self.q_norm = RmsNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = RmsNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.input_norm = RmsNorm(layer.input_layernorm)
        self.mlp_norm = RmsNorm(layer.post_attention_layernorm)
        self.scale: float = attention.scaling
        self.act = mlp.act_fn

    def heads(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values side by side: [N, h * D], before rotary embedding and norms of their own."""
        x_NH = self.input_norm(x_NH)
        widths = [weight.shape[0] for weight, _ in self.qkv]
        joined = x_NH.new_empty(x_NH.shape[0], sum(widths))
        for part, (weight, bias) in zip(joined.split(widths, dim=1), self.qkv, strict=True):
            if bias is None:
                torch.mm(x_NH, weight.t(), out=part)
            else:
                torch.addmm(bias, x_NH, weight.t(), out=part)
        return joined

    def add_attention(self, x_NH: torch.Tensor, attended_NE: torch.Tensor) -> torch.Tensor:
        """x + output projection of the attended values; x may be changed."""
        weight, bias = self.out
        x_NH = torch.addmm(x_NH, attended_NE, weight.t())
        return x_NH if bias is None else x_NH.add_(bias)

    def add_mlp(self, x_NH: torch.Tensor) -> torch.Tensor:
        """x + down(act(gate(norm(x))) * up(norm(x))), in place."""
        normed_NH = self.mlp_norm(x_NH)
        gate_NF = self.act(functional.linear(normed_NH, *self.gate))
        return x_NH.add_(functional.linear(gate_NF.mul_(functional.linear(normed_NH, *self.up)), *self.down))


class PackedLayer(Layer):
    """A layer that multiplies by packed copies of the module's parameters as they are now.

    Norms and gates are compiled code where there is some (`compiled`).
    """

    def __init__(self, layer: Any, arena: Arena, compiled: DecodeKernels | None = None) -> None:
        super().__init__(layer)
        self._compiled = compiled
        self._is_silu = type(self.act).__name__ in ("SiLU", "SiLUActivation")
        self._heads = PackedLinear(arena, self.qkv, self.input_norm.weight)
        self._out = PackedLinear(arena, [self.out])
        self._gate_up = PackedLinear(arena, [self.gate, self.up], self.mlp_norm.weight)
        self._down = PackedLinear(arena, [self.down])

    @property
    def products(self) -> list[PackedLinear]:
        """The four products, in the order of a step."""
        return [self._heads, self._out, self._gate_up, self._down]

    def packed_weights(self) -> PackedWeights:
        """The weights of a `FusedStep`, where that is allowed."""
        heads, out, gate_up, down = (
            part.packed_weight() for part in (self._heads, self._out, self._gate_up, self._down)
        )
        return PackedWeights(
            heads, out, gate_up, down, self.q_norm, self.k_norm, self.input_norm.eps, self.mlp_norm.eps, self.scale
        )

    def heads(self, x_NH: torch.Tensor) -> torch.Tensor:
        """As `Layer.heads`."""
        return self._heads(self._without_weight(self.input_norm, x_NH))

    def add_attention(self, x_NH: torch.Tensor, attended_NE: torch.Tensor) -> torch.Tensor:
        """As `Layer.add_attention`."""
        return self._out.add_(x_NH, attended_NE)

    def add_mlp(self, x_NH: torch.Tensor) -> torch.Tensor:
        """As `Layer.add_mlp`."""
        both_NF = self._gate_up(self._without_weight(self.mlp_norm, x_NH))
        if self._compiled is not None and self._is_silu:
            return self._down.add_(x_NH, self._compiled.gated(both_NF))
        gate_NF, up_NF = both_NF.chunk(2, dim=1)
        return self._down.add_(x_NH, self.act(gate_NF).mul_(up_NF))

    def _without_weight(self, norm: RmsNorm, x_NH: torch.Tensor) -> torch.Tensor:
        return norm.without_weight(x_NH) if self._compiled is None else self._compiled.normed(x_NH, norm.eps)


class OutputHead:
    """The last norm and the logits."""

    def __init__(self, base: Any) -> None:
        self.norm = RmsNorm(base.model.norm)
        self.head: Weights = _weights(base, "lm_head")

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Logits [N, V]."""
        return functional.linear(self.norm(x_NH), *self.head)


class PackedOutputHead(OutputHead):
    """As `OutputHead`, by a packed copy of the weight."""

    def __init__(self, base: Any, arena: Arena, compiled: DecodeKernels | None = None) -> None:
        super().__init__(base)
        self._compiled = compiled
        self._packed = PackedLinear(arena, [self.head], self.norm.weight)

    @property
    def product(self) -> PackedLinear:
        """The product with the weight."""
        return self._packed

    def packed_weight(self) -> tuple[Packed, torch.Tensor | None]:
        """As `PackedLayer.packed_weights`."""
        return self._packed.packed_weight()

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Logits [N, V]."""
        if self._compiled is not None:
            return self._packed(self._compiled.normed(x_NH, self.norm.eps))
        return self._packed(self.norm.without_weight(x_NH))


class PackedLinear:
    """Linear layers of one input, side by side, copied for products with few rows."""

    def __init__(self, arena: Arena, linears: Sequence[Weights], scale_I: torch.Tensor | None = None) -> None:
        """Copy the parameters, for compiled products into the arena; `scale_I` multiplies the inputs."""
        weights = [weight for weight, _ in linears]
        self._size, self._scale_I = sum(len(weight) for weight in weights), scale_I
        self._ends = list(itertools.accumulate(len(weight) for weight in weights))
        self.adapter: AdapterSpan | None = None  # of all rows, until another is put there
        self._packed: Packed | None = None
        if weights[0].dtype == torch.float32 and (int8_gemm.load() or packed_vectors.load()) is not None:
            weight_OI = torch.cat(weights)
            self._packed = _pack(weight_OI if scale_I is None else weight_OI.mul_(scale_I), arena)
        else:
            self._weight = weights[0].new_empty(weights[0].shape[1], self._size)
            for part, weight in zip(self._weight.split([len(w) for w in weights], dim=1), weights, strict=True):
                if scale_I is None:
                    part.copy_(weight.t())
                else:
                    torch.mul(weight.t(), scale_I[:, None], out=part)
        self._bias: torch.Tensor | None = None
        if any(bias is not None for _, bias in linears):
            self._bias = torch.cat(
                [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in linears]
            )

    def packed_weight(self) -> tuple[Packed, torch.Tensor | None]:
        """Weight and bias, where the weight is packed for compiled products."""
        assert self._packed is not None
        return self._packed, self._bias

    def update_of(self, updates: Sequence[LowRank | None]) -> AdapterSpan | None:
        """Updates of the linear layers, None = of none, as one of this product; None where there is not any."""
        begins = [0, *self._ends[:-1]]
        found = [(begin, end, one) for begin, end, one in zip(begins, self._ends, updates, strict=True) if one]
        if not found:
            return None
        downs = [one.down_RI if self._scale_I is None else one.down_RI * self._scale_I for *_, one in found]
        columns, scale = [(begin, end) for begin, end, _ in found], found[0][2].scale
        return AdapterSpan(0, 0, columns, scale, downs, [one.up_OR for *_, one in found])

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """x W + bias."""
        if self._packed is not None:
            out_NO = self._packed.multiply(x_NI, x_NI.new_empty(len(x_NI), self._size))
            if self._bias is not None:
                out_NO.add_(self._bias)
        else:
            out_NO = torch.mm(x_NI, self._weight) if self._bias is None else torch.addmm(self._bias, x_NI, self._weight)
        return self._adapted(out_NO, x_NI)

    def add_(self, base_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """base + x W + bias, in place."""
        if self._packed is not None:
            self._packed.multiply(x_NI, base_NO, add=True)
        else:
            base_NO.addmm_(x_NI, self._weight)
        return self._adapted(base_NO if self._bias is None else base_NO.add_(self._bias), x_NI)

    def _adapted(self, out_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            with gemm.row_by_row():
                add_low_rank(out_NO, x_NI, [dataclasses.replace(self.adapter, stop=len(x_NI))])
        return out_NO


def _pack(weight_OI: torch.Tensor, arena: Arena) -> Packed:
    """A copy for tiles where the processor has them, else for vectors."""
    tiles, vectors = int8_gemm.load(), packed_vectors.load()
    if tiles is not None:
        return int8_gemm.PackedMatrix(tiles, weight_OI, arena)
    assert vectors is not None
    return packed_vectors.PackedVectors(vectors, weight_OI, arena)


def _weights(module: Any, name: str) -> Weights:
    """Weight and bias of a linear layer, under its adapter where it has one."""
    linear = plain_linear(getattr(module, name))
    return linear.weight.detach(), linear.bias.detach() if linear.bias is not None else None
