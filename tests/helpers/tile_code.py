"""The compiled code with its products by matrix tiles (`tile_stand_in.h`) or dot products of bfloat16 numbers, also on
processors that have none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from unittest import mock

from rl_core.cpu import build, packed_gemm

__all__ = ["bf16_products", "dots_code", "tile_code"]

_STAND_IN = Path(__file__).with_name("tile_stand_in.h")


def _digest() -> str:
    return hashlib.sha256(_STAND_IN.read_bytes()).hexdigest()[:8]


@functools.cache
def tile_code() -> ctypes.CDLL | None:
    """Return the library; None if there is no compiler."""
    if packed_gemm.load_int8_gemm() is not None:
        return build.load_library()
    features = (f'-DTILE_STAND_IN="{_STAND_IN}"', f"-DSTAND_IN_DIGEST=0x{_digest()}")
    with mock.patch.object(build, "_FLAGS", (*build._FLAGS, *features)):
        code: ctypes.CDLL | None = build.load_library.__wrapped__()
    return code


@functools.cache
def dots_code() -> ctypes.CDLL | None:
    """Return the library with dot products of bfloat16 numbers; None if there is no compiler."""
    code = build.load_library()
    if code is None or code.dots_ready():
        return code
    with mock.patch.object(build, "_FLAGS", (*build._FLAGS, "-DDOTS_STAND_IN")):
        stand_in: ctypes.CDLL | None = build.load_library.__wrapped__()
    return stand_in


def bf16_products(kernel: str) -> packed_gemm.PackedProducts | None:
    """Return products with bfloat16 weights by a kernel; None if there is no compiler, or vectors are too short."""
    code = {"widened": build.load_library, "dots": dots_code, "tiles": tile_code}[kernel]()
    if code is None or not code.vectors_ready():
        return None
    return packed_gemm.PackedProducts(code, "bf16", kernel)
