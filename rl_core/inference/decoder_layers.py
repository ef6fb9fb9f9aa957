"""Decoder layers of Llama, Qwen2 and Qwen3 for decoding: matrix products, the norms before them, appended tokens.

`DecoderLayer` reads the module's parameters in place. `PackedDecoderLayer`, for the CPU, multiplies by copies that
are packed before every run: queries, keys and values side by side, gate and up side by side, the norms' weights
multiplied in. With a few dozen rows, a CPU's matrix product is bound by its path through the weights, so copies in
bfloat16 halve its time. Their products with norms' weights would have to be rounded: those multiply the activations,
which are float32, as norms and biases are.

N tokens, H hidden, F features of the MLP, V vocabulary, D head size, h all query, key and value heads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rl_core.cpu import gemm, packed_gemm
from rl_core.cpu.allocator import Arena
from rl_core.cpu.fused_decode import DecodeKernels, PackedOperand, PackedWeights
from rl_core.cpu.low_rank import AdapterSpan, add_low_rank
from rl_core.models.lora import unwrap_linear
from rl_core.models.routed_adapters import LowRank


@dataclass(slots=True)
class HostAppendedTokens:
    """Observation tokens that some slots append in a step, on the host.

    X extended slots; each row is padded to W = the longest. E real tokens.
    """

    slots_X: np.ndarray  # int64 [X]
    tokens_XW: np.ndarray  # int64 [X, W]; padding repeats a row's last token
    positions_XW: np.ndarray  # int64 [X, W]; padding repeats a row's last position
    is_inside_XW: np.ndarray  # bool [X, W], False = padding

    @classmethod
    def from_slots(
        cls, ids_by_slot: Mapping[int, Sequence[int]], lengths: np.ndarray
    ) -> HostAppendedTokens:
        """Build the rows of these slots; `lengths` [slots] counts the tokens that each has in the cache."""
        slots = np.array(list(ids_by_slot), dtype=np.int64)
        counts = np.array([len(ids) for ids in ids_by_slot.values()])
        column = np.arange(int(counts.max()))
        offsets_XW = np.minimum(column, counts[:, None] - 1)
        flat = np.array([token for ids in ids_by_slot.values() for token in ids], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        return cls(
            slots_X=slots,
            tokens_XW=flat[starts[:, None] + offsets_XW],
            positions_XW=lengths[slots][:, None] + offsets_XW,
            is_inside_XW=column < counts[:, None],
        )

    @property
    def real_tokens(self) -> np.ndarray:
        """The real tokens, slot after slot."""
        return self.tokens_XW[self.is_inside_XW]

    @property
    def real_positions(self) -> np.ndarray:
        """Their positions."""
        return self.positions_XW[self.is_inside_XW]

    def move_to_device(
        self, first: int, to_tensor: Callable[[np.ndarray], torch.Tensor]
    ) -> AppendedTokens:
        """Return the indices of the tokens on the device; `first`: new tokens of the step that precede them."""
        counts = self.is_inside_XW.sum(1)
        starts = np.cumsum(counts) - counts
        offsets_XW = self.positions_XW - self.positions_XW[:, :1]
        return AppendedTokens(
            slots_X=to_tensor(self.slots_X),
            slots_E=to_tensor(np.repeat(self.slots_X, counts)),
            rows_XW=to_tensor(first + starts[:, None] + offsets_XW),
            positions_XW=to_tensor(self.positions_XW),
            flat_indices_E=to_tensor(np.flatnonzero(self.is_inside_XW)),
            length=int(self.positions_XW.max()) + 1,
        )


@dataclass(slots=True)
class AppendedTokens:
    """Observation tokens that some slots append to the cache in a step, before their newest token.

    X extended slots; each row is padded to W = the longest.
    """

    slots_X: torch.Tensor  # int64 [X]
    slots_E: torch.Tensor  # int64 [E], slots of the E = N - n tokens
    rows_XW: torch.Tensor  # int64 [X, W], index among the N new tokens; padding repeats a real one
    positions_XW: torch.Tensor  # int64 [X, W]
    flat_indices_E: torch.Tensor  # int64 [E], flat indices into [X, W] of the E tokens
    length: int  # attended prefix, the longest of these rows

    def build_mask(self, positions: torch.Tensor, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Build the causal mask [X, 1, G * W, L] that is added to the scores.

        Args:
            positions: 0, 1, ..., at least L of them.
        """
        masked_XWL = positions[: self.length] > self.positions_XW[:, :, None]
        mask_XWL = torch.zeros_like(masked_XWL, dtype=dtype).masked_fill_(masked_XWL, -torch.inf)
        return mask_XWL.repeat(1, group, 1)[:, None]

    def compute_attention(
        self,
        q_NQD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask_X1rL: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Compute the tokens' attention over their slots, [E, Q * D]; a layer's keys and values are [slots, K,
        length, D].
        """
        count, width = self.rows_XW.shape
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        q_XWKGD = q_NQD[self.rows_XW.view(-1)].view(count, width, kv_heads, -1, head_dim)
        # r = G * W rows
        q_XKrD = q_XWKGD.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head_dim)
        out_XKrD = functional.scaled_dot_product_attention(
            q_XKrD,
            keys[self.slots_X, :, : self.length],
            values[self.slots_X, :, : self.length],
            attn_mask=mask_X1rL,
            scale=scale,
        )
        out_XKGWD = out_XKrD.view(count, kv_heads, -1, width, head_dim)
        out_SE = out_XKGWD.permute(0, 3, 1, 2, 4).reshape(count * width, -1)
        return out_SE[self.flat_indices_E]


Weights = tuple[torch.Tensor, torch.Tensor | None]  # [out, in] and bias


class RmsNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, module: Any, dtype: torch.dtype | None = None) -> None:
        """Read the weight; `dtype` converts it."""
        self.weight = module.weight.detach().to(dtype or module.weight.dtype)
        self.eps: float = module.variance_epsilon
        self._eps = self.weight.new_full((), self.eps)
        self._on_cpu = self.weight.device.type == "cpu" and self.weight.dtype in (
            torch.float32,
            torch.float64,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, of the same shape."""
        if not self._on_cpu:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.normalize_without_weight(x).mul_(self.weight)

    def normalize_without_weight(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x / rms(x)."""
        # fewer and cheaper kernels than torch's composite RMS norm on a CPU
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()

    def normalize_compiled(
        self, compiled: DecodeKernels | None, x_NH: torch.Tensor, *, has_weight: bool
    ) -> torch.Tensor:
        """Compute x / rms(x), by compiled code if there is any, times the weight if `has_weight`."""
        normed_NH = (
            self.normalize_without_weight(x_NH)
            if compiled is None
            else compiled.compute_rms_norm(x_NH, self.eps)
        )
        return normed_NH.mul_(self.weight) if has_weight else normed_NH


class DecoderLayer:
    """One decoder layer's parameters, without their modules."""

    def __init__(self, layer: Any, norm_dtype: torch.dtype | None = None) -> None:
        """Read the parameters; `norm_dtype` converts the norms' weights."""
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = [_read_weights(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        self.out = _read_weights(attention, "o_proj")
        self.gate, self.up, self.down = (
            _read_weights(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.q_norm, self.k_norm = (
            RmsNorm(getattr(attention, name), norm_dtype) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )
        self.input_norm = RmsNorm(layer.input_layernorm, norm_dtype)
        self.mlp_norm = RmsNorm(layer.post_attention_layernorm, norm_dtype)
        self.scale: float = attention.scaling
        self.act = mlp.act_fn

    def project_heads(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Project to queries, keys and values side by side, [N, h * D], before rotary embedding and head norms."""
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
        """Return x + the output projection of the attended values; x may be changed."""
        weight, bias = self.out
        x_NH = torch.addmm(x_NH, attended_NE, weight.t())
        return x_NH if bias is None else x_NH.add_(bias)

    def add_mlp(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Compute x + down(act(gate(norm(x))) * up(norm(x))) in place."""
        normed_NH = self.mlp_norm(x_NH)
        gate_NF = self.act(functional.linear(normed_NH, *self.gate))
        return x_NH.add_(
            functional.linear(gate_NF.mul_(functional.linear(normed_NH, *self.up)), *self.down)
        )


class PackedDecoderLayer(DecoderLayer):
    """A layer over packed copies of the module's current parameters.

    Norms and gates run compiled where kernels are available (`compiled`).
    """

    def __init__(
        self,
        layer: Any,
        arena: Arena,
        compiled: DecodeKernels | None = None,
        *,
        in_bf16: bool = False,
    ) -> None:
        """Pack the parameters; `in_bf16` rounds the linear layers' weights to bfloat16."""
        super().__init__(layer, torch.float32 if in_bf16 else None)
        self._compiled, self._in_bf16 = compiled, in_bf16
        self._is_silu = type(self.act).__name__ in ("SiLU", "SiLUActivation")
        scales = [None if in_bf16 else norm.weight for norm in (self.input_norm, self.mlp_norm)]
        self._heads = PackedLinear(arena, self.qkv, scales[0], in_bf16=in_bf16)
        self._out = PackedLinear(arena, [self.out], in_bf16=in_bf16)
        self._gate_up = PackedLinear(arena, [self.gate, self.up], scales[1], in_bf16=in_bf16)
        self._down = PackedLinear(arena, [self.down], in_bf16=in_bf16)

    @property
    def products(self) -> list[PackedLinear]:
        """The four products, in the order of a step."""
        return [self._heads, self._out, self._gate_up, self._down]

    def collect_packed_weights(self) -> PackedWeights:
        """Collect the weights for a `FusedStep`; call only where that is allowed."""
        heads, out, gate_up, down = (
            linear.read_packed_weight()
            for linear in (self._heads, self._out, self._gate_up, self._down)
        )
        return PackedWeights(
            heads,
            out,
            gate_up,
            down,
            self.q_norm,
            self.k_norm,
            self.input_norm.eps,
            self.mlp_norm.eps,
            self.scale,
            self.input_norm.weight if self._in_bf16 else None,
            self.mlp_norm.weight if self._in_bf16 else None,
        )

    def project_heads(self, x_NH: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.project_heads`."""
        return self._heads(self._normalize_input(self.input_norm, x_NH))

    def add_attention(self, x_NH: torch.Tensor, attended_NE: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.add_attention`."""
        return self._out.add_product_(x_NH, attended_NE)

    def add_mlp(self, x_NH: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.add_mlp`."""
        both_NF = self._gate_up(self._normalize_input(self.mlp_norm, x_NH))
        if self._compiled is not None and self._is_silu:
            return self._down.add_product_(x_NH, self._compiled.compute_gated_silu(both_NF))
        gate_NF, up_NF = both_NF.chunk(2, dim=1)
        return self._down.add_product_(x_NH, self.act(gate_NF).mul_(up_NF))

    def _normalize_input(self, norm: RmsNorm, x_NH: torch.Tensor) -> torch.Tensor:
        return norm.normalize_compiled(self._compiled, x_NH, has_weight=self._in_bf16)


class OutputHead:
    """The last norm and the output projection."""

    def __init__(self, base: Any, norm_dtype: torch.dtype | None = None) -> None:
        self.norm = RmsNorm(base.model.norm, norm_dtype)
        self.head: Weights = _read_weights(base, "lm_head")

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V]."""
        return functional.linear(self.norm(x_NH), *self.head)


class PackedOutputHead(OutputHead):
    """An `OutputHead` over a packed copy of the weight."""

    def __init__(
        self,
        base: Any,
        arena: Arena,
        compiled: DecodeKernels | None = None,
        *,
        in_bf16: bool = False,
    ) -> None:
        """Pack the weight; `in_bf16` rounds it to bfloat16."""
        super().__init__(base, torch.float32 if in_bf16 else None)
        self._compiled, self._in_bf16 = compiled, in_bf16
        scale_H = None if in_bf16 else self.norm.weight
        self._packed = PackedLinear(arena, [self.head], scale_H, in_bf16=in_bf16)

    @property
    def product(self) -> PackedLinear:
        """The product with the weight."""
        return self._packed

    @property
    def separate_norm_weight(self) -> torch.Tensor | None:
        """The norm's weight; None if it is multiplied into the packed weight."""
        return self.norm.weight if self._in_bf16 else None

    def read_packed_weight(self) -> tuple[PackedOperand, torch.Tensor | None]:
        """See `PackedDecoderLayer.collect_packed_weights`."""
        return self._packed.read_packed_weight()

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V]."""
        return self._packed(
            self.norm.normalize_compiled(self._compiled, x_NH, has_weight=self._in_bf16)
        )


class PackedLinear:
    """Linear layers of one input, side by side, copied for products with few rows."""

    def __init__(
        self,
        arena: Arena,
        linears: Sequence[Weights],
        scale_I: torch.Tensor | None = None,
        *,
        in_bf16: bool = False,
    ) -> None:
        """Copy the parameters, into the arena if compiled kernels use them.

        Args:
            scale_I: multiplies the inputs; only without `in_bf16`.
            in_bf16: round weights to bfloat16; biases, inputs and results are float32.
        """
        weights = [weight for weight, _ in linears]
        self._size, self._scale_I = sum(len(weight) for weight in weights), scale_I
        self._ends = list(itertools.accumulate(len(weight) for weight in weights))
        self.adapter: AdapterSpan | None = None  # applies to all rows
        self._packed: PackedOperand | None = None
        if in_bf16:
            assert scale_I is None
            rounded = [weight.to(torch.bfloat16) for weight in weights]
            self._packed = _pack_bf16_weight(
                torch.cat(rounded) if len(rounded) > 1 else rounded[0].contiguous(), arena
            )
        elif (
            weights[0].dtype == torch.float32
            and (packed_gemm.load_int8_gemm() or packed_gemm.load_packed_vectors()) is not None
        ):
            weight_OI = torch.cat(weights)
            self._packed = _pack_weight(
                weight_OI if scale_I is None else weight_OI.mul_(scale_I), arena
            )
        else:
            self._weight = weights[0].new_empty(weights[0].shape[1], self._size)
            for part, weight in zip(
                self._weight.split([len(w) for w in weights], dim=1), weights, strict=True
            ):
                if scale_I is None:
                    part.copy_(weight.t())
                else:
                    torch.mul(weight.t(), scale_I[:, None], out=part)
        self._bias: torch.Tensor | None = None
        if any(bias is not None for _, bias in linears):
            joined_O = torch.cat(
                [
                    weight.new_zeros(len(weight)) if bias is None else bias
                    for weight, bias in linears
                ]
            )
            self._bias = joined_O.float() if in_bf16 else joined_O

    def read_packed_weight(self) -> tuple[PackedOperand, torch.Tensor | None]:
        """Return weight and bias; the weight must be packed for the compiled kernels."""
        assert self._packed is not None
        return self._packed, self._bias

    def build_adapter_span(self, updates: Sequence[LowRank | None]) -> AdapterSpan | None:
        """Combine updates of the linear layers (None = no update) into one of this product; return None if there are
        none.
        """
        begins = [0, *self._ends[:-1]]
        spans = [
            (begin, end, update)
            for begin, end, update in zip(begins, self._ends, updates, strict=True)
            if update
        ]
        if not spans:
            return None
        downs = [
            update.down_RI if self._scale_I is None else update.down_RI * self._scale_I
            for *_, update in spans
        ]
        columns = [(begin, end) for begin, end, _ in spans]
        scale = spans[0][2].scale
        return AdapterSpan(0, 0, columns, scale, downs, [update.up_OR for *_, update in spans])

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Compute x W + bias."""
        if self._packed is not None:
            out_NO = self._packed.multiply_rows(x_NI, x_NI.new_empty(len(x_NI), self._size))
            if self._bias is not None:
                out_NO.add_(self._bias)
        else:
            out_NO = (
                torch.mm(x_NI, self._weight)
                if self._bias is None
                else torch.addmm(self._bias, x_NI, self._weight)
            )
        return self._add_adapter_product(out_NO, x_NI)

    def add_product_(self, base_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Add x W + bias to base in place."""
        if self._packed is not None:
            self._packed.multiply_rows(x_NI, base_NO, add=True)
        else:
            base_NO.addmm_(x_NI, self._weight)
        return self._add_adapter_product(
            base_NO if self._bias is None else base_NO.add_(self._bias), x_NI
        )

    def _add_adapter_product(self, out_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            with gemm.use_row_invariant_products():
                add_low_rank(out_NO, x_NI, [dataclasses.replace(self.adapter, stop=len(x_NI))])
        return out_NO


def _pack_weight(weight_OI: torch.Tensor, arena: Arena) -> PackedOperand:
    """Copy a weight into tiles if the processor has them, otherwise into vectors."""
    tiles, vectors = packed_gemm.load_int8_gemm(), packed_gemm.load_packed_vectors()
    if tiles is not None:
        return packed_gemm.PackedMatrix(tiles, weight_OI, arena)
    assert vectors is not None
    return packed_gemm.PackedVectors(vectors, weight_OI, arena)


def _pack_bf16_weight(weight_OI: torch.Tensor, arena: Arena) -> PackedOperand:
    """Copy a contiguous bfloat16 weight into the layout of its products."""
    products = packed_gemm.load_bf16_products()
    assert products is not None
    return packed_gemm.PackedVectors(products, weight_OI, arena)


def _read_weights(module: Any, name: str) -> Weights:
    """Return weight and bias of a linear layer, without its adapter."""
    linear = unwrap_linear(getattr(module, name))
    return linear.weight.detach(), linear.bias.detach() if linear.bias is not None else None
