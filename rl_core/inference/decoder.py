"""Forward pass of Llama, Qwen2 and Qwen3 over preallocated key/value slots, on the module's own weights.

Every run reads the module's parameters as they are when it begins, so sampling follows an in-place optimiser step. A
GPU run reads them in place; a CPU run packs copies (`decoder_layers.py`). Copies of bfloat16 weights are bfloat16, and
under `autocast: bfloat16` those of float32 ones; activations and cache are then float32.

n active slots, N new tokens, M prompts, T prompt tokens, L attended prefix, H hidden, V vocabulary, D head size, Q
query heads, K key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from rl_core.capabilities import decoding
from rl_core.cpu import fused_decode
from rl_core.cpu.allocator import Arena, allocate_huge_pages
from rl_core.cpu.fused_decode import (
    DecodeKernels,
    DecodeStep,
    DraftTable,
    FusedStep,
    SlotAdapters,
    SlotStates,
)
from rl_core.cpu.low_rank import AdapterSpan
from rl_core.inference.cuda_graphs import create_step_graphs
from rl_core.inference.decoder_layers import (
    AppendedTokens,
    DecoderLayer,
    OutputHead,
    PackedDecoderLayer,
    PackedLinear,
    PackedOutputHead,
)
from rl_core.inference.recorded_steps import MAX_RECORDED_APPENDED, DeviceStep, HostStep
from rl_core.inference.sampling import (
    apply_repetition_penalty,
    compute_row_log_probabilities,
    draw_row_tokens,
    draw_tokens,
)
from rl_core.models.lora import unwrap_linear, unwrap_model
from rl_core.models.routed_adapters import Adapter
from rl_core.settings import SamplingSettings
from rl_core.types import AutocastPrecision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_HEAD = "lm_head"


def _list_linear_names(layer: int) -> list[tuple[str, ...]]:
    """List the names of the linear layers in each of a layer's four products."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return [
        tuple(f"{attention}.{name}_proj" for name in "qkv"),
        (f"{attention}.o_proj",),
        (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        (f"{mlp}.down_proj",),
    ]


