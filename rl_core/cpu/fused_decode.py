"""Compiled decoding steps: the operations between matrix products (`decode_ops.c`), or a whole step
(`fused_decode.c`).

N new tokens, n of them attending, D head size, Q query and K key/value heads, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rl_core.cpu import build
from rl_core.cpu.low_rank import AdapterSpan
from rl_core.cpu.packed_gemm import PackedMatrix, PackedVectors

MAX_GROUP_SIZE, MAX_HEAD_DIM, VECTOR_WIDTH = 8, 256, 16  # as in decode_ops.c
MAX_CACHED_BYTES = 24 * 2**20  # weights up to this size stay in the cache that the threads share
_MIN_THREADED_LOGITS = 2**16  # fewer logits are sampled on one thread
MIN_ROWS_PER_THREAD = 8  # fewest rows that one thread takes through a whole step by itself
MAX_DRAFTED_ROWS = 16  # most rows of a step with drafts
FREE_ROWS = 16  # rows that take as long to multiply as their weights take to read from memory
DRAFT_ENTRIES, DRAFT_STREAKS = 2**16, 4  # as in fused_decode.c


PackedOperand = PackedMatrix | PackedVectors


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "Q", "K", "D", "length")),
        *(
            (name, ctypes.c_void_p)
            for name in ("slots", "positions", "cosines", "sines", "q_weight", "k_weight")
        ),
        *((name, ctypes.c_float) for name in ("q_eps", "k_eps", "scale")),
        ("scores", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


class RmsNormWeights(Protocol):
    """Interface of `decoder_layers.RmsNorm`."""

    weight: torch.Tensor
    eps: float


class DecodeStep:
    """Arguments of one decoding step that all layers share.

    It keeps references to the tensors that the compiled code points to.
    """

    def __init__(
        self,
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        cos_LD: torch.Tensor,
        sin_LD: torch.Tensor,
        cache: torch.Tensor,
        query_heads: int,
    ) -> None:
        """Fill the C structure.

        Args:
            positions_N, slots_N: int64, of the new tokens.
            cos_LD, sin_LD: rotary tables; the sign of the sines' first half is flipped.
            cache: [layers, 2, slots, K, length, D].
        """
        _, _, _, kv_heads, length, size = cache.shape
        threads = torch.get_num_threads()
        scores = cache.new_empty(threads, query_heads // kv_heads, length)
        self._referenced_tensors = (positions_N, slots_N, cos_LD, sin_LD, scores)
        self.threads, self.rows = threads, len(positions_N)  # the first rows attend
        self.fields = _Step(
            tokens=self.rows,
            rows=self.rows,
            Q=query_heads,
            K=kv_heads,
            D=size,
            length=length,
            slots=slots_N.data_ptr(),
            positions=positions_N.data_ptr(),
            cosines=cos_LD.data_ptr(),
            sines=sin_LD.data_ptr(),
            scores=scores.data_ptr(),
            threads=threads,
        )

    def keep_first_tokens(self, count: int) -> None:
        """Limit the step to the first `count` new tokens."""
        self.rows = self.fields.tokens = self.fields.rows = count


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("heads", "out", "gate_up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in ("heads_bias", "out_bias", "gate_up_bias", "down_bias")
        ),
        *((name, ctypes.c_void_p) for name in ("q_weight", "k_weight")),
        *((name, ctypes.c_void_p) for name in ("input_weight", "mlp_weight", "keys", "values")),
        *((name, ctypes.c_float) for name in ("q_eps", "k_eps", "input_eps", "mlp_eps", "scale")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "H", "I", "V")),
        *((name, ctypes.c_void_p) for name in ("layer", "embedding", "bf16_embedding")),
        *((name, ctypes.c_void_p) for name in ("head", "head_bias", "head_weight")),
        ("head_eps", ctypes.c_float),
        ("product", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("copies", "least_own")),
        *((name, ctypes.c_void_p) for name in ("adapters", "adapter_of")),
    ]


class _LowRank(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("down", "up", "columns")),
    ]


class _Sampling(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "positions", "limits", "sampled", "acted")
        ),
        *((name, ctypes.c_void_p) for name in ("uniforms", "chosen", "logprobs")),
        ("most", ctypes.c_int64),
        ("is_end", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("never", ctypes.c_void_p),
        ("nevers", ctypes.c_int64),
    ]


class _Drafts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("entries", "read", "shares", "counts")),
        *((name, ctypes.c_int64) for name in ("most_rows", "free_rows")),
    ]


_NO_IDS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class PackedWeights:
    """One layer's packed weights and biases; norms' weights are None if they are multiplied into the packed ones."""

    heads: tuple[PackedOperand, torch.Tensor | None]
    out: tuple[PackedOperand, torch.Tensor | None]
    gate_up: tuple[PackedOperand, torch.Tensor | None]
    down: tuple[PackedOperand, torch.Tensor | None]
    q_norm: RmsNormWeights | None
    k_norm: RmsNormWeights | None
    input_eps: float
    mlp_eps: float
    scale: float
    input_weight: torch.Tensor | None = None
    mlp_weight: torch.Tensor | None = None


@dataclass(slots=True)
class SlotStates:
    """Sampling state of every slot, changed in place by `FusedStep.sample_tokens`; arrays are contiguous by row."""

    tokens: np.ndarray  # int64 [slots], newest tokens, not in the cache yet
    positions: np.ndarray  # int64 [slots], positions of these tokens
    limits: np.ndarray  # int64 [slots], longest lengths of the sequences
    sampled: np.ndarray  # int64 [slots], tokens sampled in total
    acted: np.ndarray  # int64 [slots], tokens sampled in this turn
    uniforms: np.ndarray  # float64 [slots, most]: number `sampled` decides the next token
    chosen: np.ndarray  # int64 [slots, most], tokens of this turn
    logprobs: np.ndarray  # float64 [slots, most], of these tokens
    temperatures: np.ndarray  # float32 [slots]


class DraftTable:
    """Drafts of the next tokens of all slots of a run: what last followed the same three tokens in any of them.

    Drafts are computed as further rows of a step. They change how many tokens a step samples, and no token.
    """

    def __init__(self, slots: int) -> None:
        """Begin with no drafts."""
        code = build.load_library()
        assert code is not None
        self._learn_text = code.learn_text
        self._learn_text.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._learn_text.restype = None
        self.read = np.full((slots, 3), -1, dtype=np.int64)  # last tokens read before each turn
        self.counts = np.zeros(2, dtype=np.int64)  # drafts computed, drafts taken
        self._entries = np.zeros((DRAFT_ENTRIES, 2), dtype=np.int32)
        self._shares = np.zeros(DRAFT_STREAKS, dtype=np.float32)
        self.fields = _Drafts(
            entries=self._entries.ctypes.data,
            read=self.read.ctypes.data,
            shares=self._shares.ctypes.data,
            counts=self.counts.ctypes.data,
            most_rows=MAX_DRAFTED_ROWS,
            free_rows=FREE_ROWS,
        )

    def read_text(self, slot: int, ids: Sequence[int]) -> None:
        """Learn from the text that a slot reads before its turn, and continue from its end.

        Args:
            ids: the text, with the tokens before it if it does not begin the slot's context.
        """
        self.read[slot] = -1
        last = ids[-3:]
        self.read[slot, 3 - len(last) :] = last
        tokens = np.asarray(ids, dtype=np.int64)
        self._learn_text(ctypes.addressof(self.fields), tokens.ctypes.data, len(tokens))


class SlotAdapters:
    """Low-rank adapters of a `FusedStep`'s slots: tables that the compiled code reads."""

    def __init__(
        self, adapters: Sequence[Sequence[AdapterSpan | None]], adapter_of: np.ndarray
    ) -> None:
        """Build the tables.

        Args:
            adapters: of each adapter, the updates of all products: heads, out, gate_up and down of every layer, then
                the head.
            adapter_of: int64 [slots], adapter number of each slot, negative = none; may be changed in place.
        """
        self.adapter_of = adapter_of
        self.table = (_LowRank * max(1, sum(map(len, adapters))))()
        self._referenced_tensors: list[torch.Tensor] = []
        for fields, span in zip(self.table, itertools.chain(*adapters), strict=False):
            if span is None:
                continue
            ups = [(up_OR * span.scale).t().reshape(-1) for up_OR in span.ups]  # row by row
            columns = [
                pair
                for pair, rank in zip(span.columns, span.ranks, strict=True)
                for _ in range(rank)
            ]
            parts = torch.cat(list(span.downs)).contiguous(), torch.cat(ups), torch.tensor(columns)
            self._referenced_tensors += parts
            fields.rows = len(columns)
            fields.down, fields.up, fields.columns = (part.data_ptr() for part in parts)


