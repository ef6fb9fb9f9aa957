"""Causal attention of rows of any length, forward and backward, in compiled code (`attention.c`).

N tokens, R rows, T positions of all rows, D head size, Q query and K key/value heads, E = (Q + 2 K) D.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from rl_core.cpu import build

MAX_HEAD_DIM, VECTOR_WIDTH = 256, 16  # as in attention.c


class _AttentionArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "Q", "K", "D", "longest")),
        *((name, ctypes.c_void_p) for name in ("starts", "named", "first", "cosines", "sines")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


@dataclass(slots=True)
class AttentionRows:
    """Rows as indices of their tokens; all int64 on the CPU."""

    # [R + 1] first position of each row among the T, then the end of the last row
    starts_R: torch.Tensor
    tokens_T: torch.Tensor  # token index in 0..N-1 at each position
    first_R: torch.Tensor  # first token of each row that is not shared with an earlier row
    ends_N: torch.Tensor  # [N + 1] offsets in `indices_T` of each token's positions
    indices_T: torch.Tensor
    longest: int


class AttentionKernel:
    """Rotary embedding and attention on torch's threads. All tensors are contiguous float32 on the CPU."""

    def __init__(self, code: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self._forward, self._backward = code.attention_forward, code.attention_backward
        self._forward.argtypes, self._forward.restype = (pointer,) * 5, None
        self._backward.argtypes, self._backward.restype = (pointer,) * 9, None

    @staticmethod
    def supports_head_dim(head_dim: int) -> bool:
        """Return whether the code supports heads of this size."""
        return head_dim % VECTOR_WIDTH == 0 and head_dim <= MAX_HEAD_DIM

    def forward(
        self,
        heads_NhD: torch.Tensor,
        rows: AttentionRows,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        kv_heads: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attend: queries, keys and values side by side in `heads_NhD` -> [N, Q D].

        Returns: the result; for `backward` the rotated heads [N, h, D] and the logarithms of the denominators [N, Q].
        """
        fields = self._build_arguments(heads_NhD, rows, cos_ND, sin_ND, kv_heads, scale)
        rotated = torch.empty_like(heads_NhD)
        out = heads_NhD.new_empty(len(heads_NhD), fields.Q * fields.D)
        logs = heads_NhD.new_empty(len(heads_NhD), fields.Q)
        self._forward(
            ctypes.addressof(fields),
            heads_NhD.data_ptr(),
            rotated.data_ptr(),
            out.data_ptr(),
            logs.data_ptr(),
        )
        return out, rotated, logs

    def backward(
        self,
        grad_NE: torch.Tensor,
        out_NE: torch.Tensor,
        rotated_NhD: torch.Tensor,
        logs_NQ: torch.Tensor,
        rows: AttentionRows,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        """Compute the gradient of the heads [N, h, D] from that of the result of `forward`."""
        fields = self._build_arguments(rotated_NhD, rows, cos_ND, sin_ND, kv_heads, scale)
        grad_heads = torch.empty_like(rotated_NhD)
        scratch = rotated_NhD.new_empty(len(rows.tokens_T), 2 * kv_heads * fields.D)
        self._backward(
            ctypes.addressof(fields),
            rotated_NhD.data_ptr(),
            out_NE.data_ptr(),
            logs_NQ.data_ptr(),
            grad_NE.data_ptr(),
            rows.ends_N.data_ptr(),
            rows.indices_T.data_ptr(),
            scratch.data_ptr(),
            grad_heads.data_ptr(),
        )
        return grad_heads

    @staticmethod
    def _build_arguments(
        heads_NhD: torch.Tensor,
        rows: AttentionRows,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
        kv_heads: int,
        scale: float,
    ) -> _AttentionArguments:
        tokens, heads, size = heads_NhD.shape
        return _AttentionArguments(
            tokens=tokens,
            rows=len(rows.first_R),
            Q=heads - 2 * kv_heads,
            K=kv_heads,
            D=size,
            longest=rows.longest,
            starts=rows.starts_R.data_ptr(),
            named=rows.tokens_T.data_ptr(),
            first=rows.first_R.data_ptr(),
            cosines=cos_ND.data_ptr(),
            sines=sin_ND.data_ptr(),
            scale=scale,
            threads=torch.get_num_threads(),
        )


@functools.cache
def load_attention_kernel() -> AttentionKernel | None:
    """Load the functions; return None without compiled code."""
    code = build.load_library()
    return AttentionKernel(code) if code is not None else None