class Decoder:
    """Prefill and single steps over slots.

    Call `bind_weights` before a run and `reserve_cache` once its size is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        textless_ids: Collection[int] = (),
        autocast: AutocastPrecision = "none",
    ) -> None:
        """Bind the weights.

        Args:
            textless_ids: tokens that are never drawn.
            autocast: precision in which the trainer multiplies by float32 weights; copies of weights follow it.
        """
        self._base: Any = unwrap_model(model)
        self._autocast = autocast
        attention = self._base.model.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.query_heads: int = unwrap_linear(attention.q_proj).out_features // self.head_dim
        self.kv_heads: int = unwrap_linear(attention.k_proj).out_features // self.head_dim
        self.layer_parameters = sum(p.numel() for p in self._base.model.layers.parameters())
        self.vocab_size: int = unwrap_linear(self._base.lm_head).out_features
        known_ids = sorted({token for token in textless_ids if 0 <= token < self.vocab_size})
        self._textless_ids = torch.tensor(known_ids, dtype=torch.int64)
        # True = never prefill prompts of different lengths together: torch's rounding depends on a batch's width
        self.prefills_by_length = False
        self._arena = Arena()  # of packed weights
        self._cache: torch.Tensor | None = None  # [layers, 2, slots, K, max_length, D]
        self._seen_tokens: torch.Tensor | None = None  # see `reserve_seen_tokens`
        self._tables_cache: torch.Tensor | None = (
            None  # the cache that the tables of `_build_tables` refer to
        )
        self.bind_weights()
        self.graphs = create_step_graphs(self.device)

    def bind_weights(self) -> None:
        """Bind the module's current parameters."""
        layers = self._base.model.layers
        self._embedding = self._base.model.embed_tokens.weight.detach()
        self.device, self.dtype = self._embedding.device, self._embedding.dtype  # of activations
        self._compiled: DecodeKernels | None = None
        self._arena.reset()
        if decoding.check_packed_weights(self._base, autocast=self._autocast).allowed:
            in_bf16 = decoding.packs_in_bfloat16(self._base, self._autocast)
            if in_bf16:
                self.dtype = torch.float32
            if decoding.check_compiled_decoding(self._base, autocast=self._autocast).allowed:
                self._compiled = fused_decode.load_decode_kernels()
            self._layers: Sequence[DecoderLayer] = [
                PackedDecoderLayer(layer, self._arena, self._compiled, in_bf16=in_bf16)
                for layer in layers
            ]
            self._head: OutputHead = PackedOutputHead(
                self._base, self._arena, self._compiled, in_bf16=in_bf16
            )
        else:
            self._layers = [DecoderLayer(layer) for layer in layers]
            self._head = OutputHead(self._base)
        self._fused: FusedStep | None = None
        # arguments of the last `sample_steps`
        self._sampling_step: tuple[DecodeStep | None, SlotStates | None] = (None, None)
        self._products: list[PackedLinear] = []
        self._updates: list[list[AdapterSpan | None]] = []  # by adapter, then by product
        self._textless_ids = self._textless_ids.to(self.device)

    @property
    def supports_adapters(self) -> bool:
        """True if slots may have their own adapters (see `set_adapters`)."""
        return (
            isinstance(self._head, PackedOutputHead)
            and decoding.check_fused_step(self._base, autocast=self._autocast).allowed
        )

    def set_adapters(self, adapters: Sequence[Adapter], adapter_of: np.ndarray) -> None:
        """Give slots adapters over the bound weights, until the next `bind_weights`; call after `reserve_cache`.

        Args:
            adapters: each maps names of the model's linear layers to updates.
            adapter_of: int64 [slots], adapter number of each slot, negative = none; the caller changes it in place.
        """
        assert self._fused is not None and isinstance(self._head, PackedOutputHead)
        layers = [layer for layer in self._layers if isinstance(layer, PackedDecoderLayer)]
        self._products = [product for layer in layers for product in layer.products]
        self._products.append(self._head.product)
        names = [part for number in range(len(layers)) for part in _list_linear_names(number)]
        names.append((_HEAD,))
        known_names = {name for part in names for name in part}
        assert all(set(adapter) <= known_names for adapter in adapters)
        self._updates = [
            [
                product.build_adapter_span([adapter.get(name) for name in part])
                for product, part in zip(self._products, names, strict=True)
            ]
            for adapter in adapters
        ]
        self._fused.set_adapters(SlotAdapters(self._updates, adapter_of))

    @contextmanager
    def _apply_adapter(self, adapter: int) -> Iterator[None]:
        """Use one adapter for all rows; negative = none."""
        if adapter < 0:
            yield
            return
        try:
            for product, update in zip(self._products, self._updates[adapter], strict=True):
                product.adapter = update
            yield
        finally:
            for product in self._products:
                product.adapter = None

    @torch.inference_mode()
    def reserve_cache(self, slots: int, max_length: int) -> None:
        """Allocate a cache for `slots` sequences of at most `max_length` tokens; keep a larger existing one."""
        padding_slot = 0 if self.graphs is None else 1  # for rows that only fill up a recorded step
        shape = (
            len(self._layers),
            2,
            slots + padding_slot,
            self.kv_heads,
            max_length,
            self.head_dim,
        )
        cache = self._cache
        if (
            cache is None
            or cache.shape[2] < slots + padding_slot
            or cache.shape[4] < max_length
            or (cache.device, cache.dtype) != (self.device, self.dtype)
        ):
            self._drop_cache()  # first, so that both caches need not fit into memory together
            self._cache = cache = self._allocate_zeros(shape)
        self.slots, self.max_length = cache.shape[2] - padding_slot, cache.shape[4]
        if cache is not self._tables_cache:
            self._build_tables(cache)
            self._tables_cache = cache
        self._fused, self._sampling_step = self._build_fused_step(cache), (None, None)
        if self.graphs is not None:
            read = (cache, self._cos, self._sin, self._positions, *self._base.parameters())
            self.graphs.bind_memory(tuple(tensor.data_ptr() for tensor in read))

    def release_cache(self) -> None:
        """Release the cache, and the recordings that read it, until the next `reserve_cache`."""
        self._drop_cache()
        if self.graphs is not None:
            self._seen_tokens = None
            self.graphs.bind_memory(None)

    @property
    def holds_device_cache(self) -> bool:
        """True if the cache takes memory of an accelerator."""
        return self._cache is not None and self.device.type != "cpu"

    def _drop_cache(self) -> None:
        """Drop the cache and every view of it."""
        self._cache = self._tables_cache = self._fused = None
        self._sampling_step = None, None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def _build_tables(self, cache: torch.Tensor) -> None:
        """Build the lookup tables of the steps: views of the cache, positions, rotary sines and cosines."""
        self._keys = [cache[layer, 0].view(-1, self.head_dim) for layer in range(len(self._layers))]
        self._values = [
            cache[layer, 1].view(-1, self.head_dim) for layer in range(len(self._layers))
        ]
        self._slot_strides_1K = (
            torch.arange(self.kv_heads, device=self.device)[None] * self.max_length
        )
        positions = torch.arange(max(self.slots, self.max_length), device=self.device)
        cos, sin = self._base.model.rotary_emb(
            self._embedding[:1].to(self.dtype), position_ids=positions[None, : self.max_length]
        )
        self._cos, self._sin = cos[0], sin[0]  # [max_length, D]
        half = self.head_dim // 2
        # rotate_half(x) * sin == roll(x, D/2) * sin with the sign of the first half flipped
        self._sin = torch.cat([-self._sin[:, :half], self._sin[:, half:]], dim=-1)
        self._positions = positions

    def _allocate_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        return (
            allocate_huge_pages(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)
        )

    def _build_fused_step(self, cache: torch.Tensor) -> FusedStep | None:
        """Build the step that runs as one compiled call; return None if the model does not allow it."""
        if not self.supports_adapters or not isinstance(self._head, PackedOutputHead):
            return None
        weights = [
            layer.collect_packed_weights()
            for layer in self._layers
            if isinstance(layer, PackedDecoderLayer)
        ]
        head = self._head.read_packed_weight()
        return FusedStep(
            weights,
            head,
            self._head.norm.eps,
            self._embedding.contiguous(),
            cache,
            self._head.separate_norm_weight,
        )

    @torch.inference_mode()
    def prefill_prompts(
        self, ids_MT: torch.Tensor, adapter: int = -1, prefix: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute keys and values of right-padded prompts: [layers, 2, M, K, P + T, D]. Padding's are never read.

        Args:
            adapter: number of the prompts' adapter (see `set_adapters`), negative = none.
            prefix: keys and values of P tokens that precede every row, [layers, 2, 1, K, P, D]; None = P is 0.
        """
        with self._apply_adapter(adapter):
            return self._run_prefill(ids_MT, prefix)

    def _run_prefill(self, ids_MT: torch.Tensor, prefix: torch.Tensor | None) -> torch.Tensor:
        rows, width = ids_MT.shape
        start = 0 if prefix is None else prefix.shape[4]
        kv = torch.empty(
            len(self._layers),
            2,
            rows,
            self.kv_heads,
            start + width,
            self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        mask_TL = None  # True = is attended to
        if prefix is not None:
            kv[..., :start, :] = prefix
            positions = self._positions[: start + width]
            mask_TL = positions[None] <= positions[start:, None]
        x_NH = self._embedding[ids_MT.reshape(-1)].to(self.dtype)
        positions_N = self._positions[start : start + width].repeat(rows)
        cos_N1D, sin_N1D = self._cos[positions_N][:, None], self._sin[positions_N][:, None]
        for index, layer in enumerate(self._layers):
            qk_NhD, v_NKD = self._project_heads(layer, x_NH, cos_N1D, sin_N1D)
            q_MQTD, k_MKTD = (
                qk_NhD.view(rows, width, -1, self.head_dim)
                .transpose(1, 2)
                .split([self.query_heads, self.kv_heads], dim=1)
            )
            kv[index, 0, :, :, start:] = k_MKTD
            kv[index, 1, :, :, start:] = v_NKD.view(rows, width, -1, self.head_dim).transpose(1, 2)
            if index + 1 == len(self._layers):  # the last layer's output is not read
                break
            out_MQTD = functional.scaled_dot_product_attention(
                q_MQTD,
                kv[index, 0],
                kv[index, 1],
                attn_mask=mask_TL,
                is_causal=mask_TL is None,
                scale=layer.scale,
                enable_gqa=self.query_heads != self.kv_heads,
            )
            x_NH = layer.add_mlp(
                layer.add_attention(x_NH, out_MQTD.transpose(1, 2).reshape(rows * width, -1))
            )
        return kv

    @torch.inference_mode()
    def fill_slots(self, slots: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy prefilled rows into slots."""
        assert self._cache is not None
        self._cache[:, :, slots, :, : kv.shape[4]] = kv[:, :, rows]

    @torch.inference_mode()
    def copy_slot_prefix(self, slot: int, length: int) -> torch.Tensor:
        """Return a copy of a slot's first tokens as `fill_slots` takes them: [layers, 2, 1, K, length, D]."""
        assert self._cache is not None
        return self._cache[:, :, slot : slot + 1, :, :length].clone()

    @torch.inference_mode()
    def move_slots(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of some slots to others."""
        assert self._cache is not None
        self._cache[:, :, targets, :, :length] = self._cache[:, :, sources, :, :length]

    @torch.inference_mode()
    def step(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        count: int,
        length: int,
        appended: AppendedTokens | None = None,
        slots_n: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append new tokens to the cache and return the logits that follow the last token of each active slot.

        Args:
            tokens_N, positions_N: int64 [N]; the first n = `count` are the newest tokens of slots 0..n-1, the others
                are observation tokens that precede them, described by `appended`.
            length: attended prefix, the longest of all active slots, new tokens included.
            slots_n: slots that receive the newest tokens' keys and values; default 0, 1, ...
        Returns: [n, V].
        """
        cache = self._cache
        assert cache is not None
        slots_N = self._positions[:count] if slots_n is None else slots_n
        if appended is not None:
            slots_N = torch.cat([slots_N, appended.slots_E])
        if self._compiled is not None:
            return self._step_with_kernels(self._compiled, tokens_N, positions_N, slots_N, count)
        index = (
            (slots_N * (self.kv_heads * self.max_length) + positions_N)[:, None]
            + self._slot_strides_1K
        ).view(-1)
        masked_nL = self._positions[:length] > positions_N[:count, None]
        mask_n11L = torch.zeros_like(masked_nL, dtype=self.dtype).masked_fill_(
            masked_nL, -torch.inf
        )[:, None, None]
        group = self.query_heads // self.kv_heads
        extended_mask = (
            mask_n11L
            if appended is None
            else appended.build_mask(self._positions, self.dtype, group)
        )
        cos_N1D, sin_N1D = self._cos[positions_N][:, None], self._sin[positions_N][:, None]
        x_NH = functional.embedding(tokens_N, self._embedding).to(self.dtype)
        for number, layer in enumerate(self._layers):
            qk_NhD, v_NKD = self._project_heads(layer, x_NH, cos_N1D, sin_N1D)
            self._keys[number].index_copy_(
                0, index, qk_NhD[:, self.query_heads :].reshape(-1, self.head_dim)
            )
            self._values[number].index_copy_(0, index, v_NKD.reshape(-1, self.head_dim))
            keys, values = cache[number, 0], cache[number, 1]
            q_nKGD = qk_NhD[:count, : self.query_heads].view(
                count, self.kv_heads, -1, self.head_dim
            )
            out_NE = functional.scaled_dot_product_attention(
                q_nKGD,
                keys[:count, :, :length],
                values[:count, :, :length],
                attn_mask=mask_n11L,
                scale=layer.scale,
            ).reshape(count, -1)
            # after the last attention only the newest token of each slot matters
            if number + 1 == len(self._layers):
                x_NH = x_NH[:count]
            elif appended is not None:
                q_NQD = qk_NhD[:, : self.query_heads]
                extra_EE = appended.compute_attention(
                    q_NQD, keys, values, extended_mask, layer.scale
                )
                out_NE = torch.cat([out_NE, extra_EE])
            x_NH = layer.add_mlp(layer.add_attention(x_NH, out_NE))
        return self._head(x_NH)

    def reserve_seen_tokens(self) -> torch.Tensor:
        """Return the marks of the tokens of each slot, bool [slots, V] and a padding slot; call after `reserve_cache`.

        They stay at one address between runs, so that recorded steps with a repetition penalty do.
        """
        shape = (self.slots + 1, self.vocab_size)
        seen = self._seen_tokens
        if seen is None or seen.shape != shape or seen.device != self.device:
            self._seen_tokens = seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return seen.zero_()

    def sample_with_graphs(self, host_step: HostStep) -> np.ndarray:
        """Run `step` and draw tokens as a recorded step: one upload, one replay, one read-back.

        Returns: float64 [2 + 2 K, n]: tokens, log-probabilities, then the ids of the K most likely tokens and their
            log-probabilities.
        """
        assert self.graphs is not None
        shape = host_step.round_shape(self.slots, self.max_length)
        seen = host_step.seen

        @torch.inference_mode()
        def compute(inputs: torch.Tensor) -> torch.Tensor:
            step = DeviceStep.unpack(inputs, shape)
            logits_RV = self.step(
                step.tokens_N,
                step.positions_N,
                shape.rows,
                shape.length,
                step.appended,
                slots_n=step.slots_R,
            )
            if seen is not None:
                # The newest tokens, sampled by the last step or appended by this one; a step that is computed twice,
                # as to record it, marks the same ones. Assigning True would upload it, which a recording cannot.
                slots_N = step.slots_R
                if step.appended is not None:
                    slots_N = torch.cat([slots_N, step.appended.slots_E])
                marks_N = torch.ones_like(step.tokens_N, dtype=torch.bool)
                seen.index_put_((slots_N, step.tokens_N), marks_N)
                logits_RV = apply_repetition_penalty(
                    logits_RV, seen[: shape.rows], step.penalties_R[:, None]
                )
            drawn = draw_row_tokens(logits_RV, step.uniforms_R, step.drawing, self._textless_ids)
            parts = [part.double()[None] for part in drawn]
            if shape.num_top:
                log_p_RV = compute_row_log_probabilities(logits_RV, step.drawing)
                best = log_p_RV.topk(min(shape.num_top, self.vocab_size), dim=-1)
                parts += [best.indices.double().t(), best.values.double().t()]
            return torch.cat(parts)

        packed = host_step.pack(shape, padding_slot=self.slots)
        inputs = torch.from_numpy(packed).to(self.device, non_blocking=True)
        if shape.num_appended > MAX_RECORDED_APPENDED:
            result = compute(inputs)
        else:
            result = self.graphs.run_step(shape, compute, inputs)
        return result[:, : len(host_step.tokens_n)].cpu().numpy()

    @property
    def can_append_tokens(self) -> bool:
        """True if `append_tokens` can be called."""
        return self._fused is not None

    @torch.inference_mode()
    def append_tokens(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, slots_N: torch.Tensor
    ) -> None:
        """Write keys and values of new tokens into their slots, in order within each slot; compute no logits.

        A token's numbers depend on its slot alone, bit for bit.

        Args:
            tokens_N, positions_N, slots_N: int64 [N].
        """
        assert self._fused is not None and self._cache is not None
        step = DecodeStep(positions_N, slots_N, self._cos, self._sin, self._cache, self.query_heads)
        self._fused(step, tokens_N, 0)

    def can_sample_steps(self, sampling: SamplingSettings) -> bool:
        """Return whether `sample_steps` can be called."""
        return self._fused is not None and not sampling.is_restricted

    @property
    def can_draft_tokens(self) -> bool:
        """True if drafts pay: each step reads the weights from memory, so that a few more rows take little time."""
        return self._fused is not None and self._fused.reads_memory

    @torch.inference_mode()
    def sample_steps(
        self,
        states: SlotStates,
        count: int,
        is_end_V: np.ndarray,
        steps: int,
        drafts: DraftTable | None = None,
    ) -> None:
        """Run `step` and `draw_tokens` for the first `count` slots, `steps` times, each slot until its turn ends.

        Args:
            drafts: the same tokens come out, several in a step where drafts are right; only if `can_draft_tokens`.
        """
        assert self._fused is not None and self._cache is not None
        step, previous_states = self._sampling_step
        if step is None or previous_states is not states or step.threads != torch.get_num_threads():
            positions = torch.from_numpy(states.positions)
            slots = self._positions[: len(positions)]
            step = DecodeStep(positions, slots, self._cos, self._sin, self._cache, self.query_heads)
            self._sampling_step = step, states
        step.keep_first_tokens(count)
        self._fused.sample_tokens(step, states, is_end_V, steps, self._textless_ids, drafts)

    def draw_tokens(
        self, logits_nV: torch.Tensor, uniforms_n: torch.Tensor, sampling: SamplingSettings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw as `sampling.draw_tokens` does, with compiled kernels where available."""
        if self._compiled is not None and not sampling.is_restricted:
            return self._compiled.draw_tokens(
                logits_nV, uniforms_n, sampling.temperature, self._textless_ids
            )
        restriction = sampling if sampling.is_restricted else None
        return draw_tokens(
            logits_nV, uniforms_n, sampling.temperature, restriction, self._textless_ids
        )

    def _step_with_kernels(
        self,
        compiled: DecodeKernels,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        count: int,
    ) -> torch.Tensor:
        """Run `step` with compiled kernels.

        Every token attends to its slot up to its own position, so no mask is needed.
        """
        cache = self._cache
        assert cache is not None
        step = DecodeStep(positions_N, slots_N, self._cos, self._sin, cache, self.query_heads)
        if self._fused is not None:
            return self._fused(step, tokens_N.contiguous(), count)
        x_NH = functional.embedding(tokens_N, self._embedding).to(self.dtype)
        for number, layer in enumerate(self._layers):
            # after the last attention only the newest token of each slot matters
            if number + 1 == len(self._layers):
                step.rows = count
            heads_NE = layer.project_heads(x_NH)
            attended_NE = compiled.attend_slots(
                step, heads_NE, cache[number], layer.q_norm, layer.k_norm, layer.scale
            )
            x_NH = layer.add_mlp(layer.add_attention(x_NH[: step.rows], attended_NE))
        return self._head(x_NH)

    def _project_heads(
        self, layer: DecoderLayer, x_NH: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's rotated queries and keys together, [N, Q + K, D], and its values, [N, K, D]."""
        heads_NhD = layer.project_heads(x_NH).view(x_NH.shape[0], -1, self.head_dim)
        qk_NhD, v_NKD = heads_NhD.split([self.query_heads + self.kv_heads, self.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_NQD, k_NKD = qk_NhD.split([self.query_heads, self.kv_heads], dim=1)
            q_NQD, k_NKD = layer.q_norm(q_NQD), layer.k_norm(k_NKD)
            qk_NhD = torch.cat([q_NQD, k_NKD], dim=1)
        rotated_NhD = torch.roll(qk_NhD, self.head_dim // 2, dims=-1)
        return torch.addcmul(qk_NhD * cos_N1D, rotated_NhD, sin_N1D), v_NKD
