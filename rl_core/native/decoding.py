"""What a decoding step does between its matrix products, in compiled code (`decode.c`).

N new tokens, n of them attending, D head size, Q query and K key/value heads, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import torch

from rl_core.native import library

__all__ = ["Native", "Step", "load"]

MOST_IN_GROUP, LARGEST_HEAD, WIDTH = 8, 256, 16  # as in decode.c


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "Q", "K", "D", "length")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "cosines", "sines", "q_weight", "k_weight")),
        *((name, ctypes.c_float) for name in ("q_eps", "k_eps", "scale")),
        ("scores", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    ]


class Norm(Protocol):
    """What is needed of `layers.RmsNorm`."""

    weight: torch.Tensor
    eps: float


class Step:
    """What all layers of one decoding step have in common. It keeps the tensors that the compiled code points to."""

    def __init__(
        self,
        positions_N: torch.Tensor,
        slots_N: torch.Tensor,
        cos_LD: torch.Tensor,
        sin_LD: torch.Tensor,
        cache: torch.Tensor,
        query_heads: int,
    ) -> None:
        """positions_N, slots_N: int64, of the new tokens. cos_LD, sin_LD: the sines' first half with its sign turned.

        cache: [layers, 2, slots, K, length, D].
        """
        _, _, _, kv_heads, length, size = cache.shape
        threads = torch.get_num_threads()
        scores = cache.new_empty(threads, query_heads // kv_heads, length)
        self._kept = (positions_N, slots_N, cos_LD, sin_LD, scores)
        self.rows = len(positions_N)  # the first of them attend
        self.fields = _Step(
            tokens=self.rows, rows=self.rows, Q=query_heads, K=kv_heads, D=size, length=length,
            slots=slots_N.data_ptr(), positions=positions_N.data_ptr(),
            cosines=cos_LD.data_ptr(), sines=sin_LD.data_ptr(), scores=scores.data_ptr(), threads=threads,
        )  # fmt: skip


class Native:
    """The compiled functions over contiguous float32 tensors on the CPU. Attention runs on torch's threads."""

    def __init__(self, code: ctypes.CDLL) -> None:
        count, real, place = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        self._normed, self._gated, self._attend, self._draw = (
            getattr(code, name) for name in ("normed", "gated", "attend", "draw")
        )
        self._normed.argtypes = (place, count, count, real, place)
        self._gated.argtypes = (place, count, count, place)
        self._attend.argtypes = (place, place, place, place, place)
        self._draw.argtypes = (place, count, count, place, real, place, place, place)
        for function in (self._normed, self._gated, self._attend, self._draw):
            function.restype = None

    @staticmethod
    def can_attend(*, head_dim: int, query_heads: int, kv_heads: int) -> bool:
        """Whether heads have a size that the code is made for."""
        return head_dim % WIDTH == 0 and head_dim <= LARGEST_HEAD and query_heads // kv_heads <= MOST_IN_GROUP

    def normed(self, x_NH: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x)."""
        out_NH = torch.empty_like(x_NH)
        self._normed(x_NH.data_ptr(), *x_NH.shape, eps, out_NH.data_ptr())
        return out_NH

    def gated(self, both_NF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [gate, up] side by side: [N, 2 F] -> [N, F]."""
        rows, width = both_NF.shape[0], both_NF.shape[1] // 2
        out_NF = both_NF.new_empty(rows, width)
        self._gated(both_NF.data_ptr(), rows, width, out_NF.data_ptr())
        return out_NF

    def attend(
        self,
        step: Step,
        heads_NE: torch.Tensor,
        cache: torch.Tensor,
        q_norm: Norm | None,
        k_norm: Norm | None,
        scale: float,
    ) -> torch.Tensor:
        """Rotate, put keys and values into their slots, attend: [N, (Q + 2 K) D] -> [n, Q D], n = `step.rows`.

        Args:
            cache: keys and values of one layer, [2, slots, K, length, D].
            q_norm, k_norm: of the heads, where the model has them. scale: of the scores.
        """
        fields = step.fields
        fields.rows, fields.scale = step.rows, scale
        fields.q_weight, fields.q_eps = (q_norm.weight.data_ptr(), q_norm.eps) if q_norm is not None else (None, 0.0)
        fields.k_weight, fields.k_eps = (k_norm.weight.data_ptr(), k_norm.eps) if k_norm is not None else (None, 0.0)
        out_nE = heads_NE.new_empty(step.rows, fields.Q * fields.D)
        keys, values = cache[0].data_ptr(), cache[1].data_ptr()
        self._attend(ctypes.addressof(fields), heads_NE.data_ptr(), keys, values, out_nE.data_ptr())
        return out_nE

    def draw(
        self, logits_nV: torch.Tensor, uniforms_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sampling.draw`."""
        rows, size = logits_nV.shape
        tokens_n, logprobs_n = torch.empty(rows, dtype=torch.int64), logits_nV.new_empty(rows)
        room = logits_nV.new_empty(2 * (size + WIDTH))
        self._draw(
            logits_nV.data_ptr(),
            rows,
            size,
            uniforms_n.data_ptr(),
            temperature,
            room.data_ptr(),
            tokens_n.data_ptr(),
            logprobs_n.data_ptr(),
        )
        return tokens_n, logprobs_n


@functools.cache
def load() -> Native | None:
    """The functions, or None where nothing is compiled."""
    found = library.load()
    return Native(found) if found is not None else None