def _read_address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class FusedStep:
    """Whole decoding steps in one call (`fused_decode.c`), for packed weights."""

    def __init__(
        self,
        layers: Sequence[PackedWeights],
        head: tuple[PackedOperand, torch.Tensor | None],
        head_eps: float,
        embedding_VH: torch.Tensor,
        cache: torch.Tensor,
        head_weight_H: torch.Tensor | None = None,
    ) -> None:
        """Fill the C structures.

        Args:
            embedding_VH: contiguous, float32 or bfloat16.
            head_weight_H: of the last norm; None = multiplied into the head's packed weight.
            cache: keys and values, [layers, 2, slots, K, length, D].
        """
        code = build.load_library()
        assert code is not None
        self._decode_step, self._decode_steps = code.decode_step, code.decode_steps
        self._decode_drafted_steps = code.decode_drafted_steps
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._decode_step.argtypes = (pointer, pointer, pointer, number, pointer, pointer, pointer)
        self._decode_steps.argtypes = (pointer, pointer, pointer, number, *(pointer,) * 6)
        self._decode_drafted_steps.argtypes = (
            *(pointer,) * 4,
            number,
            *(pointer,) * 6,
        )
        for function in (self._decode_step, self._decode_steps, self._decode_drafted_steps):
            function.restype = None
        # keeps alive what the compiled code points to
        self._referenced_tensors = (layers, head, embedding_VH, cache, head_weight_H)
        self._layers = (_Layer * len(layers))()
        for fields, layer, layer_cache in zip(self._layers, layers, cache, strict=True):
            for name in ("heads", "out", "gate_up", "down"):
                packed, bias = getattr(layer, name)
                setattr(fields, name, packed.address)
                setattr(fields, f"{name}_bias", _read_address(bias))
            for name in ("q", "k"):
                norm: RmsNormWeights | None = getattr(layer, f"{name}_norm")
                if norm is not None:
                    setattr(fields, f"{name}_weight", norm.weight.data_ptr())
                    setattr(fields, f"{name}_eps", norm.eps)
            fields.input_weight = _read_address(layer.input_weight)
            fields.mlp_weight = _read_address(layer.mlp_weight)
            fields.keys, fields.values = layer_cache[0].data_ptr(), layer_cache[1].data_ptr()
            fields.input_eps, fields.mlp_eps = layer.input_eps, layer.mlp_eps
            fields.scale = layer.scale
        packed, bias = head
        is_bf16 = embedding_VH.dtype == torch.bfloat16
        self._width = layers[0].down[0].inputs
        size = sum(
            getattr(layer, name)[0].size
            for layer in layers
            for name in ("heads", "out", "gate_up", "down")
        )
        # the weights exceed the cache that the threads share
        self.reads_memory = size + packed.size > MAX_CACHED_BYTES
        self._model = _Model(
            layers=len(layers),
            H=embedding_VH.shape[1],
            I=self._width,
            V=packed.outputs,
            layer=ctypes.addressof(self._layers),
            embedding=embedding_VH.data_ptr() if not is_bf16 else None,
            bf16_embedding=embedding_VH.data_ptr() if is_bf16 else None,
            head=packed.address,
            head_bias=_read_address(bias),
            head_weight=_read_address(head_weight_H),
            head_eps=head_eps,
            product=ctypes.cast(packed.gemm.part, pointer).value,
            copies=packed.gemm.room(1),
            least_own=2**62 if self.reads_memory else MIN_ROWS_PER_THREAD,
        )
        self._gemm, self._activations = packed.gemm, torch.empty(0)
        self._sampling_buffers: tuple[torch.Tensor, ...] = ()  # see `_allocate_sampling_buffers`
        self._sampling_buffers_size = (0, 0)  # tokens and threads of these buffers

    def set_adapters(self, adapters: SlotAdapters | None) -> None:
        """Set the adapters of the slots; None = no slot has one."""
        self._adapters = adapters
        self._model.adapters = None if adapters is None else ctypes.addressof(adapters.table)
        self._model.adapter_of = None if adapters is None else adapters.adapter_of.ctypes.data

    def __call__(self, step: DecodeStep, tokens_N: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits [count, V] that follow the first `count` new tokens; write keys and values into the
        cache.
        """
        fields, model = step.fields, self._model
        logits_nV = self._activations.new_empty(count, model.V)
        self._decode_step(
            ctypes.addressof(model),
            ctypes.addressof(fields),
            tokens_N.data_ptr(),
            count,
            self._reserve_activations(fields, fields.tokens),
            self._gemm.reserve_scratch(fields.threads),
            logits_nV.data_ptr(),
        )
        return logits_nV

    def sample_tokens(
        self,
        step: DecodeStep,
        states: SlotStates,
        is_end_V: np.ndarray,
        steps: int,
        textless_ids: torch.Tensor,
        drafts: DraftTable | None = None,
    ) -> None:
        """Sample `steps` tokens for each of the first slots, fewer if its turn ends earlier, more with drafts.

        A turn ends with a token of `is_end_V` (bool), at the limit, or with a log-probability that is not finite.

        Args:
            step: with as many tokens as slots.
            textless_ids: int64, ascending: tokens that are not drawn.
            drafts: for weights that each step reads from memory (`reads_memory`).
        """
        fields, model = step.fields, self._model
        sampling = _Sampling(
            **{name: getattr(states, name).ctypes.data for name in states.__slots__},
            most=states.chosen.shape[1],
            is_end=is_end_V.ctypes.data,
            never=textless_ids.data_ptr(),
            nevers=len(textless_ids),
        )
        rows = fields.tokens if drafts is None else max(fields.tokens, MAX_DRAFTED_ROWS)
        buffers = self._allocate_sampling_buffers(rows, fields.threads)
        memory = (
            self._reserve_activations(fields, rows),
            self._gemm.reserve_scratch(fields.threads),
            *(buffer.data_ptr() for buffer in buffers),
        )
        arguments = (ctypes.addressof(part) for part in (model, fields, sampling))
        if drafts is None:
            self._decode_steps(*arguments, steps, *memory)
        else:
            self._decode_drafted_steps(*arguments, ctypes.addressof(drafts.fields), steps, *memory)

    def _allocate_sampling_buffers(self, tokens: int, threads: int) -> tuple[torch.Tensor, ...]:
        """Return scratch memory of `sample_tokens`: logits, powers, lists of slots, ends.

        The buffers are kept, because each torch allocation lets another thread take the interpreter lock, for a
        millisecond.
        """
        if tokens > self._sampling_buffers_size[0] or threads > self._sampling_buffers_size[1]:
            tokens = max(tokens, self._sampling_buffers_size[0])
            threads = max(threads, self._sampling_buffers_size[1])
            self._sampling_buffers_size = tokens, threads
            self._sampling_buffers = (
                self._activations.new_empty(tokens, self._model.V),
                self._activations.new_empty(threads, 2 * (self._model.V + VECTOR_WIDTH)),
                torch.empty(max(threads * 3, 7) * tokens, dtype=torch.int64),
                torch.empty(tokens, dtype=torch.uint8),
            )
        return self._sampling_buffers

    def _reserve_activations(self, fields: _Step, rows: int) -> int:
        """Return the address of scratch memory for the activations of a step of `rows` tokens."""
        model = self._model
        heads = 2 * fields.D * (fields.Q + fields.K)
        needed = rows * (2 * model.H + heads + 3 * model.I)
        if len(self._activations) < needed:
            self._activations = self._activations.new_empty(needed)
        return self._activations.data_ptr()


class DecodeKernels:
    """The compiled functions over contiguous float32 tensors on the CPU. Attention runs on torch's threads."""

    def __init__(self, code: ctypes.CDLL) -> None:
        count, real, pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        self._normed, self._gated, self._attend, self._draw = (
            getattr(code, name) for name in ("normed", "gated_forward", "attend", "draw")
        )
        self._normed.argtypes = (pointer, count, count, real, pointer)
        self._gated.argtypes = (pointer, count, count, pointer, ctypes.c_int)
        self._attend.argtypes = (pointer, pointer, pointer, pointer, pointer)
        self._draw.argtypes = (
            pointer,
            count,
            count,
            pointer,
            count,
            pointer,
            real,
            pointer,
            pointer,
            pointer,
            ctypes.c_int,
        )
        for function in (self._normed, self._gated, self._attend, self._draw):
            function.restype = None

    @staticmethod
    def can_attend(*, head_dim: int, query_heads: int, kv_heads: int) -> bool:
        """Return whether the code supports heads of this size and this many queries per key."""
        return (
            head_dim % VECTOR_WIDTH == 0
            and head_dim <= MAX_HEAD_DIM
            and query_heads // kv_heads <= MAX_GROUP_SIZE
        )

    def compute_rms_norm(self, x_NH: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute x / rms(x)."""
        out_NH = torch.empty_like(x_NH)
        self._normed(x_NH.data_ptr(), *x_NH.shape, eps, out_NH.data_ptr())
        return out_NH

    def compute_gated_silu(self, both_NF: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up of [gate, up] side by side: [N, 2 F] -> [N, F]."""
        rows, width = both_NF.shape[0], both_NF.shape[1] // 2
        out_NF = both_NF.new_empty(rows, width)
        self._gated(both_NF.data_ptr(), rows, width, out_NF.data_ptr(), torch.get_num_threads())
        return out_NF

    def attend_slots(
        self,
        step: DecodeStep,
        heads_NE: torch.Tensor,
        cache: torch.Tensor,
        q_norm: RmsNormWeights | None,
        k_norm: RmsNormWeights | None,
        scale: float,
    ) -> torch.Tensor:
        """Rotate heads, write keys and values into their slots, and attend: [N, (Q + 2 K) D] -> [n, Q D], n =
        `step.rows`.

        Args:
            cache: keys and values of one layer, [2, slots, K, length, D].
            q_norm, k_norm: of the heads, if the model has them.
            scale: of the scores.
        """
        fields = step.fields
        fields.rows, fields.scale = step.rows, scale
        fields.q_weight, fields.q_eps = (
            (q_norm.weight.data_ptr(), q_norm.eps) if q_norm is not None else (None, 0.0)
        )
        fields.k_weight, fields.k_eps = (
            (k_norm.weight.data_ptr(), k_norm.eps) if k_norm is not None else (None, 0.0)
        )
        out_nE = heads_NE.new_empty(step.rows, fields.Q * fields.D)
        keys, values = cache[0].data_ptr(), cache[1].data_ptr()
        self._attend(ctypes.addressof(fields), heads_NE.data_ptr(), keys, values, out_nE.data_ptr())
        return out_nE

    def draw_tokens(
        self,
        logits_nV: torch.Tensor,
        uniforms_n: torch.Tensor,
        temperature: float,
        textless_ids: torch.Tensor = _NO_IDS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw as `sampling.draw_tokens` does, without a restriction; `textless_ids` in ascending order."""
        rows, size = logits_nV.shape
        tokens_n, logprobs_n = torch.empty(rows, dtype=torch.int64), logits_nV.new_empty(rows)
        threads = torch.get_num_threads() if rows * size >= _MIN_THREADED_LOGITS else 1
        scratch = logits_nV.new_empty(threads, 2 * (size + VECTOR_WIDTH))
        self._draw(
            logits_nV.data_ptr(),
            rows,
            size,
            textless_ids.data_ptr(),
            len(textless_ids),
            uniforms_n.data_ptr(),
            temperature,
            scratch.data_ptr(),
            tokens_n.data_ptr(),
            logprobs_n.data_ptr(),
            threads,
        )
        return tokens_n, logprobs_n


@functools.cache
def load_decode_kernels() -> DecodeKernels | None:
    """Load the functions; return None without compiled code."""
    code = build.load_library()
    return DecodeKernels(code) if code is not None else None
